// Kernels of the ipc collective: every rank's block of memory is mapped by all ranks, and each rank pulls
// what it needs from the others' blocks. Queued on a stream, never allocating or synchronising, so they can
// be captured.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "kdt/kernels/gemm.h"
#include "kdt/kernels/rms_norm.h"
#include "kdt/kernels/tensor.h"

namespace kdt::cuda {

inline constexpr int kIpcMaxRanks = 16;
inline constexpr int kIpcMaxBlocks = 32;

// Stands at the start of the memory that a rank shows to the others. Words hold the number of the operation
// that their writer (second index) has come to; only thread blocks of the same index meet (first index).
struct IpcFlags {
  uint32_t arrived[kIpcMaxBlocks][kIpcMaxRanks];  // has copied its values into its buffer
  uint32_t reduced[kIpcMaxBlocks][kIpcMaxRanks];  // two-shot: has written its share of the sums
};
inline constexpr size_t kIpcFlagBytes = sizeof(IpcFlags);

// The rows of a reduction on their way from the blocks that make them to all blocks of the same kernel. Words
// with all bits set are not there yet; no value is such a word. A row's chunks of eight values lie by fours,
// those of all rows side by side; its sums of squares, one a warp of rms_norm, by places modulo four.
inline constexpr int kIpcMailRows = 8, kIpcMailChunks = 1024, kIpcMailSquares = 16;
struct IpcMail {
  uint32_t x[kIpcMailChunks * kIpcMailRows * 4];
  uint32_t squares[kIpcMailRows * kIpcMailSquares];
  uint32_t bell[4];  // the first word: the values are about to come
};
inline constexpr int kIpcMailBlocks = 256;  // of a kernel that uses it, at most

// Memory of this rank's device that nobody else sees.
struct IpcLocal {
  // The last operation's number. One word a block, all equal between two operations: a block reads its own
  // and writes those that fall to it, so that no block of an operation sees another's write.
  uint32_t ops[kIpcMaxBlocks];
  uint32_t mails[kIpcMailBlocks];  // the same for how often IpcMail was used
  uint32_t dead;                   // not 0: an operation was given up, later ones do nothing
  uint32_t late_ns;            // for benchmarks without the other ranks: how long a meeting takes at least
  unsigned long long wait_ns;  // of block 0, for the other ranks
};

// Page-locked memory of this rank's host.
struct IpcHost {
  uint32_t abort;                  // host to device: leave
  uint32_t missing[kIpcMaxRanks];  // device to host: operation number at which this rank was not there
  unsigned long long wait_ns;      // IpcLocal's, written by all-gather and broadcast
};

// Kernel argument. A rank's block: IpcFlags, then two buffers of `buffer_bytes` (a multiple of 16).
struct IpcPeers {
  std::byte* blocks[kIpcMaxRanks];
  IpcLocal* local;
  IpcMail* mails;  // two, which take turns; this rank's device, at first all bits set
  IpcHost* host;   // as the device sees it
  size_t buffer_bytes;
  int rank;
  int size;
  bool own_gpu;    // no two ranks share a GPU
  int processors;  // multiprocessors of each rank's GPU; 0: the ranks' GPUs are not all alike
  int max_blocks;  // 1 .. kIpcMaxBlocks; the same on all ranks
};

// x = sum over ranks of x, in float32, in rank order. x: 16-byte aligned, count * type size <= buffer_bytes.
cudaError_t IpcReduceOneShot(const IpcPeers& peers, void* x, kernels::DType type, int64_t count,
                             cudaStream_t stream);
cudaError_t IpcReduceTwoShot(const IpcPeers& peers, void* x, kernels::DType type, int64_t count,
                             cudaStream_t stream);
// IpcReduceOneShot of norm.x and RmsNorm(norm) in one, with the same bits; norm.x keeps this rank's values.
// Only for what IpcTakesNorm takes: bf16 with a residual, rows of whole and aligned chunks of eight values,
// at most 8192.
bool IpcTakesNorm(const kernels::RmsNormArgs& norm);
cudaError_t IpcReduceNorm(const IpcPeers& peers, const kernels::RmsNormArgs& norm, cudaStream_t stream);
// IpcReduceNorm and the gemm behind it in one kernel, with the same bits. Only for what IpcTakesGemm takes:
// at most eight rows, shapes of WholeKernel whose W fits on the chip, a GPU of one kind for each rank (so
// that all ranks decide alike).
bool IpcTakesGemm(const IpcPeers& peers, const kernels::RmsNormArgs& norm, const kernels::GemmArgs& gemm);
cudaError_t IpcReduceNormGemm(const IpcPeers& peers, const kernels::RmsNormArgs& norm,
                              const kernels::GemmArgs& gemm, cudaStream_t stream);
// out + r * stride = rank r's `bytes` at `in`. bytes <= buffer_bytes; any alignment.
cudaError_t IpcGather(const IpcPeers& peers, const void* in, size_t bytes, void* out, size_t stride,
                      cudaStream_t stream);
// data = rank `root`'s. bytes <= buffer_bytes; any alignment.
cudaError_t IpcBroadcast(const IpcPeers& peers, void* data, size_t bytes, int root, cudaStream_t stream);

// For the test of a new group, without any waiting: writes `words` words that tell `from` and `to` apart at
// `to`'s address, and counts in *wrong (device memory) those at `at` that are not what Fill(from, to) writes.
cudaError_t IpcFill(uint32_t* at, int words, int from, int to, cudaStream_t stream);
cudaError_t IpcCheck(const uint32_t* at, int words, int from, int to, uint32_t* wrong, cudaStream_t stream);

}  // namespace kdt::cuda
