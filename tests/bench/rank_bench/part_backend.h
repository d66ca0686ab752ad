// A backend and a collective that tell a PartClock what each op belongs to and pass it on.
#pragma once

#include <memory>

#include "kdt/kernels/backend.h"
#include "tests/bench/rank_bench/expert_tap.h"
#include "tests/bench/rank_bench/part_clock.h"
#include "worker/collective/collective.h"

namespace kdt::bench {

// While the clock is on, `tap` takes what the routers choose. `prepare_seconds` sums the time of bringing
// experts' weights into the backend's layout, the device waited for.
std::unique_ptr<kernels::Backend> MakePartBackend(kernels::Backend* inner, PartClock* clock, ExpertTap* tap,
                                                  double* prepare_seconds);
// Of `ranks` ranks those behind `inner`'s are not there: they gather zeros.
std::unique_ptr<Collective> MakePartCollective(Collective* inner, PartClock* clock, int ranks);

}  // namespace kdt::bench
