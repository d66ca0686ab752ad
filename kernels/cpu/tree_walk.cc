#include "kdt/kernels/tree_walk.h"

#include "kernels/cpu/ops.h"

namespace kdt::kernels::cpu {

void TreeWalk(Context&, const TreeWalkArgs& args) {
  for (int64_t tree = 0; tree < args.trees; ++tree) {
    const int32_t begin = args.row_begin[tree];
    const int32_t nodes = args.row_begin[tree + 1] - begin;
    KDT_CHECK(nodes >= 1);
    int32_t* path = args.path + begin;
    int32_t node = 0;
    int32_t length = 0;
    path[0] = 0;
    // A child stands behind its parent, so one pass over the nodes finds the whole path.
    for (int32_t child = 1; child < nodes; ++child) {
      const int32_t target = args.targets[begin + node];
      if (target < 0) break;
      if (args.parents[begin + child] != node || args.tokens[begin + child] != target) continue;
      node = child;
      path[++length] = child;
    }
    args.path_length[tree] = length;
    args.next_root[tree] = args.targets[begin + node];
  }
}

}  // namespace kdt::kernels::cpu
