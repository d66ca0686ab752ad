// Walks each verified tree: start at the root; while a child of the current node carries the current node's target
// token, step to it. Siblings have distinct tokens, so the child is unique; were it not, the lower index wins.
#pragma once

#include <cstdint>

namespace kdt::kernels {

struct TreeWalkArgs {
  int64_t trees;
  const int32_t* row_begin;  // [trees + 1]: rows of tree t; its root is the first
  const int32_t* tokens;     // [rows]
  const int32_t* parents;    // [rows]: node index within the tree, root -1; parent < child
  const int32_t* targets;    // [rows]: the target's token behind each node; < 0: none (the walk ends there with this token)
  int32_t* path_length;      // [trees]: accepted drafted nodes, root not counted
  int32_t* path;             // [rows]: tree t's path at row_begin[t]: node indices, root (0) first, path_length + 1 entries
  int32_t* next_root;        // [trees]: target of the last node on the path
};

}  // namespace kdt::kernels
