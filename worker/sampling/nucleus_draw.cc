#include "worker/sampling/nucleus_draw.h"

#include <bit>
#include <cmath>

#include "common/rng.h"
#include "common/status.h"

namespace kdt {
namespace {

uint32_t Word(float value) { return std::bit_cast<uint32_t>(value); }
uint32_t Word(int32_t value) { return std::bit_cast<uint32_t>(value); }

// This rank's winner among its tokens that are better than `bound`.
void FindWinner(NucleusRow& row, const Candidate& bound, int64_t vocab_begin) {
  row.local_id = -1;
  for (size_t i = 0; i < row.values.size(); ++i) {
    const Candidate token{static_cast<int32_t>(vocab_begin + static_cast<int64_t>(i)), row.values[i]};
    if (!(token < bound)) continue;
    const float noisy =
        token.value + GumbelNoise(row.params->seed, row.position, static_cast<uint32_t>(token.id));
    if (row.local_id >= 0 && noisy <= row.local_noisy) continue;
    row.local_id = token.id;
    row.local_noisy = noisy;
  }
}

// Sum of exp(value - maximum) over this rank's tokens that are better than `winner`.
double SumOfBetter(const NucleusRow& row, const Candidate& winner, int64_t vocab_begin) {
  double sum = 0;
  for (size_t i = 0; i < row.values.size(); ++i) {
    const Candidate token{static_cast<int32_t>(vocab_begin + static_cast<int64_t>(i)), row.values[i]};
    if (token < winner) sum += std::exp(static_cast<double>(token.value) - row.total.max);
  }
  return sum;
}

}  // namespace

absl::Status DrawFromNuclei(std::span<NucleusRow> rows, int64_t vocab_begin, WordGather& gather,
                            Collective& collective) {
  constexpr size_t kWinnerWords = 3;
  constexpr size_t kSumWords = 2;
  std::vector<NucleusRow*> pending;
  for (NucleusRow& row : rows) pending.push_back(&row);
  std::vector<uint32_t> words;
  while (!pending.empty()) {
    words.clear();
    for (const NucleusRow* row : pending) {
      const float value = row->local_id < 0 ? 0 : row->values[row->local_id - vocab_begin];
      words.insert(words.end(), {Word(row->local_id), Word(row->local_noisy), Word(value)});
    }
    KDT_ASSIGN_OR_RETURN(const auto winners, gather.Gather(words, collective));
    std::vector<Candidate> winner(pending.size(), Candidate{-1, 0});
    for (size_t i = 0; i < pending.size(); ++i) {
      float best = 0;
      for (int rank = 0; rank < collective.size(); ++rank) {
        const uint32_t* at = winners.data() + (rank * pending.size() + i) * kWinnerWords;
        const auto id = std::bit_cast<int32_t>(at[0]);
        const auto noisy = std::bit_cast<float>(at[1]);
        // Ranks rise with ids: a tie stays with the lower id.
        if (id < 0 || (winner[i].id >= 0 && noisy <= best)) continue;
        best = noisy;
        winner[i] = {id, std::bit_cast<float>(at[2])};
      }
    }

    words.clear();
    for (size_t i = 0; i < pending.size(); ++i) {
      const auto bits = std::bit_cast<uint64_t>(SumOfBetter(*pending[i], winner[i], vocab_begin));
      words.insert(words.end(), {static_cast<uint32_t>(bits), static_cast<uint32_t>(bits >> 32)});
    }
    KDT_ASSIGN_OR_RETURN(const auto sums, gather.Gather(words, collective));
    std::vector<NucleusRow*> left;
    for (size_t i = 0; i < pending.size(); ++i) {
      double better = 0;
      for (int rank = 0; rank < collective.size(); ++rank) {
        const uint32_t* at = sums.data() + (rank * pending.size() + i) * kSumWords;
        better += std::bit_cast<double>(uint64_t{at[0]} | uint64_t{at[1]} << 32);
      }
      NucleusRow& row = *pending[i];
      const SamplingParams& params = *row.params;
      const double weight = std::exp(static_cast<double>(winner[i].value) - row.total.max);
      const bool in_top_p = params.top_p >= 1 || better < params.top_p * row.total.sum;
      // The best token is always kept.
      if (better == 0 || (in_top_p && weight >= params.min_p)) {
        row.drawn = winner[i].id;
        continue;
      }
      FindWinner(row, winner[i], vocab_begin);
      left.push_back(&row);
    }
    pending = std::move(left);
  }
  return absl::OkStatus();
}

}  // namespace kdt
