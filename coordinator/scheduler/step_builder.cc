#include "coordinator/scheduler/step_builder.h"

#include <algorithm>

#include "common/status.h"

namespace kdt {

void StepBuilder::Build(std::vector<Sample*>* running, v1::StepRequest* request, std::vector<PlanItem>* plan,
                        std::vector<Sample*>* preempted) {
  running_ = running;
  request_ = request;
  plan_ = plan;
  preempted_ = preempted;
  request->Clear();
  plan->clear();
  planned_.clear();
  roots_.clear();
  reserved_slots_ = 0;
  rows_left_ = limits_.max_rows;
  // Were the most senior sample's prompt to come behind the others' roots, they could take every slot from
  // it.
  if (!running->empty() && !running->front()->decoding()) AddChunk(running->front());
  AddRoots();
  PlanTrees();
  AddChunks();
  for (Sample* sample : roots_) AddTreeItem(sample);
  store_->TakeOps(request);
}

// Every decoding sample that gets a slot takes part, seniors first.
void StepBuilder::AddRoots() {
  // Preemption takes from the end of *running_, which lies behind the sample in hand.
  for (size_t i = 0; i < running_->size() && rows_left_ > 0; ++i) {
    Sample* sample = (*running_)[i];
    if (!sample->decoding() || !Reserve(sample, 1)) continue;
    --rows_left_;
    planned_.push_back(sample);
    roots_.push_back(sample);
  }
}

// Rows that prompts could use, at most half of those left: trees shrink for prompts, but do not vanish.
uint32_t StepBuilder::WantedChunkRows() const {
  uint64_t wanted = 0;
  for (const Sample* sample : *running_) {
    const bool planned = !planned_.empty() && planned_.front() == sample;
    if (!sample->decoding() && !planned) wanted += std::min(sample->pending(), prefill_chunk_);
  }
  return static_cast<uint32_t>(std::min<uint64_t>(wanted, rows_left_ / 2));
}

// Nodes need slots until the walk; the cache makes room for them, but nobody is preempted for a guess.
void StepBuilder::PlanTrees() {
  const uint32_t chunk_rows = WantedChunkRows();
  speculator_->Plan(roots_, chunk_rows, rows_left_ - chunk_rows);
  uint64_t nodes = 0;
  for (const Sample* sample : roots_) nodes += sample->nodes;
  if (nodes == 0) return;
  if (!store_->MakeRoom(reserved_slots_ + nodes)) {
    const uint64_t each = (store_->free_slots() - reserved_slots_) / roots_.size();
    nodes = 0;
    for (Sample* sample : roots_) {
      sample->nodes = static_cast<uint32_t>(std::min<uint64_t>(sample->nodes, each));
      nodes += sample->nodes;
    }
  }
  reserved_slots_ += nodes;
  rows_left_ -= static_cast<uint32_t>(nodes);
}

void StepBuilder::AddChunks() {
  for (size_t i = 0; i < running_->size() && rows_left_ > 0; ++i) {
    Sample* sample = (*running_)[i];
    const bool planned = !planned_.empty() && planned_.front() == sample;
    if (!sample->decoding() && !planned) AddChunk(sample);
  }
}

void StepBuilder::AddChunk(Sample* sample) {
  const uint32_t wanted = std::min({sample->pending(), prefill_chunk_, rows_left_});
  store_->MakeRoom(reserved_slots_ + wanted);
  const uint64_t free = store_->free_slots() - reserved_slots_;
  const uint32_t rows = std::max<uint32_t>(1, static_cast<uint32_t>(std::min<uint64_t>(wanted, free)));
  if (!Reserve(sample, rows)) return;
  rows_left_ -= rows;
  planned_.push_back(sample);

  const RequestSpec& spec = sample->request->spec;
  PlanItem item{sample, /*tree=*/false, rows == sample->pending(), false, sample->committed, rows};
  v1::PrefillChunk* chunk = request_->add_prefill();
  chunk->set_sequence_id(sample->sequence_id);
  chunk->set_start(sample->committed);
  const auto first = sample->tokens.begin() + sample->committed;
  chunk->mutable_tokens()->Add(first, first + rows);
  chunk->set_sample(item.samples);
  if (item.samples) chunk->set_draft_top_k(speculator_->DraftTopK(*sample));
  // Sample 0 tells them for all; rows from the last prompt token on predict generated tokens.
  if (spec.prompt_logprobs > 0 && sample->index == 0 && sample->committed + 1 < sample->prompt_length()) {
    chunk->set_prompt_logprobs(spec.prompt_logprobs);
    if (!item.samples) chunk->set_next_token(sample->tokens[sample->committed + rows]);
    item.has_result = true;
  }
  item.has_result = item.has_result || item.samples;
  plan_->push_back(item);
}

void StepBuilder::AddTreeItem(Sample* sample) {
  v1::TreeVerify* tree = request_->add_verify();
  tree->set_sequence_id(sample->sequence_id);
  tree->set_start(sample->committed);
  tree->add_tokens(sample->tokens.back());
  for (uint32_t node = 1; node <= sample->nodes; ++node) {
    tree->add_tokens(sample->tree->tokens[node]);
    tree->add_parents(static_cast<uint32_t>(sample->tree->parents[node]));
  }
  tree->set_draft_top_k(speculator_->DraftTopK(*sample));
  plan_->push_back({sample, /*tree=*/true, true, true, sample->committed, 1 + sample->nodes});
}

bool StepBuilder::Reserve(Sample* sample, uint32_t slots) {
  while (!store_->MakeRoom(reserved_slots_ + slots)) {
    if (!PreemptJunior(sample)) return false;
  }
  reserved_slots_ += slots;
  return true;
}

bool StepBuilder::PreemptJunior(const Sample* senior) {
  for (size_t i = running_->size(); i-- > 0;) {
    Sample* junior = (*running_)[i];
    if (junior == senior) return false;
    if (std::find(planned_.begin(), planned_.end(), junior) != planned_.end()) continue;
    store_->Free(junior->sequence_id);
    junior->sequence_id = 0;
    junior->committed = 0;
    junior->draft.Clear();
    junior->state = SampleState::kWaiting;
    running_->erase(running_->begin() + static_cast<std::ptrdiff_t>(i));
    preempted_->push_back(junior);
    return true;
  }
  return false;
}

}  // namespace kdt
