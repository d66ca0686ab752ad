// Chooses the rows of the next step: a root or a tree for every decoding sample, then chunks of prompts.
#pragma once

#include <cstdint>
#include <vector>

#include "coordinator/scheduler/sample.h"
#include "coordinator/scheduler/sequence_store.h"
#include "coordinator/scheduler/speculator.h"

namespace kdt {

// One sample's part in a step, in the order of the request's items (chunks, then trees).
struct PlanItem {
  Sample* sample = nullptr;
  bool tree = false;
  bool samples = false;     // chunk: the token behind it is drawn
  bool has_result = false;  // the ranks answer it
  uint32_t start = 0;       // position of its first row
  uint32_t rows = 0;
};

class StepBuilder {
 public:
  StepBuilder(SequenceStore* store, Speculator* speculator, uint32_t prefill_chunk)
      : store_(store), speculator_(speculator), prefill_chunk_(prefill_chunk) {}

  void Reset(const GroupLimits& limits) { limits_ = limits; }

  // `running`, seniors first, all with a sequence. Fills request and plan. When the slots do not suffice,
  // cached sequences are evicted, then junior samples preempted: they lose their sequence and are moved from
  // `running` to `preempted`, to be prefilled again later with what they generated. The most senior sample
  // always gets a row, so there is always progress. A step is never planned that a rank would have to refuse.
  void Build(std::vector<Sample*>* running, v1::StepRequest* request, std::vector<PlanItem>* plan,
             std::vector<Sample*>* preempted);

 private:
  bool Reserve(Sample* sample, uint32_t slots);
  bool PreemptJunior(const Sample* senior);
  void AddRoots();
  uint32_t WantedChunkRows() const;
  void PlanTrees();
  void AddChunks();
  void AddChunk(Sample* sample);
  void AddTreeItem(Sample* sample);

  SequenceStore* store_;
  Speculator* speculator_;
  const uint32_t prefill_chunk_;
  GroupLimits limits_;

  // Of the Build in hand.
  std::vector<Sample*>* running_ = nullptr;
  v1::StepRequest* request_ = nullptr;
  std::vector<PlanItem>* plan_ = nullptr;
  std::vector<Sample*>* preempted_ = nullptr;
  std::vector<Sample*> planned_;  // samples that have rows in this step and cannot be preempted
  std::vector<Sample*> roots_;
  uint64_t reserved_slots_ = 0;
  uint32_t rows_left_ = 0;
};

}  // namespace kdt
