// Padding changes no bit of the real rows.
#include "tests/worker/engine/step_mix.h"

namespace kdt::testing {

TEST_CASE("padded shapes give the bits of exact ones") {
  std::vector<std::string> seen;
  for (const StepMode mode : {StepMode::kExact, StepMode::kEager}) {
    EngineOptions options = GoldenOptions(true);
    options.step_mode = mode;
    auto group = EngineGroup::Start(options, 1);
    REQUIRE(group.ok());
    seen.push_back(RunMix(**group, false));
    seen.push_back(RunMix(**group, true));
  }
  CHECK(seen[0] == seen[2]);
  CHECK(seen[1] == seen[3]);
}

}  // namespace kdt::testing
