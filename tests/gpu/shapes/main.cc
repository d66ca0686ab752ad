// kernel_shapes [--op NAME | --list | --kernels | --fault TOOL]: every CUDA op, or those of one name, over
// small shapes (shapes.h); exits with 1 where a result is wrong and with 77 without a GPU. --list: the names.
// --kernels: the kernels that would run, one a line. --fault: a kernel that the tool must report.
// tests/gpu/sanitize runs it under compute-sanitizer.
#include <algorithm>
#include <cstdio>

#include "tests/gpu/shapes/faults.h"
#include "tests/gpu/shapes/shapes.h"

namespace kdt::shapes {
namespace {

std::vector<Op> AllOps() {
  std::vector<Op> all;
  for (const auto& ops : {AttentionOps(), MoeOps(), MatrixOps(), SmallOps()})
    all.insert(all.end(), ops.begin(), ops.end());
  return all;
}

int Main(const std::string& flag, const std::string& value) {
  if (flag == "--list") {
    for (const Op& op : AllOps()) std::printf("%s\n", op.name);
    return 0;
  }
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::fprintf(stderr, "kernel_shapes: no GPU here\n");
    return 77;
  }
  if (flag == "--fault") {
    const std::vector<std::string> faults = Faults();
    if (std::find(faults.begin(), faults.end(), value) == faults.end())
      Fail("no fault for \"" + value + "\"");
    RunFault(value);
    return 0;
  }
  if (!flag.empty() && flag != "--op" && flag != "--kernels") Fail("unknown flag " + flag);
  Shapes shapes(flag == "--kernels");
  for (const Op& op : AllOps()) {
    if (flag != "--op" || value == op.name) op.run(shapes);
  }
  if (shapes.shapes() == 0) Fail("no op \"" + value + "\"");
  for (const std::string& name : shapes.kernels()) std::printf("%s\n", name.c_str());
  if (flag == "--kernels") return 0;
  std::printf("%d shapes, %d failed\n", shapes.shapes(), shapes.failures());
  return shapes.failures() == 0 ? 0 : 1;
}

}  // namespace
}  // namespace kdt::shapes

int main(int argc, char** argv) {
  return kdt::shapes::Main(argc > 1 ? argv[1] : "", argc > 2 ? argv[2] : "");
}
