// Walks each verified tree: start at the root; while a child of the current node carries the current node's
// target token, step to it. Siblings have distinct tokens, so the child is unique; were it not, the lower
// index wins.
#pragma once

#include <cstdint>

namespace kdt::kernels {

// The walk of one tree, for what runs on the host: target(node) is the target's token behind a node, < 0:
// none. Writes the path, the root (0) first, to `path` (room for `nodes`), and returns its length, the root
// not counted.
template <typename Target>
int32_t WalkTree(int32_t nodes, const int32_t* tokens, const int32_t* parents, const Target& target,
                 int32_t* path) {
  int32_t node = 0, length = 0, wanted = target(0);
  path[0] = 0;
  // A child stands behind its parent, so one pass over the nodes finds the whole path.
  for (int32_t child = 1; child < nodes && wanted >= 0; ++child) {
    if (parents[child] != node || tokens[child] != wanted) continue;
    node = child;
    wanted = target(node);
    path[++length] = node;
  }
  return length;
}

struct TreeWalkArgs {
  int64_t trees;
  const int32_t* row_begin;  // [trees + 1]: rows of tree t; its root is the first
  const int32_t* tokens;     // [rows]
  const int32_t* parents;    // [rows]: node index within the tree, root -1; parent < child
  const int32_t* targets;  // [rows]: the target's token behind each node; < 0: none (the walk ends there with
                           // this token)
  int32_t* path_length;    // [trees]: accepted drafted nodes, root not counted
  int32_t*
      path;  // [rows]: tree t's path at row_begin[t]: node indices, root (0) first, path_length + 1 entries
  int32_t* next_root;  // [trees]: target of the last node on the path
};

}  // namespace kdt::kernels
