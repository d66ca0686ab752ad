// A warp a tree. A child stands behind its parent, so one pass over the nodes, 32 at a time, finds the whole
// path.
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/types.cuh"
#include "kernels/cuda/ops.h"

namespace kdt::cuda {
namespace {

__global__ void TreeWalkKernel(kernels::TreeWalkArgs args) {
  const int tree = blockIdx.x, lane = threadIdx.x;
  LaunchDependents();
  WaitForPrevious();
  const int begin = args.row_begin[tree], nodes = args.row_begin[tree + 1] - begin;
  int node = 0, length = 0, target = args.targets[begin];
  if (lane == 0) args.path[begin] = 0;
  for (int first = 0; first < nodes && target >= 0; first += 32) {
    const int child = first + lane;
    const bool there = child >= 1 && child < nodes;
    const int parent = there ? args.parents[begin + child] : -1;
    const int token = there ? args.tokens[begin + child] : -1;
    const int next_target = there ? args.targets[begin + child] : -1;
    // Several steps can fall into one group of 32 nodes.
    while (target >= 0) {
      const unsigned found = __ballot_sync(~0u, there && child > node && parent == node && token == target);
      if (found == 0) break;
      const int src = __ffs(found) - 1;
      node = first + src;
      target = __shfl_sync(~0u, next_target, src);
      ++length;
      if (lane == 0) args.path[begin + length] = node;
    }
  }
  if (lane == 0) {
    args.path_length[tree] = length;
    args.next_root[tree] = target;
  }
}

}  // namespace

cudaError_t TreeWalk(const Launch& launch, const kernels::TreeWalkArgs& args) {
  if (args.trees == 0) return cudaSuccess;
  return LaunchAfter(launch, TreeWalkKernel, dim3(static_cast<unsigned>(args.trees)), 32, 0, args);
}

}  // namespace kdt::cuda
