// The ops that move little: what counts is their launch and latency. Bytes are inputs read once and outputs
// written once.
#include <cmath>

#include "tests/bench/kernel_bench/bench.h"
#include "tests/bench/kernel_bench/device.h"

namespace kdt::bench {

using kernels::DType;
using kernels::MakeTensor;

namespace {

constexpr int64_t kHidden = 7168, kHeads = 8, kVocab = 20480, kMaxRows = 64;

class SmallOps {
 public:
  explicit SmallOps(Bench& bench) : bench_(bench) {
    x_ = Normal(kMaxRows * kVocab, 1);
    y_ = Normal(kMaxRows * kVocab, 2);
    z_ = Normal(kMaxRows * kVocab, 3);
    weights_ = Normal(kVocab * kHidden, 4);
    std::vector<int32_t> rising(kMaxRows);
    for (int64_t i = 0; i < kMaxRows; ++i) rising[i] = static_cast<int32_t>(i * 7 + 1);
    rising_ = bench.Copy(rising);
    std::vector<float> logits(kMaxRows * kVocab);
    for (size_t i = 0; i < logits.size(); ++i)
      logits[i] = static_cast<float>((i * 2654435761u) >> 8 & 0xffff) * 1e-3f;
    logits_ = bench.Copy(logits);
    ones_ = bench.Copy(std::vector<float>(kVocab, 1.0f));
    zeros_ = bench.Memory(kMaxRows * 4096);
    KDT_BENCH_CUDA(cudaMemset(zeros_, 0, kMaxRows * 4096));
    out_ = bench.Memory(kMaxRows * 4096);
  }

  void Run(int64_t rows) {
    const double row_bytes = static_cast<double>(rows) * kHidden * 2;
    const auto at = [&](void* data, int64_t cols) { return MakeTensor(data, DType::kBF16, rows, cols); };
    auto* const weight = static_cast<uint16_t*>(weights_);
    Time("embedding", rows, 2 * row_bytes, [&](int) {
      return cuda::Embedding(
          bench_.launch(),
          {rising_, 0, MakeTensor(weights_, DType::kBF16, kVocab, kHidden), at(y_, kHidden)});
    });
    Time("rms_norm", rows, 4 * row_bytes, [&](int) {
      return cuda::RmsNorm(bench_.launch(),
                           {at(x_, kHidden), at(z_, kHidden), weight, 1e-5f, at(y_, kHidden)});
    });
    Time("silu_mul", rows, static_cast<double>(rows) * 2304 * 6, [&](int) {
      return cuda::SiluMul(bench_.launch(), {at(x_, 2 * 2304), at(y_, 2304)});
    });
    Time("rope", rows, static_cast<double>(rows) * kHeads * 64 * 4, [&](int) {
      return cuda::Rope(bench_.launch(), {at(x_, kHeads * 192), kHeads, 192, 128, 64, rising_, ones_, 1.0f,
                                          kernels::RopeLayout::kInterleaved});
    });
    Time("kv_write", rows, static_cast<double>(rows) * 576 * 4, [&](int) {
      return cuda::KvWrite(bench_.launch(), {at(x_, 576), rising_, MakeTensor(y_, DType::kBF16, 512, 576)});
    });
    Time("absorb_query", rows,
         kHeads * 128 * 512 * 2.0 + static_cast<double>(rows) * kHeads * (192 + 576) * 2, [&](int) {
           return cuda::AbsorbQuery(bench_.launch(), {at(x_, kHeads * 192), weight, kHeads, 128, 64, 128, 512,
                                                      at(y_, kHeads * 576)});
         });
    Time("absorb_value", rows,
         kHeads * 128 * 512 * 2.0 + static_cast<double>(rows) * kHeads * (512 + 128) * 2, [&](int) {
           return cuda::AbsorbValue(
               bench_.launch(), {at(x_, kHeads * 512), weight, kHeads, 128, 128, 512, at(y_, kHeads * 128)});
         });
    Time("router", rows, 384 * kHidden * 2.0 + row_bytes, [&](int) {
      return cuda::Router(bench_.launch(),
                          {at(x_, kHidden), MakeTensor(weights_, DType::kBF16, 384, kHidden), ones_, 8, true,
                           2.827f, static_cast<int32_t*>(out_), static_cast<float*>(out_) + 65536 / 4});
    });
    const kernels::Tensor logits = MakeTensor(logits_, DType::kF32, rows, kVocab);
    auto* const floats = static_cast<float*>(out_);
    auto* const ints = static_cast<int32_t*>(out_);
    Time("logits_top_k", rows, static_cast<double>(rows) * kVocab * 4, [&](int) {
      return cuda::LogitsTopK(bench_.launch(),
                              {logits, 0, 64, floats, floats + 64, static_cast<uint8_t*>(out_) + 1024,
                               ints + 1024, floats + 8192});
    });
    Time("gumbel_argmax", rows, static_cast<double>(rows) * kVocab * 4, [&](int) {
      return cuda::GumbelArgmax(bench_.launch(), {logits, 0, ones_, static_cast<uint64_t*>(zeros_),
                                                  static_cast<int64_t*>(zeros_), ints, floats + 64});
    });
  }

  // One block of eight positions behind contexts of several lengths: 8 query heads on one KV head.
  void DraftAttention() {
    std::vector<int32_t> table(131072);
    for (size_t i = 0; i < table.size(); ++i) table[i] = static_cast<int32_t>((i * 7919) % table.size());
    const int32_t* slots = bench_.Copy(table);
    void* pool = Normal(131072 * 256, 5);
    for (const int context : {1024, 4096, 32768, 131072}) {
      const int32_t* length = bench_.Copy(std::vector<int32_t>{context});
      kernels::DraftAttentionArgs args;
      args.q = MakeTensor(x_, DType::kBF16, 8, 8 * 128);
      args.block_k = MakeTensor(y_, DType::kBF16, 8, 128);
      args.block_v = MakeTensor(z_, DType::kBF16, 8, 128);
      args.pool = MakeTensor(pool, DType::kBF16, 131072, 256);
      args.heads = 8, args.kv_heads = 1, args.dim = 128, args.block = 8, args.scale = 0.088f;
      args.sequences = 1;
      args.context_length = length;
      args.window_begin = static_cast<int32_t*>(zeros_);
      args.slot_table = slots;
      args.table_stride = 131072;
      args.out = MakeTensor(logits_, DType::kBF16, 8, 8 * 128);
      const double time = bench_.Median([&](int) { return cuda::DraftAttention(bench_.launch(), args); });
      bench_.Report({"draft_attention", "context " + std::to_string(context), time, context * 512.0,
                     context * 64.0 * 128 * 4, 0});
    }
  }

 private:
  void* Normal(int64_t values, uint32_t seed) const {
    void* data = bench_.Memory(values * 2);
    FillNormal(bench_.launch().stream, data, values, seed, 1.0f);
    return data;
  }
  void Time(const char* op, int64_t rows, double bytes, const std::function<cudaError_t(int)>& run) {
    bench_.Report({op, "rows " + std::to_string(rows), bench_.Median(run), bytes, 0, 0});
  }

  Bench& bench_;
  void *x_, *y_, *z_, *weights_, *zeros_, *out_;
  int32_t* rising_;
  float *logits_, *ones_;
};

}  // namespace

void BenchSmallOps(Bench& bench) {
  SmallOps ops(bench);
  for (const int64_t rows : {1, 8, 64}) ops.Run(rows);
  ops.DraftAttention();
}

}  // namespace kdt::bench
