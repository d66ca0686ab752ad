// Dense products: a shape or more for each kernel that gemm chooses from on 132 multiprocessors, and what is
// built on them.
#include "tests/gpu/shapes/shapes.h"

namespace kdt::shapes {
namespace {

using kernels::DType;
using kernels::MakeTensor;

struct Product {
  int64_t rows, outs, in;
  bool f32 = false, gated = false, accumulate = false;
  int64_t beside = 0;  // outputs of a second matrix
  bool beside_gated = false;
  int64_t pitch = 0;  // of y; 0: as wide as it is
};

void Gemm(Shapes& s, const Product& p) {
  kernels::GemmArgs args;
  args.x = s.Matrix(p.rows, p.gated ? 2 * p.in : p.in);
  args.w = s.Matrix(p.outs, p.in, 0.05f);
  args.gated = p.gated, args.accumulate = p.accumulate;
  const int64_t pitch = p.pitch > 0 ? p.pitch : p.outs;
  if (p.accumulate) {
    args.y = s.MatrixInOut(p.rows, p.outs);
  } else if (pitch > p.outs) {
    args.y = s.MatrixInOut(p.rows, pitch).Columns(0, p.outs);  // what is between rows stays as it is
  } else {
    args.y = p.f32 ? s.OutFloats(p.rows, p.outs) : s.OutMatrix(p.rows, p.outs);
  }
  if (p.beside > 0) {
    args.beside_w = s.Matrix(p.beside, p.in, 0.05f);
    args.beside_y = s.OutMatrix(p.rows, p.beside_gated ? p.beside / 2 : p.beside);
    args.beside_gated = p.beside_gated;
  }
  std::string name =
      "gemm rows " + std::to_string(p.rows) + ", " + std::to_string(p.outs) + " x " + std::to_string(p.in);
  if (p.beside > 0)
    name += std::string(" beside ") + std::to_string(p.beside) + (p.beside_gated ? " gated" : "");
  if (p.gated) name += ", gated";
  if (p.accumulate) name += ", accumulating";
  if (p.f32) name += ", f32";
  if (p.pitch > 0) name += ", pitch " + std::to_string(p.pitch);
  s.Run(name, [&](const cuda::Launch& launch) { return cuda::Gemm(launch, args); });
}
void Products(Shapes& s, const std::vector<Product>& products) {
  for (const Product& p : products) Gemm(s, p);
}

void Stream(Shapes& s) {
  Products(s, {{1, 512, 1024, true},
               {8, 512, 1024},
               {3, 500, 640, false, false, true},
               {1, 384, 1024, true, false, false, 512, true},
               {4, 384, 1024, true, false, false, 500},
               {1, 1024, 256, false, true},
               {9, 1024, 256, false, true}});
}
void Whole(Shapes& s) {
  Products(s, {{1, 1696, 1536},
               {8, 1696, 1536},
               {1, 384, 2560, true, false, false, 512, true},
               {7, 384, 2560, true, false, false, 512, true},
               {2, 896, 2560, true}});
}
void Held(Shapes& s) { Products(s, {{1, 1024, 512}, {8, 1000, 256, true}, {1, 6784, 544}, {5, 6784, 544}}); }
void Even(Shapes& s) {
  Products(s, {{1, 2304, 1056},
               {9, 2304, 1056},
               {2, 1696, 3072},
               {16, 1696, 3072},
               {1, 6800, 1056},
               {8, 7424, 1056, true}});
}
void Broad(Shapes& s) {
  Products(s, {{9, 1024, 256},
               {32, 1024, 256, true},
               {33, 1024, 256},
               {64, 4096, 256},
               {40, 7168, 256, false, false, false, 64},
               {17, 10240, 256},
               {64, 10240, 256},
               {9, 20480, 128},
               {64, 20480, 128},
               {17, 512, 1024},
               {64, 1696, 1536},
               {20, 384, 2560, true, false, false, 512, true},
               {17, 1024, 256, false, true},
               {12, 1000, 320, false, false, true}});
}
void Square(Shapes& s) {
  Products(s,
           {{33, 7168, 256}, {64, 8440, 544}, {50, 2100, 3104, true}, {64, 7168, 1024, false, false, true}});
}
// More than 64 rows without the library, and shapes that nothing else takes.
void Tiles(Shapes& s) {
  Products(s, {{65, 256, 512, false, false, false, 0, false, 260},
               {130, 250, 2048, false, false, false, 0, false, 261},
               {257, 256, 256, false, false, false, 0, false, 260},
               {3, 50, 40},
               {3, 50, 40, true},
               {2, 50, 40, false, true},
               {2, 50, 40, true, true}});
}
// The library's own kernels; ours where it is not installed.
void Library(Shapes& s) { Products(s, {{65, 512, 512}, {130, 256, 512, true}, {70, 256, 512, false, true}}); }

void AbsorbQuery(Shapes& s, int64_t rows, int64_t nope, bool rotates) {
  constexpr int64_t kHeads = 4, kRope = 64, kV = 64, kLatent = 512;
  kernels::AbsorbQueryArgs args{};
  args.q = s.Matrix(rows, kHeads * (nope + kRope));
  args.w_kv_b = s.Matrix(kHeads * (nope + kV), kLatent, 0.05f).bf16();
  args.heads = kHeads, args.nope = nope, args.rope = kRope, args.v = kV, args.latent = kLatent;
  args.out = s.OutMatrix(rows, kHeads * (kLatent + kRope));
  args.attention_factor = 1.0f;
  if (rotates) args.positions = s.In(s.Order(rows)), args.inv_freq = s.In(s.Floats(kRope / 2));
  s.Run("absorb_query rows " + std::to_string(rows) + ", nope " + std::to_string(nope) +
            (rotates ? ", rotating" : ""),
        [&](const cuda::Launch& launch) { return cuda::AbsorbQuery(launch, args); });
}
void AbsorbValue(Shapes& s, int64_t rows, int64_t latent) {
  constexpr int64_t kHeads = 4, kNope = 64, kV = 64;
  kernels::AbsorbValueArgs args{};
  args.attended = s.Matrix(rows, kHeads * latent);
  args.w_kv_b = s.Matrix(kHeads * (kNope + kV), latent, 0.05f).bf16();
  args.heads = kHeads, args.nope = kNope, args.v = kV, args.latent = latent;
  args.out = s.OutMatrix(rows, kHeads * kV);
  s.Run("absorb_value rows " + std::to_string(rows) + ", latent " + std::to_string(latent),
        [&](const cuda::Launch& launch) { return cuda::AbsorbValue(launch, args); });
}
void Absorb(Shapes& s) {
  for (const int64_t rows : {1, 9, 33}) AbsorbQuery(s, rows, 64, true);
  AbsorbQuery(s, 3, 64, false);
  AbsorbQuery(s, 3, 40, true);
  for (const int64_t rows : {1, 9, 33, 70}) AbsorbValue(s, rows, 512);
  AbsorbValue(s, 3, 40);
}

void MlaQuery(Shapes& s, int64_t rows, int64_t heads) {
  constexpr int64_t kLora = 256, kNope = 128, kRope = 64, kV = 64, kLatent = 512, kSlots = 128;
  kernels::MlaQueryArgs args{};
  const int64_t width = kLora + kLatent + kRope;
  kernels::MlaPrepareArgs& prepare = args.prepare;
  prepare.qkv = MakeTensor(s.Spent(s.Bf16(rows * width)), DType::kBF16, rows, width);
  prepare.q_lora = kLora, prepare.latent = kLatent, prepare.rope = kRope;
  prepare.q_norm = s.In(s.Bf16(kLora));
  prepare.kv_norm = s.In(s.Bf16(kLatent));
  prepare.eps = 1e-5f;
  prepare.positions = s.In(s.Order(rows));
  prepare.inv_freq = s.In(s.Floats(kRope / 2));
  prepare.attention_factor = 1.0f;
  std::vector<int32_t> slots = s.Order(kSlots);
  slots.resize(rows);
  if (rows > 2) slots[1] = -1;  // padding
  prepare.slots = s.In(slots);
  prepare.pool = s.MatrixInOut(kSlots, kLatent + kRope);
  args.w_q_b = s.Matrix(heads * (kNope + kRope), kLora, 0.05f);
  kernels::AbsorbQueryArgs& absorb = args.absorb;
  absorb.q =
      MakeTensor(s.Scratch(rows * heads * (kNope + kRope) * 2), DType::kBF16, rows, heads * (kNope + kRope));
  absorb.w_kv_b = s.Matrix(heads * (kNope + kV), kLatent, 0.05f).bf16();
  absorb.heads = heads, absorb.nope = kNope, absorb.rope = kRope, absorb.v = kV, absorb.latent = kLatent;
  absorb.out = s.OutMatrix(rows, heads * (kLatent + kRope));
  absorb.positions = prepare.positions, absorb.inv_freq = prepare.inv_freq, absorb.attention_factor = 1.0f;
  s.Run("mla_query rows " + std::to_string(rows) + ", heads " + std::to_string(heads),
        [&](const cuda::Launch& launch) { return cuda::MlaQuery(launch, args); });
}
void MlaQueries(Shapes& s) {
  for (const int64_t rows : {1, 8, 9, 16, 17, 64, 70}) MlaQuery(s, rows, 2);
  MlaQuery(s, 8, 24);  // more blocks than multiprocessors
  MlaQuery(s, 16, 16);
}

}  // namespace

std::vector<Op> MatrixOps() {
  return {{"gemm_stream", Stream}, {"gemm_whole", Whole},    {"gemm_held", Held},   {"gemm_even", Even},
          {"gemm_broad", Broad},   {"gemm_square", Square},  {"gemm_tiles", Tiles}, {"gemm_library", Library},
          {"absorb", Absorb},      {"mla_query", MlaQueries}};
}

}  // namespace kdt::shapes
