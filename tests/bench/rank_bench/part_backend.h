// A backend and a collective that tell a PartClock what each op belongs to and pass it on.
#pragma once

#include <memory>

#include "kdt/kernels/backend.h"
#include "tests/bench/rank_bench/part_clock.h"
#include "worker/collective/collective.h"

namespace kdt::bench {

std::unique_ptr<kernels::Backend> MakePartBackend(kernels::Backend* inner, PartClock* clock);
std::unique_ptr<Collective> MakePartCollective(Collective* inner, PartClock* clock);

}  // namespace kdt::bench
