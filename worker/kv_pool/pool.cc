#include "worker/kv_pool/pool.h"

#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"
#include "common/status.h"

namespace kdt {
namespace {

// Room beyond the rows asked for that a sequence gets which has no hint or has outgrown it.
constexpr int64_t kGrowthRows = 128;

absl::Status NotFound(SequenceId id) {
  return absl::NotFoundError(absl::StrCat("KV pool: no sequence ", id));
}

}  // namespace

absl::StatusOr<std::unique_ptr<KvPool>> KvPool::Create(int64_t slots, int64_t max_sequences,
                                                       int64_t max_context) {
  if (slots < 1 || slots > std::numeric_limits<int32_t>::max()) {
    return absl::InvalidArgumentError(absl::StrCat("KV pool: slots ", slots, " not within 1 .. 2^31 - 1"));
  }
  if (max_sequences < 1) {
    return absl::InvalidArgumentError(absl::StrCat("KV pool: max_sequences ", max_sequences, " below 1"));
  }
  if (max_context < 1 || max_context > std::numeric_limits<int32_t>::max()) {
    return absl::InvalidArgumentError(
        absl::StrCat("KV pool: max_context ", max_context, " not within 1 .. 2^31 - 1"));
  }
  return std::make_unique<Pool>(slots, max_sequences, max_context);
}

Pool::Pool(int64_t slots, int64_t max_sequences, int64_t max_context)
    : slots_(slots),
      max_sequences_(max_sequences),
      max_context_(max_context),
      references_(slots + 1, 0),
      free_(slots + 1),
      open_(slots + 1) {
  Clear();
}

void Pool::Clear() {
  sequences_.clear();
  relocation_.reset();
  std::fill(references_.begin(), references_.end(), 0);
  for (FreeMap* map : {&free_, &open_}) {
    map->Clear();
    map->Add({1, static_cast<int32_t>(slots_)});  // slot 0 is the padding slot
  }
  shared_ = runs_ = tentative_ = 0;
  digest_ = 0;
}

absl::Status Pool::CheckNew(SequenceId id, int64_t expected_tokens) const {
  if (expected_tokens < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("KV pool: expected_tokens ", expected_tokens, " is negative"));
  }
  if (Alive(id))
    return absl::InvalidArgumentError(absl::StrCat("KV pool: sequence ", id, " is alive already"));
  if (static_cast<int64_t>(sequences_.size()) >= max_sequences_) {
    return absl::ResourceExhaustedError(
        absl::StrCat("KV pool: all ", max_sequences_, " sequences are in use"));
  }
  return absl::OkStatus();
}

absl::Status Pool::CreateSequence(SequenceId id, int64_t expected_tokens) {
  KDT_RETURN_IF_ERROR(CheckNew(id, expected_tokens));
  Sequence& sequence = sequences_[id];
  sequence.salt = pool_digest::Salt(id);
  sequence.expected = std::min(expected_tokens, max_context_);
  digest_ += pool_digest::Length(sequence.salt, 0);
  return absl::OkStatus();
}

absl::Status Pool::ForkSequence(SequenceId id, SequenceId parent_id, int64_t length,
                                int64_t expected_tokens) {
  const auto parent = sequences_.find(parent_id);
  if (parent == sequences_.end()) return NotFound(parent_id);
  if (length < 1 || length > parent->second.committed) {
    return absl::OutOfRangeError(absl::StrCat("KV pool: fork length ", length, " not within 1 .. ",
                                              parent->second.committed, " committed tokens of sequence ",
                                              parent_id));
  }
  KDT_RETURN_IF_ERROR(CreateSequence(id, expected_tokens));
  Sequence& sequence = sequences_[id];
  sequence.table.assign(parent->second.table.begin(), parent->second.table.begin() + length);
  sequence.committed = length;
  digest_ += pool_digest::Length(sequence.salt, length) - pool_digest::Length(sequence.salt, 0);
  for (int64_t p = 0; p < length; ++p) {
    const int32_t slot = sequence.table[p];
    const int32_t before = references_[slot]++;
    digest_ += pool_digest::Entry(sequence.salt, p, slot) + pool_digest::References(slot, before + 1) -
               pool_digest::References(slot, before);
    shared_ += before == 1;
    sequence.runs += p == 0 || slot != sequence.table[p - 1] + 1;
  }
  runs_ += sequence.runs;
  Unsettle();
  return absl::OkStatus();
}

absl::Status Pool::FreeSequence(SequenceId id) {
  const auto it = sequences_.find(id);
  if (it == sequences_.end()) return NotFound(id);
  if (relocation_ && relocation_->id == id) EndRelocation();
  Sequence& sequence = it->second;
  SetReserve(sequence, {});
  digest_ -= pool_digest::Length(sequence.salt, sequence.committed);
  tentative_ -= sequence.tentative();
  DropTail(sequence, 0);
  sequences_.erase(it);
  Unsettle();
  return absl::OkStatus();
}

absl::Status Pool::BeginRows(SequenceId id, int64_t rows) {
  const auto it = sequences_.find(id);
  if (it == sequences_.end()) return NotFound(id);
  Sequence& sequence = it->second;
  if (rows < 0) return absl::InvalidArgumentError(absl::StrCat("KV pool: rows ", rows, " is negative"));
  if (sequence.tentative() != 0) {
    return absl::FailedPreconditionError(absl::StrCat("KV pool: sequence ", id, " has uncommitted rows"));
  }
  if (rows > max_context_ - sequence.committed) {
    return absl::OutOfRangeError(absl::StrCat("KV pool: sequence ", id, " of ", sequence.committed,
                                              " tokens and ", rows, " rows pass the context limit ",
                                              max_context_));
  }
  if (rows > free_.count()) {
    return absl::ResourceExhaustedError(
        absl::StrCat("KV pool: ", rows, " rows for sequence ", id, " but ", free_.count(), " slots free"));
  }
  tentative_ += rows;
  TakeReserve(sequence, &rows);
  if (rows > 0 && !sequence.table.empty()) {
    // The reserve is used up, yet what lies behind it may have come free since.
    const int64_t next = sequence.table.back() + int64_t{1};
    const int64_t room = open_.RunAt(next, WantedRoom(sequence, rows));
    if (room > 0) SetReserve(sequence, TakeOpen(static_cast<int32_t>(next), room));
    TakeReserve(sequence, &rows);
  }
  while (rows > 0) {
    SetReserve(sequence, FindRoom(sequence, rows));
    TakeReserve(sequence, &rows);
  }
  return absl::OkStatus();
}

absl::Status Pool::Commit(SequenceId id, absl::Span<const int32_t> kept, std::vector<SlotMove>* moves) {
  const auto it = sequences_.find(id);
  if (it == sequences_.end()) return NotFound(id);
  Sequence& sequence = it->second;
  int64_t previous = -1;
  for (const int32_t row : kept) {
    if (row <= previous || row >= sequence.tentative()) {
      return absl::InvalidArgumentError(absl::StrCat("KV pool: kept row ", row, " of sequence ", id,
                                                     " behind row ", previous, " with ", sequence.tentative(),
                                                     " tentative rows"));
    }
    previous = row;
  }
  // Kept row i goes to position committed + i. Later rows only read positions at or behind their own target,
  // so nothing is overwritten before it is read.
  for (size_t i = 0; i < kept.size(); ++i) {
    if (kept[i] == static_cast<int32_t>(i)) continue;
    moves->push_back({sequence.table[sequence.committed + kept[i]], sequence.table[sequence.committed + i]});
    ++moved_rows_;
  }
  tentative_ -= sequence.tentative();
  digest_ -= pool_digest::Length(sequence.salt, sequence.committed);
  sequence.committed += static_cast<int64_t>(kept.size());
  digest_ += pool_digest::Length(sequence.salt, sequence.committed);

  // The dropped slots next to the committed ones are the room that the next rows grow into.
  const auto dropped = sequence.table.begin() + sequence.committed;
  if (dropped == sequence.table.end()) return absl::OkStatus();
  Extent reserve{*dropped, 1};
  for (auto slot = dropped + 1; slot != sequence.table.end() && *slot == reserve.begin + reserve.size;
       ++slot) {
    ++reserve.size;
  }
  const bool joins_old = reserve.begin + reserve.size == sequence.reserve.begin && sequence.reserve.size > 0;
  if (!joins_old) SetReserve(sequence, {});
  DropTail(sequence, sequence.committed);
  open_.Remove(reserve);
  sequence.reserve = {reserve.begin, reserve.size + (joins_old ? sequence.reserve.size : 0)};
  return absl::OkStatus();
}

absl::Span<const int32_t> Pool::Table(SequenceId id) const {
  const auto it = sequences_.find(id);
  KDT_CHECK(it != sequences_.end());
  return it->second.table;
}

int64_t Pool::Committed(SequenceId id) const {
  const auto it = sequences_.find(id);
  KDT_CHECK(it != sequences_.end());
  return it->second.committed;
}

KvPoolStats Pool::stats() const {
  KvPoolStats stats;
  stats.slots_total = slots_;
  stats.slots_used = slots_ - free_.count();
  stats.slots_shared = shared_;
  stats.sequences = static_cast<int64_t>(sequences_.size());
  stats.runs = runs_;
  if (free_.count() > 0) {
    stats.fragmentation = 1.0 - static_cast<double>(free_.longest()) / static_cast<double>(free_.count());
  }
  stats.moved_rows = moved_rows_;
  return stats;
}

// Gives the free slots of `extent`, which no map holds open, to the end of the table.
void Pool::Append(Sequence& sequence, Extent extent) {
  free_.Remove(extent);
  int64_t position = static_cast<int64_t>(sequence.table.size());
  if (extent.size > 0 && (position == 0 || sequence.table.back() + 1 != extent.begin)) {
    ++sequence.runs;
    ++runs_;
  }
  for (int32_t slot = extent.begin; slot < extent.begin + extent.size; ++slot) {
    sequence.table.push_back(slot);
    references_[slot] = 1;
    digest_ += pool_digest::Entry(sequence.salt, position++, slot);
  }
}

void Pool::TakeReserve(Sequence& sequence, int64_t* rows) {
  const int32_t size = static_cast<int32_t>(std::min<int64_t>(*rows, sequence.reserve.size));
  Append(sequence, {sequence.reserve.begin, size});
  sequence.reserve.begin += size;
  sequence.reserve.size -= size;
  *rows -= size;
}

int64_t Pool::WantedRoom(const Sequence& sequence, int64_t rows) const {
  const int64_t size = static_cast<int64_t>(sequence.table.size());
  const int64_t ahead = sequence.expected - size;
  return ahead >= rows ? ahead : std::min(rows + kGrowthRows, max_context_ - size);
}

// An extent taken out of the open slots for at most `rows` rows and what the sequence is expected to need
// behind them: the lowest that holds all; else the longest if it holds the rows; else half of the longest
// reserve of another sequence; else the longest piece there is. At least one slot is free.
Extent Pool::FindRoom(const Sequence& sequence, int64_t rows) {
  const int64_t wanted = WantedRoom(sequence, rows);
  int32_t begin = open_.LowestFit(wanted);
  if (begin > 0) return TakeOpen(begin, wanted);
  do {
    const int32_t longest = open_.longest();
    if (longest >= rows) return TakeOpen(open_.LowestFit(longest), std::min<int64_t>(longest, wanted));
  } while (GiveUpReserve(rows));
  while (open_.count() == 0) KDT_CHECK(GiveUpReserve(1));
  const int32_t longest = open_.longest();
  return TakeOpen(open_.LowestFit(longest), std::min<int64_t>(longest, rows));
}

Extent Pool::TakeOpen(int32_t begin, int64_t size) {
  const Extent extent{begin, static_cast<int32_t>(size)};
  open_.Remove(extent);
  return extent;
}

// Opens the upper half of the longest reserve, or a relocation's target. False when no reserve of at least
// `rows` is left.
bool Pool::GiveUpReserve(int64_t rows) {
  if (relocation_ && relocation_->target.size >= rows) {
    EndRelocation();
    return true;
  }
  Sequence* longest = nullptr;
  for (auto& [id, sequence] : sequences_) {
    if (longest == nullptr || sequence.reserve.size > longest->reserve.size) longest = &sequence;
  }
  if (longest == nullptr || longest->reserve.size < rows) return false;
  const int32_t given = static_cast<int32_t>(std::max<int64_t>(rows, longest->reserve.size / 2));
  longest->reserve.size -= given;
  open_.Add({longest->reserve.begin + longest->reserve.size, given});
  return true;
}

// Cuts the table to `length` positions; slots without another reference become free and open.
void Pool::DropTail(Sequence& sequence, int64_t length) {
  Extent freed;
  const auto flush = [&] {
    free_.Add(freed);
    open_.Add(freed);
    freed = {};
  };
  int64_t ended_runs = 0;
  for (int64_t p = length; p < static_cast<int64_t>(sequence.table.size()); ++p) {
    const int32_t slot = sequence.table[p];
    ended_runs += p == 0 || slot != sequence.table[p - 1] + 1;
    const int32_t before = references_[slot]--;
    digest_ -= pool_digest::Entry(sequence.salt, p, slot);
    if (before > 1) {
      digest_ += pool_digest::References(slot, before - 1) - pool_digest::References(slot, before);
      shared_ -= before == 2;
      continue;
    }
    if (freed.size > 0 && slot == freed.begin + freed.size) {
      ++freed.size;
    } else {
      flush();
      freed = {slot, 1};
    }
  }
  flush();
  sequence.runs -= ended_runs;
  runs_ -= ended_runs;
  sequence.table.resize(length);
}

// Opens the old reserve; the new one has been taken out of the open slots before.
void Pool::SetReserve(Sequence& sequence, Extent reserve) {
  open_.Add(sequence.reserve);
  sequence.reserve = reserve;
}

void Pool::Unsettle() {
  for (auto& [id, sequence] : sequences_) sequence.settled_runs = -1;
}

}  // namespace kdt
