// Launching a kernel as a programmatic dependent of the one before it in the stream: its blocks may start
// while that one still runs, so that launch, prologue and weight loads lie behind the other's tail. Captured
// launches keep this as a programmatic edge of the graph.
//
// Every kernel launched by LaunchAfter keeps these rules:
//   1. Every thread that reads or writes memory which an earlier kernel of the stream writes or reads does so
//      behind WaitForPrevious() (griddepcontrol.wait). Before it a block touches only constants of the model
//      (weights, frequencies, biases) and its own registers and shared memory: prefetch weights there. Step
//      data (ids, positions, slots, lengths, activations, workspace) is never a constant, also where the
//      kernel right before does not write it.
//   2. Every block executes WaitForPrevious() before it leaves, also one that has nothing to do. The wait
//      covers the kernel in front only, and reaches further back because that one kept this rule too.
//   3. LaunchDependents() may stand anywhere, best where the block's remaining work is short or the next
//      kernel's prologue is worth its registers and shared memory: the next kernel's blocks take what room
//      there is on the multiprocessors, but only when all blocks of this one are running or gone. It promises
//      nothing about memory. Without it the next kernel starts when this one's blocks leave.
//   4. A kernel behind anything but a kernel (a copy by a copy engine, a fill, an event of another stream)
//      waits for all of it. Small queued copies are kernels (CopyPinned).
//   5. Exception from rule 1, for kernels that say so: an embedding calls LaunchDependents() behind its wait.
//   So
//      where any kernel behind it starts, everything queued before the embedding has finished, and may be
//      read before the wait: a step's positions, lengths, slots and tables, and the KV rows of committed
//      tokens, which all come before. What kernels behind the embedding write (the step's own KV rows among
//      it) is not.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/ops.h"

namespace kdt::cuda {

// Dynamic shared memory a kernel gets without asking: 48 KB less what it has of static shared memory.
inline constexpr size_t kPlainDynamicShared = 32 * 1024;

template <typename... Params, typename... Args>
cudaError_t LaunchAfter(const Launch& launch, void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared,
                        Args&&... args) {
  if (shared > kPlainDynamicShared) {
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared));
    if (error != cudaSuccess) return error;
  }
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared;
  config.stream = launch.stream;
  config.attrs = &overlap;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, static_cast<Args&&>(args)...);
}

}  // namespace kdt::cuda
