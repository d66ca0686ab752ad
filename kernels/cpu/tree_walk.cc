#include "kdt/kernels/tree_walk.h"

#include "kernels/cpu/ops.h"

namespace kdt::kernels::cpu {

void TreeWalk(Context&, const TreeWalkArgs& args) {
  for (int64_t tree = 0; tree < args.trees; ++tree) {
    const int32_t begin = args.row_begin[tree];
    const int32_t nodes = args.row_begin[tree + 1] - begin;
    KDT_CHECK(nodes >= 1);
    int32_t* const path = args.path + begin;
    const auto target = [&](int32_t node) { return args.targets[begin + node]; };
    const int32_t length = WalkTree(nodes, args.tokens + begin, args.parents + begin, target, path);
    args.path_length[tree] = length;
    args.next_root[tree] = target(path[length]);
  }
}

}  // namespace kdt::kernels::cpu
