// The ops that move little, in each of their types and forms.
#include <algorithm>
#include <cmath>

#include "tests/gpu/shapes/shapes.h"

namespace kdt::shapes {
namespace {

using kernels::DType;
using kernels::MakeTensor;
using kernels::Tensor;

constexpr DType kTypes[] = {DType::kF32, DType::kBF16};
const char* NameOf(DType type) { return type == DType::kF32 ? "f32" : "bf16"; }

// Matrices of either type.
Tensor Given(Shapes& s, DType type, int64_t rows, int64_t cols) {
  if (type == DType::kBF16) return s.Matrix(rows, cols);
  return MakeTensor(const_cast<float*>(s.In(s.Floats(rows * cols))), type, rows, cols);
}
Tensor Changed(Shapes& s, DType type, int64_t rows, int64_t cols) {
  if (type == DType::kBF16) return s.MatrixInOut(rows, cols);
  return MakeTensor(s.InOut(s.Floats(rows * cols)), type, rows, cols);
}
Tensor Made(Shapes& s, DType type, int64_t rows, int64_t cols) {
  return type == DType::kBF16 ? s.OutMatrix(rows, cols) : s.OutFloats(rows, cols);
}
Tensor Logits(Shapes& s, int64_t rows, int64_t vocab) { return Given(s, DType::kF32, rows, vocab); }
std::string Sizes(const char* op, int64_t rows, int64_t cols) {
  return std::string(op) + " " + std::to_string(rows) + " x " + std::to_string(cols);
}

void Embedding(Shapes& s) {
  for (const DType table : kTypes) {
    for (const DType out : kTypes) {
      for (const int64_t hidden : {512, 500, 77}) {
        const kernels::EmbeddingArgs args{s.In(std::vector<int32_t>{3, 99, 40, 7}), 2,
                                          Given(s, table, 40, hidden), Made(s, out, 4, hidden)};
        s.Run(Sizes("embedding", 4, hidden) + " " + NameOf(table) + " to " + NameOf(out),
              [&](const cuda::Launch& launch) { return cuda::Embedding(launch, args); });
      }
    }
  }
}

void Norms(Shapes& s) {
  for (const DType in : kTypes) {
    for (const DType out : kTypes) {
      for (const int64_t n : {256, 1536, 7168, 16384, 1001}) {
        for (const bool residual : {false, true}) {
          kernels::RmsNormArgs args{};
          args.x = Given(s, in, 3, n);
          if (residual) args.residual = Changed(s, in, 3, n);
          args.weight = s.In(s.Bf16(n));
          args.eps = 1e-5f;
          args.out = Made(s, out, 3, n);
          s.Run(Sizes("rms_norm", 3, n) + " " + NameOf(in) + " to " + NameOf(out) +
                    (residual ? ", residual" : ""),
                [&](const cuda::Launch& launch) { return cuda::RmsNorm(launch, args); });
        }
      }
    }
    const kernels::AddArgs add{Given(s, in, 3, 1001), Changed(s, in, 3, 1001)};
    s.Run(Sizes("add", 3, 1001) + " " + NameOf(in),
          [&](const cuda::Launch& launch) { return cuda::Add(launch, add); });
    const kernels::SiluMulArgs silu{Given(s, in, 3, 2 * 300), Made(s, in, 3, 300)};
    s.Run(Sizes("silu_mul", 3, 300) + " " + NameOf(in),
          [&](const cuda::Launch& launch) { return cuda::SiluMul(launch, silu); });
  }
  const kernels::ScaleRowsArgs scale{Changed(s, DType::kF32, 3, 1001),
                                     s.In(std::vector<float>{2.0f, 1.0f, 0.5f})};
  s.Run("scale_rows", [&](const cuda::Launch& launch) { return cuda::ScaleRows(launch, scale); });
}

void Ropes(Shapes& s) {
  for (const DType type : kTypes) {
    for (const kernels::RopeLayout layout :
         {kernels::RopeLayout::kInterleaved, kernels::RopeLayout::kHalfSplit}) {
      const kernels::RopeArgs args{
          Changed(s, type, 3, 4 * 192), 4,    192,   128, 64, s.In(std::vector<int32_t>{5, 900, 17}),
          s.In(s.Floats(32)),           1.0f, layout};
      s.Run(std::string("rope ") + NameOf(type) +
                (layout == kernels::RopeLayout::kInterleaved ? ", interleaved" : ", halves"),
            [&](const cuda::Launch& launch) { return cuda::Rope(launch, args); });
    }
    for (const DType pool : kTypes) {
      kernels::MlaPrepareArgs args{};
      args.qkv = Changed(s, type, 4, 1536 + 512 + 64);
      args.q_lora = 1536, args.latent = 512, args.rope = 64;
      args.q_norm = s.In(s.Bf16(1536)), args.kv_norm = s.In(s.Bf16(512));
      args.eps = 1e-5f;
      args.positions = s.In(std::vector<int32_t>{5, 900, 17, 0});
      args.inv_freq = s.In(s.Floats(32));
      args.attention_factor = 1.0f;
      args.slots = s.In(std::vector<int32_t>{7, -1, 0, 3});
      args.pool = Changed(s, pool, 8, 576);
      s.Run(std::string("mla_prepare ") + NameOf(type) + ", pool " + NameOf(pool),
            [&](const cuda::Launch& launch) { return cuda::MlaPrepare(launch, args); });
    }
  }
}

void DraftPrepare(Shapes& s) {
  constexpr int64_t kRows = 3, kHeads = 4, kKvHeads = 2, kDim = 64, kLayers = 2, kSlots = 6;
  for (const DType type : kTypes) {
    for (const DType pool : kTypes) {
      for (const bool context : {false, true}) {
        if (!context && pool != type) continue;
        const int64_t layers = context ? kLayers : 1, width = 2 * kKvHeads * kDim;
        kernels::DraftPrepareArgs args{};
        if (!context) args.q = Changed(s, type, kRows, kHeads * kDim);
        if (!context) args.kv = Changed(s, type, kRows, layers * width);
        args.heads = kHeads, args.kv_heads = kKvHeads, args.dim = kDim, args.layers = layers;
        args.q_norm = s.In(s.Bf16(kDim));
        std::vector<const uint16_t*> norms;
        for (int64_t l = 0; l < layers; ++l) norms.push_back(s.In(s.Bf16(kDim)));
        args.k_norms = norms.data();
        args.eps = 1e-5f;
        args.positions = s.In(std::vector<int32_t>{5, 900, 17});
        args.inv_freq = s.In(s.Floats(kDim / 2));
        args.attention_factor = 1.0f;
        if (context) {
          // Undefined behind the op.
          args.kv = type == DType::kBF16
                        ? MakeTensor(s.Spent(s.Bf16(kRows * layers * width)), type, kRows, layers * width)
                        : MakeTensor(s.Spent(s.Floats(kRows * layers * width)), type, kRows, layers * width);
          args.slots = s.In(std::vector<int32_t>{4, -1, 0});
          args.pool = Changed(s, pool, layers * kSlots, width);
          args.pool.rows = kSlots;
          args.pool_layer_stride = kSlots * width;
        }
        s.Run(std::string("draft_prepare ") + NameOf(type) +
                  (context ? std::string(", pool ") + NameOf(pool) : ", block"),
              [&](const cuda::Launch& launch) { return cuda::DraftPrepare(launch, args); });
      }
    }
  }
}

void Pools(Shapes& s) {
  for (const DType type : kTypes) {
    for (const DType pool : kTypes) {
      const kernels::KvWriteArgs args{Given(s, type, 3, 576), s.In(std::vector<int32_t>{5, -1, 2}),
                                      Changed(s, pool, 8, 576)};
      s.Run(std::string("kv_write ") + NameOf(type) + ", pool " + NameOf(pool),
            [&](const cuda::Launch& launch) { return cuda::KvWrite(launch, args); });
    }
  }
  for (const int64_t width : {576, 77}) {  // words, and single values
    constexpr int64_t kSlots = 32, kLayers = 2;
    std::vector<int32_t> from, to;
    for (int i = 0; i < 11; ++i) from.push_back(10 + 2 * i), to.push_back(10 + i);
    kernels::KvMoveArgs args{s.In(from), s.In(to),      11, Changed(s, DType::kBF16, kLayers * kSlots, width),
                             kLayers,    kSlots * width};
    args.pool.rows = kSlots;
    s.Run(Sizes("kv_move", 11, width),
          [&](const cuda::Launch& launch) { return cuda::KvMove(launch, args); });
  }
  const kernels::TableWriteArgs table{s.In(std::vector<int64_t>{5, -1, 300}),
                                      s.In(std::vector<int32_t>{1, 2, 3}), 3,
                                      s.InOut(std::vector<int32_t>(301, 9))};
  s.Run("table_write", [&](const cuda::Launch& launch) { return cuda::TableWrite(launch, table); });
}

void Copies(Shapes& s) {
  for (const int64_t bytes :
       {int64_t{48}, int64_t{20}, int64_t{3}, static_cast<int64_t>(cuda::kCopiedByKernel) + 4}) {
    void* host = nullptr;
    Check(cudaHostAlloc(&host, bytes, cudaHostAllocDefault), "page-locked memory");
    for (int64_t i = 0; i < bytes; ++i) static_cast<char*>(host)[i] = static_cast<char>(i * 7 + 1);
    void* to = s.Out<uint8_t>(bytes);
    s.Run("copy of " + std::to_string(bytes) + " bytes",
          [&](const cuda::Launch& launch) { return cuda::CopyPinned(launch, to, host, bytes); });
    Check(cudaFreeHost(host), "page-locked memory");
  }
}

void Compares(Shapes& s) {
  for (const DType type : kTypes) {
    for (const bool some : {false, true}) {
      kernels::CompareArgs args{Given(s, type, 5, 700), Given(s, type, 5, 700)};
      if (some) args.used_rows = s.In(std::vector<int32_t>{3});
      args.stats = reinterpret_cast<kernels::CompareStats*>(
          s.InOut(std::vector<char>(sizeof(kernels::CompareStats), 0)));
      s.Run(std::string("compare ") + NameOf(type) + (some ? ", some rows" : ""),
            [&](const cuda::Launch& launch) { return cuda::Compare(launch, args); });
    }
  }
}

struct Routing {
  int64_t rows, experts, top_k;
  DType x, w;
  bool shared;
};
void Routers(Shapes& s) {
  for (const Routing& r : {Routing{1, 384, 8, DType::kBF16, DType::kBF16, true},
                           Routing{12, 384, 8, DType::kBF16, DType::kBF16, true},
                           Routing{33, 64, 6, DType::kBF16, DType::kBF16, true},
                           Routing{3, 500, 8, DType::kBF16, DType::kBF16, false},
                           Routing{3, 700, 32, DType::kBF16, DType::kBF16, false},
                           Routing{2, 500, 8, DType::kBF16, DType::kBF16, true},
                           Routing{3, 48, 4, DType::kBF16, DType::kF32, true},
                           Routing{3, 48, 4, DType::kF32, DType::kF32, false},
                           Routing{70, 48, 4, DType::kBF16, DType::kBF16, true}}) {
    constexpr int64_t kHidden = 512, kInner = 128, kOut = 512;
    kernels::RouterArgs args{};
    args.x = Given(s, r.x, r.rows, kHidden);
    args.w = Given(s, r.w, r.experts, kHidden);
    args.bias = s.In(s.Floats(r.experts, 0.1f));
    args.top_k = r.top_k, args.normalize = true, args.scale = 2.5f;
    args.expert_ids = s.Out<int32_t>(r.rows * r.top_k);
    args.weights = s.Out<float>(r.rows * r.top_k);
    if (r.rows > 2) args.row_count = s.In(std::vector<int32_t>{static_cast<int32_t>(r.rows - 1)});
    if (r.shared) {
      args.shared_gate_up = s.Matrix(2 * kInner, kHidden, 0.05f);
      args.shared_down = s.Matrix(kOut, kInner, 0.05f);
      args.shared_inner = MakeTensor(s.Scratch(r.rows * 2 * kInner * 2), DType::kBF16, r.rows, 2 * kInner);
      args.shared_y = s.OutMatrix(r.rows, kOut);
    }
    s.Run(Sizes("router", r.rows, r.experts) + " of " + NameOf(r.x) + " and " + NameOf(r.w) +
              (r.shared ? ", shared" : ""),
          [&](const cuda::Launch& launch) { return cuda::Router(launch, args); });
  }
  // The choice beside products so large that their tiles are others.
  for (const int64_t outs : {10240, 20480}) {
    for (const int64_t rows : {20, 64}) {
      const kernels::GemmArgs beside{s.Matrix(rows, 128), s.Matrix(outs, 128, 0.05f),
                                     s.OutMatrix(rows, outs)};
      kernels::MoeChoice choice;
      choice.scores = Given(s, DType::kF32, rows, 48);
      choice.bias = s.In(s.Floats(48, 0.1f));
      choice.expert_ids = s.Out<int32_t>(rows * 4), choice.weights = s.Out<float>(rows * 4);
      s.Run(Sizes("choose_experts beside", rows, outs),
            [&](const cuda::Launch& launch) { return cuda::ChooseExperts(launch, choice, 4, beside); });
    }
  }
  // Equal scores: the long way.
  std::vector<float> scores(2 * 384, 0.5f);
  kernels::MoeChoice choice;
  choice.scores = MakeTensor(const_cast<float*>(s.In(scores)), DType::kF32, 2, 384);
  choice.bias = s.In(std::vector<float>(384, 0.0f));
  choice.expert_ids = s.Out<int32_t>(2 * 8), choice.weights = s.Out<float>(2 * 8);
  s.Run("choose_experts, equal scores",
        [&](const cuda::Launch& launch) { return cuda::ChooseExperts(launch, choice, 8, {}); });
}

void TopK(Shapes& s) {
  for (const int64_t k : {0, 1, 64}) {
    for (const bool ties : {false, true}) {
      constexpr int64_t kRows = 3, kVocab = 5000;
      std::vector<float> logits = s.Floats(kRows * kVocab);
      if (ties) std::fill(logits.begin(), logits.end(), 1.0f);
      kernels::LogitsTopKArgs args{};
      args.logits = MakeTensor(const_cast<float*>(s.In(logits)), DType::kF32, kRows, kVocab);
      args.vocab_begin = 100, args.k = k;
      args.max = s.Out<float>(kRows), args.sum_exp = s.Out<float>(kRows), args.bad = s.Out<uint8_t>(kRows);
      if (k > 0) args.ids = s.Out<int32_t>(kRows * k), args.values = s.Out<float>(kRows * k);
      s.Run("logits_top_k " + std::to_string(k) + (ties ? ", ties" : ""),
            [&](const cuda::Launch& launch) { return cuda::LogitsTopK(launch, args); });
    }
  }
}

void Gumbel(Shapes& s) {
  for (const int64_t rows : {3, 600}) {
    const int64_t vocab = rows > 100 ? 300 : 5000;
    kernels::GumbelArgmaxArgs args{};
    args.logits = Logits(s, rows, vocab);
    std::vector<float> temperature(rows, 0.7f);
    temperature[1] = 0.0f;
    args.temperature = s.In(temperature);
    args.seed = s.In(std::vector<uint64_t>(rows, 12345));
    args.position = s.In(std::vector<int64_t>(rows, 77));
    args.id = s.Out<int32_t>(rows), args.value = s.Out<float>(rows), args.bad = s.Out<int32_t>(rows);
    s.Run(Sizes("gumbel_argmax", rows, vocab),
          [&](const cuda::Launch& launch) { return cuda::GumbelArgmax(launch, args); });
  }
}

// A tree of one row, a chain that is accepted whole, and one that branches.
void Walk(Shapes& s) {
  kernels::TreeWalkArgs args{};
  args.trees = 3;
  args.row_begin = s.In(std::vector<int32_t>{0, 1, 41, 46});
  std::vector<int32_t> tokens{9}, parents{-1}, targets{4};
  for (int i = 0; i < 40; ++i)
    tokens.push_back(100 + i), parents.push_back(i - 1), targets.push_back(101 + i);
  for (const int parent : {-1, 0, 0, 2, 2}) parents.push_back(parent);
  for (const int token : {1, 2, 3, 4, 5}) tokens.push_back(token);
  for (const int target : {3, 7, 5, 8, 6}) targets.push_back(target);
  args.tokens = s.In(tokens), args.parents = s.In(parents), args.targets = s.In(targets);
  args.path_length = s.Out<int32_t>(3), args.next_root = s.Out<int32_t>(3);
  args.path = s.InOut(std::vector<int32_t>(46, -7));  // behind a path it stays as it is
  s.Run("tree_walk", [&](const cuda::Launch& launch) { return cuda::TreeWalk(launch, args); });
}

}  // namespace

std::vector<Op> SmallOps() {
  return {{"embedding", Embedding},        {"norms", Norms},    {"ropes", Ropes},
          {"draft_prepare", DraftPrepare}, {"pools", Pools},    {"copies", Copies},
          {"compare", Compares},           {"router", Routers}, {"logits_top_k", TopK},
          {"gumbel_argmax", Gumbel},       {"tree_walk", Walk}};
}

}  // namespace kdt::shapes
