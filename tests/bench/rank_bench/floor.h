// The time that a step of one rank cannot do without: each weight and KV byte read once, the FLOP, and the
// reductions between ranks.
#pragma once

#include <cstdint>

#include "common/drafter_config.h"
#include "common/model_config.h"
#include "worker/model/shard.h"

namespace kdt::bench {

struct Machine {
  double bytes_per_s = 4.1e12;
  double flop_per_s = 638e12;
  double reduce_us = 8;
};

struct Load {
  int tp = 8;
  MoeSharding sharding = MoeSharding::kTensor;
  int64_t rows = 1;     // in all
  int64_t batch = 1;    // sequences
  int64_t context = 0;  // of each
  double experts = 0;   // distinct ones a layer that the rows choose; 0: as many as even draws would
};

struct Cost {
  double weight_bytes = 0;  // experts included
  double expert_bytes = 0;
  double kv_bytes = 0;
  double flop = 0;
  double experts = 0;  // distinct ones a layer that the rows choose
  int64_t reductions = 0;
  double us = 0;  // of everything, part after part the larger of bytes and FLOP, and the reductions
};

// Experts that a layer's rows choose, drawn evenly.
double DistinctExperts(double experts, double top_k, double rows);

// The target's forward, logits for every row. With whole experts the rank has the mean rank's share of them.
Cost TargetCost(const ModelConfig& config, const Load& load, const Machine& machine);
// Context K/V of one kept row and a block for every sequence.
Cost DrafterCost(const DrafterConfig& drafter, const ModelConfig& target, const Load& load,
                 const Machine& machine);

}  // namespace kdt::bench
