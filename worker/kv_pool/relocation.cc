// Tier 1: moving rows so that a sequence is one or few runs again.
//
// What is moved is a window of positions that the same sequences share. Between two positions with different
// sharers a break may be unavoidable (two forks cannot both continue right behind their common prefix), so a
// window never crosses such a point, and it is moved only when the number of runs falls by it. Hence
// relocation comes to rest.
#include <algorithm>

#include "common/status.h"
#include "worker/kv_pool/pool.h"

namespace kdt {
namespace {

// A run of this many rows stays where it is: contiguity beyond it buys nothing that would pay for the copy.
constexpr int64_t kLongRun = 4096;

}  // namespace

std::vector<SlotMove> Pool::Relocate(int64_t max_rows) {
  std::vector<SlotMove> moves;
  if (tentative_ != 0) return moves;  // a step is between BeginRows and Commit
  ++relocate_calls_;
  while (max_rows > 0 && (relocation_ || PlanRelocation())) {
    Relocation& plan = *relocation_;
    if (plan.to_end) plan.end = sequences_.at(plan.id).committed;
    const int64_t rows = std::min({max_rows, plan.end - plan.position, int64_t{plan.target.size}});
    MoveRows(rows, &moves);
    max_rows -= rows;
    if (plan.position == plan.end || plan.target.size == 0) EndRelocation();
  }
  // Only now, so that no slot is a source and a target of the same call.
  Extent freed;
  for (const SlotMove& move : moves) {
    if (freed.size > 0 && move.from == freed.begin + freed.size) {
      ++freed.size;
      continue;
    }
    free_.Add(freed);
    open_.Add(freed);
    freed = {move.from, 1};
  }
  free_.Add(freed);
  open_.Add(freed);
  moved_rows_ += static_cast<int64_t>(moves.size());
  return moves;
}

// Reserves a target for the most fragmented sequence that can be helped. False: nothing to do.
bool Pool::PlanRelocation() {
  while (true) {
    Sequences::value_type* worst = nullptr;
    for (auto& entry : sequences_) {
      const Sequence& sequence = entry.second;
      if (sequence.runs < 2 || sequence.runs == sequence.settled_runs) continue;
      if (sequence.relocated == relocate_calls_) continue;  // no row moves twice in a call
      if (worst == nullptr || sequence.runs > worst->second.runs) worst = &entry;
    }
    if (worst == nullptr) return false;
    Sequence& sequence = worst->second;
    const Window window = BestWindow(sequence, open_.longest());
    if (window.gain < 1) {
      sequence.settled_runs = sequence.runs;
      continue;
    }
    const int64_t rows = window.end - window.begin;
    Relocation plan{worst->first, window.begin, window.end};
    plan.to_end = window.end == sequence.committed && references_[sequence.table.back()] == 1;
    int64_t wanted = plan.to_end ? std::max(rows, sequence.expected - window.begin) : rows;
    int32_t begin = open_.LowestFit(wanted);
    if (begin < 0) {
      wanted = rows;
      begin = open_.LowestFit(wanted);
    }
    plan.target = TakeOpen(begin, wanted);
    relocation_ = plan;
    return true;
  }
}

// The window of at most `max_rows` rows whose move saves the most runs.
Pool::Window Pool::BestWindow(const Sequence& sequence, int64_t max_rows) const {
  struct Piece {
    int64_t begin, end;
    int32_t references;
  };
  std::vector<Piece> pieces;  // of consecutive slots with the same sharers
  const std::vector<int32_t>& table = sequence.table;
  for (int64_t p = 0; p < sequence.committed; ++p) {
    const int32_t references = references_[table[p]];
    if (p > 0 && table[p] == table[p - 1] + 1 && references == pieces.back().references) {
      ++pieces.back().end;
    } else {
      pieces.push_back({p, p + 1, references});
    }
  }

  Window best;
  size_t first = 0;
  for (size_t last = 0; last < pieces.size(); ++last) {
    if (pieces[last].end - pieces[last].begin >= kLongRun) {
      first = last + 1;
      continue;
    }
    if (pieces[first].references != pieces[last].references) first = last;
    while (first < last && pieces[last].end - pieces[first].begin > max_rows) ++first;
    if (pieces[last].end - pieces[first].begin > max_rows) continue;
    const int64_t begin = pieces[first].begin, end = pieces[last].end;
    int64_t gain = static_cast<int64_t>(last - first);
    if (gain <= best.gain) continue;
    gain -= begin > 0 && table[begin - 1] + 1 == table[begin];
    gain -= ContinuesBehind(sequence, end);
    if (gain > best.gain) best = {begin, end, gain};
  }
  return best;
}

// Whether a sequence that shares position - 1 with `sequence` goes on in the very next slot.
bool Pool::ContinuesBehind(const Sequence& sequence, int64_t position) const {
  const int32_t last = sequence.table[position - 1];
  for (const auto& [id, other] : sequences_) {
    if (position < static_cast<int64_t>(other.table.size()) && other.table[position - 1] == last &&
        other.table[position] == last + 1) {
      return true;
    }
  }
  return false;
}

void Pool::MoveRows(int64_t rows, std::vector<SlotMove>* moves) {
  Relocation& plan = *relocation_;
  const Sequence& owner = sequences_.at(plan.id);
  const size_t start = moves->size();
  free_.Remove({plan.target.begin, static_cast<int32_t>(rows)});
  for (int64_t i = 0; i < rows; ++i) {
    const int32_t from = owner.table[plan.position + i], to = plan.target.begin + static_cast<int32_t>(i);
    moves->push_back({from, to});
    const int32_t references = references_[from];
    digest_ += pool_digest::References(to, references) - pool_digest::References(from, references);
    references_[to] = references;
    references_[from] = 0;
  }
  const absl::Span<const SlotMove> moved = absl::MakeConstSpan(*moves).subspan(start);
  for (auto& [id, sequence] : sequences_) Redirect(sequence, plan.position, moved);
  plan.position += rows;
  plan.target.begin += static_cast<int32_t>(rows);
  plan.target.size -= static_cast<int32_t>(rows);
}

// Switches the table's entries from `position` on, as far as they name the moved slots; sharers share a
// prefix, so the first entry that does not ends it.
void Pool::Redirect(Sequence& sequence, int64_t position, absl::Span<const SlotMove> moves) {
  std::vector<int32_t>& table = sequence.table;
  const int64_t size = static_cast<int64_t>(table.size());
  int64_t count = 0;
  while (count < static_cast<int64_t>(moves.size()) && position + count < size &&
         table[position + count] == moves[count].from) {
    ++count;
  }
  if (count == 0) return;
  sequence.relocated = relocate_calls_;
  const auto breaks = [&] {
    int64_t result = 0;
    for (int64_t p = std::max<int64_t>(position, 1); p < std::min(position + count + 1, size); ++p) {
      result += table[p] != table[p - 1] + 1;
    }
    return result;
  };
  const int64_t before = breaks();
  for (int64_t i = 0; i < count; ++i) {
    const int64_t p = position + i;
    digest_ += pool_digest::Entry(sequence.salt, p, moves[i].to) -
               pool_digest::Entry(sequence.salt, p, moves[i].from);
    table[p] = moves[i].to;
  }
  const int64_t gained = breaks() - before;
  sequence.runs += gained;
  runs_ += gained;
}

// Done or given up: what is left of the target becomes the sequence's room to grow when it is in the right
// place, else open.
void Pool::EndRelocation() {
  const Relocation plan = *relocation_;
  relocation_.reset();
  Sequence& sequence = sequences_.at(plan.id);
  if (plan.to_end && plan.position == static_cast<int64_t>(sequence.table.size()) && plan.target.size > 0 &&
      sequence.table.back() + 1 == plan.target.begin) {
    SetReserve(sequence, plan.target);
  } else {
    open_.Add(plan.target);
  }
}

}  // namespace kdt
