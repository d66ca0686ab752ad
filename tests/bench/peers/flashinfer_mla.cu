// FlashInfer's MLA kernels behind a C interface, for peers.py: its headers are included from an unpacked
// wheel, nothing is copied.
//   D=WHEEL/flashinfer/data; nvcc -std=c++17 -O3 --expt-relaxed-constexpr -arch=sm_90a -shared -Xcompiler
//   -fPIC
//        -I $D/cccl/libcudacxx/include -I $D/cccl/cub -I $D/cccl/thrust -I $D/include -I $D/cutlass/include
//        [-DHOPPER] flashinfer_mla.cu -o LIB.so
// Without HOPPER the kernel for every GPU from sm_80 on ("fa2"), with it the one that is sm_90's own ("fa3").
#include <cuda_bf16.h>

#ifdef HOPPER
#include <flashinfer/attention/mla_hopper.cuh>
#else
#include <flashinfer/attention/mla.cuh>
#endif
#include <flashinfer/attention/mla_params.cuh>
#include <flashinfer/attention/scheduler.cuh>
#include <flashinfer/fastdiv.cuh>

namespace {

constexpr int kLatent = 512, kRope = 64, kWidth = kLatent + kRope;
using Params = flashinfer::MLAParams<__nv_bfloat16, __nv_bfloat16, __nv_bfloat16, int32_t>;

struct Problem {
  void *floats, *ints;
  flashinfer::MLAPlanInfo plan;
  int heads;
  bool causal;
};

}  // namespace

// One sequence of `rows` query rows, the last of `context` + `rows` keys, each seeing its own and all before
// it. Returns a handle, or nullptr; floats and ints are device memory of the given sizes that stays in use.
extern "C" void* PeerPlan(void* floats, size_t floats_bytes, void* ints, size_t ints_bytes, int rows,
                          int context, int heads, void* stream) {
  auto* problem = new Problem{floats, ints, {}, heads, rows > 1};
  int32_t queries[2] = {0, rows}, keys[2] = {0, context + rows}, length[1] = {context + rows};
  void* staging = nullptr;
  size_t used = 0;
  cudaMallocHost(&staging, ints_bytes);
  const cudaError_t error = flashinfer::MLAPlan<int32_t>(
      floats, floats_bytes, ints, staging, ints_bytes, problem->plan, used, queries, keys, length, 1, heads,
      kLatent, problem->causal, static_cast<cudaStream_t>(stream));
  if (error != cudaSuccess) return nullptr;
  // The plan was made in host memory; bringing it over is the caller's part.
  if (cudaMemcpyAsync(ints, staging, used, cudaMemcpyHostToDevice, static_cast<cudaStream_t>(stream)) !=
      cudaSuccess) {
    return nullptr;
  }
  if (cudaStreamSynchronize(static_cast<cudaStream_t>(stream)) != cudaSuccess) return nullptr;
  cudaFreeHost(staging);
  return problem;
}

// q [rows, heads, 576], pool [slots, 576], slots [context + rows], out [rows, heads, 512]; returns a
// cudaError_t.
extern "C" int PeerRun(void* handle, void* q, void* pool, void* slots, void* out, float scale, void* stream) {
  const Problem& problem = *static_cast<Problem*>(handle);
  const flashinfer::MLAPlanInfo& plan = problem.plan;
  const auto at = [&](int64_t offset) {
    return reinterpret_cast<int32_t*>(static_cast<char*>(problem.ints) + offset);
  };
  Params p{};
  p.q_nope = static_cast<__nv_bfloat16*>(q);
  p.q_pe = p.q_nope + kLatent;
  p.ckv = static_cast<__nv_bfloat16*>(pool);
  p.kpe = p.ckv + kLatent;
  p.q_indptr = at(plan.q_indptr_offset);
  p.kv_indptr = at(plan.kv_indptr_offset);
  p.partial_indptr = at(plan.partial_indptr_offset);
  p.kv_indices = static_cast<int32_t*>(slots);
  p.q_len = at(plan.q_len_offset);
  p.kv_len = at(plan.kv_len_offset);
  p.q_start = at(plan.q_start_offset);
  p.kv_start = at(plan.kv_start_offset);
  p.kv_end = at(plan.kv_end_offset);
  p.work_indptr = at(plan.work_indptr_offset);
  p.merge_packed_offset_start = at(plan.merge_packed_offset_start_offset);
  p.merge_packed_offset_end = at(plan.merge_packed_offset_end_offset);
  p.merge_partial_packed_offset_start = at(plan.merge_partial_packed_offset_start_offset);
  p.merge_partial_packed_offset_end = at(plan.merge_partial_packed_offset_end_offset);
  p.merge_partial_stride = at(plan.merge_partial_stride_offset);
  p.final_o = static_cast<__nv_bfloat16*>(out);
  p.partial_o = reinterpret_cast<__nv_bfloat16*>(static_cast<char*>(problem.floats) + plan.partial_o_offset);
  p.partial_lse = reinterpret_cast<float*>(static_cast<char*>(problem.floats) + plan.partial_lse_offset);
  p.num_heads = flashinfer::uint_fastdiv(problem.heads);
  p.block_size = flashinfer::uint_fastdiv(1);
  p.q_nope_stride_n = p.q_pe_stride_n = problem.heads * kWidth;
  p.q_nope_stride_h = p.q_pe_stride_h = kWidth;
  p.ckv_stride_page = p.ckv_stride_n = p.kpe_stride_page = p.kpe_stride_n = kWidth;
  p.o_stride_n = problem.heads * kLatent;
  p.o_stride_h = kLatent;
  p.sm_scale = scale;
  const auto run = [&](auto mask) {
    constexpr flashinfer::MaskMode kMask = decltype(mask)::value;
#ifdef HOPPER
    return flashinfer::mla::BatchMLAPageAttentionHopper<kMask, kLatent, kRope>(
        p, plan.num_blks_x, plan.num_blks_y, static_cast<cudaStream_t>(stream));
#else
    return flashinfer::mla::BatchMLAPagedAttention<kMask, kLatent, kRope>(p, plan.num_blks_x, plan.num_blks_y,
                                                                          static_cast<cudaStream_t>(stream));
#endif
  };
  return problem.causal ? run(std::integral_constant<flashinfer::MaskMode, flashinfer::MaskMode::kCausal>{})
                        : run(std::integral_constant<flashinfer::MaskMode, flashinfer::MaskMode::kNone>{});
}
