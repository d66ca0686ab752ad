// How loading tells how far it is.
#pragma once

#include <cstdint>
#include <functional>

namespace kdt {

// Called with the bytes copied so far and the bytes of this rank's shard in all.
using LoadProgress = std::function<void(uint64_t loaded, uint64_t total)>;

}  // namespace kdt
