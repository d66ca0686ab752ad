#include "kdt/kernels/tree_walk.h"

#include "tests/kernels/cpu/util.h"

namespace kdt::kernels::test {
namespace {

TEST_CASE("tree_walk follows the targets", "[tree_walk]") {
  // Tree 0: root, children 1 (token 10) and 2 (token 11), 3 under 2 (token 12), 4 under 3 (token 13).
  // Tree 1: a root alone. Tree 2: the root's target is masked. Tree 3: a repeated sibling, the lower index
  // wins.
  const int32_t row_begin[] = {0, 5, 6, 8, 11};
  const int32_t tokens[] = {1, 10, 11, 12, 13, 2, 3, 30, 4, 40, 40};
  const int32_t parents[] = {-1, 0, 0, 2, 3, -1, -1, 0, -1, 0, 0};
  const int32_t targets[] = {11, 99, 12, 77, 88, 20, -1, 31, 40, 41, 42};
  int32_t path_length[4], path[11], next_root[4];
  REQUIRE(
      MakeBackend()->TreeWalk({4, row_begin, tokens, parents, targets, path_length, path, next_root}).ok());
  CHECK(path_length[0] == 2);
  CHECK(path[0] == 0);
  CHECK(path[1] == 2);
  CHECK(path[2] == 3);
  CHECK(next_root[0] == 77);
  CHECK(path_length[1] == 0);
  CHECK(path[5] == 0);
  CHECK(next_root[1] == 20);
  CHECK(path_length[2] == 0);
  CHECK(next_root[2] == -1);
  CHECK(path_length[3] == 1);
  CHECK(path[9] == 1);
  CHECK(next_root[3] == 41);
}

}  // namespace
}  // namespace kdt::kernels::test
