// Routed experts in each form of their kernel (moe/schedule.cuh).
#include <algorithm>
#include <set>

#include "tests/gpu/shapes/shapes.h"

namespace kdt::shapes {
namespace {

using kernels::DType;
using kernels::MakeTensor;

constexpr int64_t kTopK = 8, kSharedWidth = 256;
constexpr int64_t kOthers = 18, kFirst = 5;  // experts of other ranks, and how many of them are in front

struct Case {
  int64_t rows;
  bool choice = false, shared = false;
  int64_t held = 6, hidden = 3584, inner = 256;
  bool others = true;    // some experts are held elsewhere
  bool padding = false;  // the last rows, with a choice
  bool f32 = false, accumulate = false;
};

kernels::Int4Experts Weights(Shapes& s, const Case& c, bool in_place = false) {
  const auto words = [&](int64_t count) {
    std::vector<uint32_t> bits(static_cast<size_t>(count));
    for (uint32_t& b : bits) b = s.Random() << 16 ^ s.Random();
    return in_place ? s.InOut(bits) : s.In(bits);
  };
  const auto scales = [&](int64_t count) {
    const std::vector<uint16_t> bits = s.Bf16(count, 0.02f);
    return in_place ? s.InOut(bits) : s.In(bits);
  };
  const int64_t gate_up = c.held * 2 * c.inner * c.hidden, down = c.held * c.hidden * c.inner;
  kernels::Int4Experts w;
  w.experts = c.held, w.first_expert = c.others ? kFirst : 0, w.hidden = c.hidden, w.inner = c.inner;
  w.gate_up = words(gate_up / 8), w.gate_up_scale = scales(gate_up / kernels::kInt4Group);
  w.down = words(down / 8), w.down_scale = scales(down / kernels::kInt4Group);
  return w;
}

void Moe(Shapes& s, const Case& c) {
  const int64_t all = c.held + (c.others ? kOthers : 0);
  kernels::MoeArgs args{};
  args.x = s.Matrix(c.rows, c.hidden);
  args.weights = Weights(s, c);
  args.top_k = kTopK;
  args.accumulate = c.accumulate;
  args.out = c.f32          ? s.OutFloats(c.rows, c.hidden)
             : c.accumulate ? s.MatrixInOut(c.rows, c.hidden)
                            : s.OutMatrix(c.rows, c.hidden);
  if (c.choice) {
    args.choice.scores =
        MakeTensor(const_cast<float*>(s.In(s.Floats(c.rows * all))), DType::kF32, c.rows, all);
    args.choice.bias = s.In(s.Floats(all, 0.1f));
    args.choice.normalize = true, args.choice.scale = 2.5f;
    if (c.padding) args.choice.row_count = s.In(std::vector<int32_t>{static_cast<int32_t>(c.rows - 1)});
    args.choice.expert_ids = s.Out<int32_t>(c.rows * kTopK);
    args.choice.weights = s.Out<float>(c.rows * kTopK);
  } else {
    std::vector<int32_t> ids;
    for (int64_t r = 0; r < c.rows; ++r) {
      std::set<int32_t> mine{
          static_cast<int32_t>(args.weights.first_expert + r % c.held)};  // one that is held here
      while (mine.size() < kTopK) mine.insert(static_cast<int32_t>(s.Random() % all));
      ids.insert(ids.end(), mine.begin(), mine.end());
    }
    args.expert_ids = s.In(ids);
    args.expert_weights = s.In(std::vector<float>(ids.size(), 0.125f));
  }
  if (c.shared) {
    args.shared_inner = s.Matrix(c.rows, kSharedWidth);
    args.shared_down = s.Matrix(c.hidden, kSharedWidth, 0.05f);
  }
  std::string name = "moe rows " + std::to_string(c.rows) + ", " + std::to_string(c.held) + " experts " +
                     std::to_string(c.hidden) + " x " + std::to_string(c.inner);
  if (c.choice) name += c.padding ? ", choice with padding" : ", choice";
  if (c.shared) name += ", shared";
  if (c.f32) name += ", f32";
  if (c.accumulate) name += ", accumulating";
  // The sum over experts reads the products of all of a row's experts before it knows which are held here.
  const Workspace workspace{cuda::MoeWorkspace(c.rows, kTopK, c.inner, c.hidden) + (size_t{4} << 20),
                            c.others || c.padding};
  s.Run(
      name, [&](const cuda::Launch& launch) { return cuda::Moe(launch, args); }, workspace);
}
void Cases(Shapes& s, const std::vector<Case>& cases) {
  for (const Case& c : cases) Moe(s, c);
}

void Few(Shapes& s) { Cases(s, {{.rows = 1}, {.rows = 2}, {.rows = 3}, {.rows = 4}}); }
void Eight(Shapes& s) { Cases(s, {{.rows = 5}, {.rows = 8}}); }
void Chosen(Shapes& s) {
  Cases(s, {{.rows = 1, .choice = true, .shared = true},
            {.rows = 2, .choice = true, .shared = true},
            {.rows = 3, .choice = true, .shared = true, .padding = true},
            {.rows = 4, .choice = true, .shared = true},
            {.rows = 2, .choice = true}});
}
void EightChosen(Shapes& s) {
  Cases(s, {{.rows = 5, .choice = true, .shared = true},
            {.rows = 8, .choice = true, .shared = true, .padding = true}});
}
void Many(Shapes& s) {
  Cases(s, {{.rows = 9, .held = 8, .others = false},
            {.rows = 9, .choice = true, .shared = true, .held = 8, .others = false},
            {.rows = 32, .choice = true, .shared = true, .held = 3, .padding = true},
            {.rows = 12, .held = 2, .f32 = true}});
}
// Lists of pairs in the workspace.
void Most(Shapes& s) { Cases(s, {{.rows = 360, .held = 1}}); }
void Ragged(Shapes& s) {
  Cases(s, {{.rows = 1, .held = 8, .hidden = 96, .inner = 64, .others = false},
            {.rows = 5, .choice = true, .shared = true, .hidden = 96, .inner = 64},
            {.rows = 40, .hidden = 160, .inner = 96, .accumulate = true},
            {.rows = 400, .held = 8, .hidden = 96, .inner = 64, .others = false}});
}
void Order(Shapes& s) {
  const kernels::Int4Experts w = Weights(s, {.rows = 0, .held = 2}, true);
  s.Run("order_experts", [&](const cuda::Launch& launch) { return cuda::OrderExperts(launch, w); });
}

}  // namespace

std::vector<Op> MoeOps() {
  return {{"moe_few", Few},   {"moe_eight", Eight}, {"moe_chosen", Chosen}, {"moe_eight_chosen", EightChosen},
          {"moe_many", Many}, {"moe_most", Most},   {"moe_ragged", Ragged}, {"order_experts", Order}};
}

}  // namespace kdt::shapes
