// What is checked on a real group; each check starts the groups it needs, prints what it found, and returns
// it as JSON with "ok" and "failures".
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/gpu/divergence.h"
#include "tests/gpu/streams.h"
#include "tests/support/served_group.h"

namespace kdt::testing {

struct CheckOptions {
  ServedGroupOptions subject;  // tp included
  std::string prompts_file;
  size_t requests = 120;
  uint32_t tokens = 32;
  size_t concurrency = 16;
  double tolerance = 0;
  std::vector<Speculation> settings;
  uint64_t soak_steps = 3000;
};

// The streams that are right: a CPU group's with speculation off.
class Reference {
 public:
  explicit Reference(ServedGroup* group, size_t concurrency) : group_(group), concurrency_(concurrency) {}

  // Streams of these requests with the log-probabilities that gaps are read from.
  std::vector<Stream> Run(const std::vector<PlannedRequest>& requests) const;
  v1::Generation::Stub& stub() const { return group_->stub(); }
  Probe probe() const { return ProbeServer(group_->stub()); }

 private:
  ServedGroup* group_;
  size_t concurrency_;
};

// The report of one comparison: counts, rate per 10,000 tokens, every gap. Failures go to `failures`.
nlohmann::json Report(const std::string& name, const Comparison& comparison, double tolerance,
                      nlohmann::json* failures);

// Token streams at one tp, for every setting of the speculation.
nlohmann::json CheckDivergence(const CheckOptions& options, const Reference& reference);
// Log-probabilities of prompts, one request at a time: the prefill's error at every position.
nlohmann::json CheckPrompts(const CheckOptions& options, const Reference& reference);
// A worker is killed in the middle and the launcher restarts the group.
nlohmann::json CheckLoss(const CheckOptions& options, const Reference& reference);
// A pool too small: what cannot fit is refused, what must wait is not lost.
nlohmann::json CheckFullPool(const CheckOptions& options, const Reference& reference);
// More rows than one step takes.
nlohmann::json CheckLargeBatch(const CheckOptions& options, const Reference& reference);
// --attention=validate while requests run: what the fast kernel's errors are, and that serving goes on.
nlohmann::json CheckValidate(const CheckOptions& options, const Reference& reference);
// Thousands of steps; memory of the workers and of the GPU before and behind.
nlohmann::json CheckSoak(const CheckOptions& options, const Reference& reference);

}  // namespace kdt::testing
