// The scheduler's state of a request and of each of its n samples.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "coordinator/ddtree/ddtree.h"
#include "coordinator/scheduler/output_stream.h"
#include "coordinator/scheduler/request.h"

namespace kdt {

struct Request;

enum class SampleState { kWaiting, kRunning, kDone };

struct Sample {
  Request* request = nullptr;
  uint32_t index = 0;
  SampleState state = SampleState::kWaiting;
  // Prompt, then every token drawn, also those behind a stop: what the sequence's K/V holds or will hold.
  std::vector<uint32_t> tokens;
  uint32_t kept = 0;          // generated tokens that are part of the answer
  uint64_t sequence_id = 0;   // 0: none on the ranks
  uint32_t committed = 0;     // tokens whose K/V the ranks hold
  bool keep_sequence = true;  // once done: keep the K/V for the prefix cache
  v1::DraftTopK draft;        // guesses behind tokens.back(); k = 0: none
  TreeBuilder tree_builder;
  const Tree* tree = nullptr;  // grown from draft for the step to come; null: none
  uint32_t nodes = 0;          // drafted nodes of it that are verified
  std::unique_ptr<OutputStream> output;
  v1::SpeculationStats speculation;
  int64_t admitted_us = 0;  // first admission
  int64_t first_token_us = 0;
  int64_t last_token_us = 0;

  uint32_t prompt_length() const;
  uint32_t generated() const { return static_cast<uint32_t>(tokens.size()) - prompt_length(); }
  // Tokens that have yet to go through the model.
  uint32_t pending() const { return static_cast<uint32_t>(tokens.size()) - committed; }
  // The next step of a sample with only its root pending verifies a tree; any other one is prefill.
  bool decoding() const { return pending() == 1 && generated() > 0; }
};

struct Request {
  uint64_t id = 0;  // arrival order
  RequestSpec spec;
  std::shared_ptr<RequestSink> sink;
  std::vector<std::unique_ptr<Sample>> samples;
  uint32_t unfinished = 0;
  bool ended = false;                                 // the sink has got its End
  uint32_t cached_tokens = 0;                         // of the prompt, found in the prefix cache
  std::vector<v1::PositionLogprobs> prompt_logprobs;  // [prompt - 1] once complete
  int64_t submitted_us = 0;
};

inline uint32_t Sample::prompt_length() const { return static_cast<uint32_t>(request->spec.prompt.size()); }

// Who is served first, and who is preempted last: by priority, then by arrival.
inline bool Senior(const Sample* a, const Sample* b) {
  if (a->request->spec.priority != b->request->spec.priority) {
    return a->request->spec.priority > b->request->spec.priority;
  }
  if (a->request->id != b->request->id) return a->request->id < b->request->id;
  return a->index < b->index;
}

}  // namespace kdt
