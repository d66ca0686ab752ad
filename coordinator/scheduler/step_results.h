// What a step's answer means for each sample: tokens gained, the earliest stop among them.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "coordinator/scheduler/sample.h"
#include "coordinator/scheduler/sequence_store.h"
#include "coordinator/scheduler/step_builder.h"

namespace kdt {

// Tokens of one sample that were committed in a step and belong to its answer, unless a stop string among
// them ends it earlier. Texts are made from it after the next step has been sent.
struct Gained {
  Sample* sample = nullptr;
  std::vector<uint32_t> tokens;
  std::vector<v1::PositionLogprobs> logprobs;               // one for each token, when asked for
  v1::FinishReason finish = v1::FINISH_REASON_UNSPECIFIED;  // set: the last token ends the answer
  std::optional<uint32_t> stop_token;
  bool tree = false;      // from a verified tree
  uint32_t drafted = 0;   // nodes of it, the root not counted
  uint32_t accepted = 0;  // of those
  double gap_s = 0;       // since the sample's tokens before, or its submission; set by the scheduler
  bool first = false;     // nothing came before; set by the scheduler
  std::string error;      // not empty: the ranks failed this sample
};

// Takes a step's answer in: commits rows in the store, adds tokens and drafts to the samples, tells the
// speculator what was accepted, appends to `gained`. INTERNAL when the answer does not fit the plan, which
// ends the epoch.
absl::Status ApplyStep(const std::vector<PlanItem>& plan, v1::StepResponse* response, uint32_t vocab_size,
                       SequenceStore* store, Speculator* speculator, std::vector<Gained>* gained);

}  // namespace kdt
