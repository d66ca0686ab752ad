"""The target: a Kimi-K2-shaped decoder (MLA, sigmoid-routed experts) in plain PyTorch, for training and as a reference.

Tensor names and meanings follow the published checkpoint format; see checkpoint.py for reading and writing it.
"""

import json
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

GROUP = 32  # INT4 quantisation group, along the input dimension


@dataclass
class KimiConfig:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    n_shared_experts: int
    n_routed_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float
    kv_lora_rank: int
    q_lora_rank: int
    qk_rope_head_dim: int
    qk_nope_head_dim: int
    v_head_dim: int
    first_k_dense_replace: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict

    @classmethod
    def from_file(cls, path):
        with open(path, encoding="utf-8") as file:
            config = json.load(file)
        text = config.get("text_config", config)
        return cls(**{name: text[name] for name in cls.__dataclass_fields__})

    @property
    def softmax_scale(self):
        scaling = self.rope_scaling
        mscale = 0.1 * scaling["mscale_all_dim"] * math.log(scaling["factor"]) + 1.0
        return (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5 * mscale * mscale


def yarn_inv_freq(dim, theta, scaling):
    """Angular frequency per pair, shape [dim / 2]: interpolated below beta_slow turns, untouched above beta_fast."""
    plain = theta ** -(torch.arange(0, dim, 2, dtype=torch.float32) / dim)

    def pair_of(turns):
        length = scaling["original_max_position_embeddings"]
        return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_of(scaling["beta_fast"])), 0)
    high = min(math.ceil(pair_of(scaling["beta_slow"])), dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)).clamp(0, 1)
    return plain * (1 - ramp) + plain / scaling["factor"] * ramp


def rope_interleaved(x, cos, sin):
    """Rotates pairs (2i, 2i+1). The result lists all first halves, then all second ones: the same order for q and k."""
    first, second = x[..., 0::2], x[..., 1::2]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def rms_norm(x, weight, eps):
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def int4_scales(weight):
    """Scale per group of 32 inputs, rounded to bf16 as it is stored: [..., in] -> [..., in / 32]."""
    groups = weight.detach().unflatten(-1, (-1, GROUP))
    return (groups.abs().amax(-1) / 7.0).clamp_min(1e-8).to(torch.bfloat16).float()


def int4_quantize(weight):
    """Integers in [-8, 7] and their scales: weight is about q * scale."""
    scales = int4_scales(weight)
    groups = weight.detach().unflatten(-1, (-1, GROUP))
    q = torch.round(groups / scales.unsqueeze(-1)).clamp(-8, 7)
    return q.flatten(-2), scales


def fake_int4(weight, amount):
    """weight moved by `amount` (0..1) towards what INT4 stores; the gradient passes straight through."""
    q, scales = int4_quantize(weight)
    stored = (q.unflatten(-1, (-1, GROUP)) * scales.unsqueeze(-1)).flatten(-2)
    return weight + amount * (stored - weight.detach())


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        c = self.config = config
        heads, qk = c.num_attention_heads, c.qk_nope_head_dim + c.qk_rope_head_dim
        self.q_a_proj = weight_of(c.q_lora_rank, c.hidden_size)
        self.q_a_layernorm = nn.Parameter(torch.ones(c.q_lora_rank))
        self.q_b_proj = weight_of(heads * qk, c.q_lora_rank)
        self.kv_a_proj_with_mqa = weight_of(c.kv_lora_rank + c.qk_rope_head_dim, c.hidden_size)
        self.kv_a_layernorm = nn.Parameter(torch.ones(c.kv_lora_rank))
        self.kv_b_proj = weight_of(heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank)
        self.o_proj = weight_of(c.hidden_size, heads * c.v_head_dim, scale=(2 * c.num_hidden_layers) ** -0.5)

    def forward(self, x, cos, sin, cache=None):
        """x [B, T, hidden] normalised; cos, sin [T, rope / 2]; cache: a LayerCache to append to. Returns [B, T, hidden]."""
        c = self.config
        batch, length, _ = x.shape
        heads, nope, rope, v_dim = c.num_attention_heads, c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim
        q = linear(rms_norm(linear(x, self.q_a_proj), self.q_a_layernorm, c.rms_norm_eps).to(x.dtype), self.q_b_proj)
        q = q.view(batch, length, heads, nope + rope).transpose(1, 2)
        latent, k_rope = linear(x, self.kv_a_proj_with_mqa).split((c.kv_lora_rank, rope), dim=-1)
        latent = rms_norm(latent, self.kv_a_layernorm, c.rms_norm_eps).to(x.dtype)
        kv = linear(latent, self.kv_b_proj).view(batch, length, heads, nope + v_dim).transpose(1, 2)
        k_rope = rope_interleaved(k_rope.float(), cos, sin).to(x.dtype).unsqueeze(1).expand(-1, heads, -1, -1)
        q_rope = rope_interleaved(q[..., nope:].float(), cos, sin).to(x.dtype)
        q = torch.cat((q[..., :nope], q_rope), dim=-1)
        k = torch.cat((kv[..., :nope], k_rope), dim=-1)
        v = kv[..., nope:]
        if cache is None:
            # Fused attention wants equally wide q, k and v: zeros widen v and are cut off again.
            v = F.pad(v, (0, q.shape[-1] - v_dim))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=c.softmax_scale)[..., :v_dim]
        else:
            k, v, mask = cache.append(k, v)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=c.softmax_scale)
        return linear(out.transpose(1, 2).reshape(batch, length, heads * v_dim), self.o_proj)


class LayerCache:
    """Keys and values of one layer for incremental decoding, in buffers of a fixed length."""

    def __init__(self, batch, heads, capacity, qk_dim, v_dim, device, dtype):
        self.k = torch.zeros(batch, heads, capacity, qk_dim, device=device, dtype=dtype)
        self.v = torch.zeros(batch, heads, capacity, v_dim, device=device, dtype=dtype)
        self.length = 0

    def append(self, k, v):
        start, self.length = self.length, self.length + k.shape[2]
        self.k[:, :, start : self.length] = k
        self.v[:, :, start : self.length] = v
        mask = None
        if k.shape[2] > 1:
            rows = torch.arange(start, self.length, device=k.device)
            mask = torch.arange(self.length, device=k.device)[None, :] <= rows[:, None]
        return self.k[:, :, : self.length], self.v[:, :, : self.length], mask


class DenseMlp(nn.Module):
    def __init__(self, hidden, inner, layers):
        super().__init__()
        self.gate_proj = weight_of(inner, hidden)
        self.up_proj = weight_of(inner, hidden)
        self.down_proj = weight_of(hidden, inner, scale=(2 * layers) ** -0.5)

    def forward(self, x):
        return linear(F.silu(linear(x, self.gate_proj)) * linear(x, self.up_proj), self.down_proj)


class MoeMlp(nn.Module):
    """Routed and shared experts. All experts run as one wide MLP whose inner activations are scaled by the routing
    weights (zero where an expert was not chosen): at this size that is quicker than sorting tokens by expert."""

    def __init__(self, config):
        super().__init__()
        c = self.config = config
        experts, inner, hidden = c.n_routed_experts, c.moe_intermediate_size, c.hidden_size
        self.gate = weight_of(experts, hidden)
        self.register_buffer("e_score_correction_bias", torch.zeros(experts))
        self.expert_gate = weight_of(experts, inner, hidden)
        self.expert_up = weight_of(experts, inner, hidden)
        self.expert_down = weight_of(experts, hidden, inner, scale=(2 * c.num_hidden_layers) ** -0.5)
        self.shared_experts = DenseMlp(hidden, inner * c.n_shared_experts, c.num_hidden_layers)

    def route(self, x):
        """x [..., hidden] -> routing weights [..., experts], zero except for the chosen, and the mask of the chosen."""
        c = self.config
        scores = torch.sigmoid(F.linear(x.float(), self.gate.float()))
        chosen = (scores.detach() + self.e_score_correction_bias).topk(c.num_experts_per_tok, dim=-1).indices
        mask = torch.zeros_like(scores).scatter(-1, chosen, 1.0)
        kept = scores * mask
        return kept / (kept.sum(-1, keepdim=True) + 1e-20) * c.routed_scaling_factor, mask

    def forward(self, x, int4):
        c = self.config
        weights, mask = self.route(x)
        experts, inner, hidden = c.n_routed_experts, c.moe_intermediate_size, c.hidden_size
        gate, up, down = (self.expert_gate, self.expert_up, self.expert_down)
        if int4 is not None:
            gate, up, down = fake_int4(gate, int4), fake_int4(up, int4), fake_int4(down, int4)
        wide = F.silu(linear(x, gate.reshape(-1, hidden))) * linear(x, up.reshape(-1, hidden))
        wide = wide * weights.to(wide.dtype).repeat_interleave(inner, dim=-1)
        out = linear(wide, down.transpose(0, 1).reshape(hidden, experts * inner))
        return out + self.shared_experts(x), mask.sum(tuple(range(mask.dim() - 1)))


class Layer(nn.Module):
    def __init__(self, config, index):
        super().__init__()
        c = config
        self.eps = c.rms_norm_eps
        self.input_layernorm = nn.Parameter(torch.ones(c.hidden_size))
        self.self_attn = Attention(c)
        self.post_attention_layernorm = nn.Parameter(torch.ones(c.hidden_size))
        self.is_moe = index >= c.first_k_dense_replace
        dense = lambda: DenseMlp(c.hidden_size, c.intermediate_size, c.num_hidden_layers)
        self.mlp = MoeMlp(c) if self.is_moe else dense()

    def forward(self, x, cos, sin, dtype, int4, cache):
        """x [B, T, hidden] fp32 residual stream. Returns it and the tokens per expert (None for a dense layer)."""
        x = x + self.self_attn(rms_norm(x, self.input_layernorm, self.eps).to(dtype), cos, sin, cache).float()
        h = rms_norm(x, self.post_attention_layernorm, self.eps).to(dtype)
        load = None
        if self.is_moe:
            h, load = self.mlp(h, int4)
        else:
            h = self.mlp(h)
        return x + h.float(), load


class Kimi(nn.Module):
    """dtype: of matrix products and attention; parameters and the residual stream are fp32."""

    def __init__(self, config, dtype=torch.float32):
        super().__init__()
        self.config, self.dtype = config, dtype
        self.embed_tokens = nn.Parameter(torch.randn(config.vocab_size, config.hidden_size) * 0.5)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers))
        self.norm = nn.Parameter(torch.ones(config.hidden_size))
        self.lm_head = nn.Parameter(torch.randn(config.vocab_size, config.hidden_size) * 0.5 * config.hidden_size**-0.5)
        inv_freq = yarn_inv_freq(config.qk_rope_head_dim, config.rope_theta, config.rope_scaling)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def new_cache(self, batch, capacity):
        c = self.config
        sizes = (batch, c.num_attention_heads, capacity, c.qk_nope_head_dim + c.qk_rope_head_dim, c.v_head_dim)
        return [LayerCache(*sizes, self.inv_freq.device, self.dtype) for _ in self.layers]

    def forward(self, tokens, int4=None, cache=None, hidden_of=(), last_only=False):
        """tokens [B, T]; int4: how far experts are fake-quantised (a scalar tensor), None for not at all.

        Returns logits [B, T, vocab], tokens per expert [moe layers, experts], and the residual stream after each
        layer in hidden_of. last_only: logits of the last position, [B, 1, vocab].
        """
        start = cache[0].length if cache else 0
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device, dtype=torch.float32)
        angles = positions[:, None] * self.inv_freq
        cos, sin = angles.cos(), angles.sin()
        x = F.embedding(tokens, self.embed_tokens.to(self.dtype)).float()
        loads, hidden = [], []
        for i, layer in enumerate(self.layers):
            x, load = layer(x, cos, sin, self.dtype, int4, cache[i] if cache else None)
            if load is not None:
                loads.append(load)
            if i in hidden_of:
                hidden.append(x)
        if last_only:
            x = x[:, -1:]
        logits = linear(rms_norm(x, self.norm, self.config.rms_norm_eps).to(self.dtype), self.lm_head)
        return logits, torch.stack(loads), hidden


def weight_of(*shape, scale=1.0):
    return nn.Parameter(torch.randn(*shape) * scale * shape[-1] ** -0.5)


def linear(x, weight):
    return F.linear(x, weight.to(x.dtype))
