#include "kdt/kernels/mla_prepare.h"

#include "kernels/cpu/ops.h"

namespace kdt::kernels::cpu {

void MlaPrepare(Context& context, const MlaPrepareArgs& args) {
  KDT_CHECK(args.qkv.cols == args.q_lora + args.latent + args.rope);
  const Tensor q = args.qkv.Columns(0, args.q_lora);
  const Tensor latent = args.qkv.Columns(args.q_lora, args.latent);
  const Tensor rotated = args.qkv.Columns(args.q_lora + args.latent, args.rope);
  RmsNorm(context, {q, {}, args.q_norm, args.eps, q});
  RmsNorm(context, {latent, {}, args.kv_norm, args.eps, latent});
  Rope(context, {rotated, 1, args.rope, 0, args.rope, args.positions, args.inv_freq, args.attention_factor,
                 RopeLayout::kInterleaved});
  KvWrite(context, {args.qkv.Columns(args.q_lora, args.latent + args.rope), args.slots, args.pool});
}

}  // namespace kdt::kernels::cpu
