// Segments of groups that were killed while their ranks were still coming together: the only time at which a
// segment has a name.
#pragma once

#include <fcntl.h>

namespace kdt {

inline constexpr char kShmPrefix[] = "kdt-";
inline constexpr int kMaxShmRanks = 64;

// A write lock on byte `rank` of a segment's file, taken with F_OFD_SETLK by the rank as it joins: kept by
// the open file, so the system drops it with the process. `count` bytes for a question about several ranks.
struct flock ShmRankLock(int rank, int count = 1);

// Removes this user's segments that no process has joined or holds any more. Young ones are left alone: their
// first rank may be about to join.
void RemoveShmLeftovers();

}  // namespace kdt
