// What the ranks have answered in one epoch, whether they agree, and which of them is to blame when it fails.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace kdt {

namespace v1 {
class StepResponse;
}  // namespace v1

class EpochProgress {
 public:
  struct Blame {
    uint32_t rank = 0;
    std::string what;
  };

  // A new epoch; no step has been sent.
  void Begin(size_t ranks);
  // Of the step that is sent now. The one before it must have been answered by rank 0.
  uint64_t NextStep() { return ++step_; }
  uint64_t step() const { return step_; }  // last one sent
  uint64_t answered(uint32_t rank) const { return ranks_[rank].answered; }
  bool AllAnswered(uint64_t step) const;

  // Takes a rank's answer in and compares its digest with rank 0's as soon as both are there. False: the
  // answer is a failure.
  bool Take(uint32_t rank, const v1::StepResponse& response);
  // The first reason of a rank's own counts. `waited_for_peer`: it is that another rank did not come.
  void Fail(uint32_t rank, std::string what, bool waited_for_peer = false);
  void Died(uint32_t rank, std::string what);
  void FailLate(int step_timeout_ms);  // all ranks that owe the last step's answer

  bool failed() const { return failed_; }
  bool died(uint32_t rank) const { return ranks_[rank].died > 0; }
  bool any_died() const { return deaths_ > 0; }
  // Once failed: the first that died, else one with an error of its own, else one that owes an answer while
  // others complain.
  Blame blame() const;

 private:
  struct Rank {
    uint64_t answered = 0;  // last step it answered
    uint64_t digest = 0;    // after that step
    std::string failure;    // empty: none
    bool waited_for_peer = false;
    int died = 0;  // as the died-th of all; 0: it has not
  };
  void Compare(uint32_t rank);

  uint64_t step_ = 0;
  bool failed_ = false;
  int deaths_ = 0;
  std::vector<Rank> ranks_;
  uint64_t rank0_digest_before_ = 0;  // after the step before the last that rank 0 answered
};

}  // namespace kdt
