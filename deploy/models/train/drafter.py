"""The DFlash drafter: proposes a whole block in one pass from features of the target's layers.

Plain PyTorch, for training and as a reference. The context of a block is the positions before its root; slot 0 of a
block is the root, slots 1.. are masks, and slot i predicts the token at its own position.
"""

import json
import os

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

from kimi import linear, rms_norm, weight_of, yarn_inv_freq


def rope_half(x, cos, sin):
    """Rotates pairs (i, i + dim / 2). cos, sin: [..., T, dim / 2]."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class DraftLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
        self.heads, self.kv_heads, self.dim = config["num_attention_heads"], config["num_key_value_heads"], dim
        self.eps, small = config["rms_norm_eps"], (2 * config["num_hidden_layers"]) ** -0.5
        self.input_layernorm = nn.Parameter(torch.ones(hidden))
        self.post_attention_layernorm = nn.Parameter(torch.ones(hidden))
        self.q_proj = weight_of(self.heads * dim, hidden)
        self.k_proj = weight_of(self.kv_heads * dim, hidden)
        self.v_proj = weight_of(self.kv_heads * dim, hidden)
        self.o_proj = weight_of(hidden, self.heads * dim, scale=small)
        self.q_norm = nn.Parameter(torch.ones(dim))
        self.k_norm = nn.Parameter(torch.ones(dim))
        self.gate_proj = weight_of(inner, hidden)
        self.up_proj = weight_of(inner, hidden)
        self.down_proj = weight_of(hidden, inner, scale=small)

    def keys_values(self, x, rope):
        """x [B, T, hidden] -> k, v [B, kv heads, T, dim]."""
        batch, length, _ = x.shape
        k = linear(x, self.k_proj).view(batch, length, self.kv_heads, self.dim).transpose(1, 2)
        k = rope_half(rms_norm(k, self.k_norm, self.eps), *rope).to(x.dtype)
        return k, linear(x, self.v_proj).view(batch, length, self.kv_heads, self.dim).transpose(1, 2)

    def forward(self, x, context, context_rope, block_rope, mask, dtype):
        """x [B, Q, hidden] fp32: the slots of all blocks; context [B, S, hidden]; mask [B, 1, Q, S + Q] of bool."""
        batch, length, _ = x.shape
        h = rms_norm(x, self.input_layernorm, self.eps).to(dtype)
        q = linear(h, self.q_proj).view(batch, length, self.heads, self.dim).transpose(1, 2)
        q = rope_half(rms_norm(q, self.q_norm, self.eps), *block_rope).to(dtype)
        parts = self.keys_values(context, context_rope), self.keys_values(h, block_rope)
        k, v = (torch.cat(pair, dim=2).repeat_interleave(self.heads // self.kv_heads, dim=1) for pair in zip(*parts))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + linear(out.transpose(1, 2).reshape(batch, length, -1), self.o_proj).float()
        h = rms_norm(x, self.post_attention_layernorm, self.eps).to(dtype)
        return x + linear(F.silu(linear(h, self.gate_proj)) * linear(h, self.up_proj), self.down_proj).float()


class Drafter(nn.Module):
    def __init__(self, config, dtype=torch.float32):
        super().__init__()
        self.config, self.dtype = config, dtype
        self.block = config["block_size"]
        self.mask_id = config["dflash_config"]["mask_token_id"]
        self.target_layers = config["dflash_config"]["target_layer_ids"]
        hidden = config["hidden_size"]
        self.fc = weight_of(hidden, len(self.target_layers) * hidden)
        self.hidden_norm = nn.Parameter(torch.ones(hidden))
        self.norm = nn.Parameter(torch.ones(hidden))
        self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config["num_hidden_layers"]))
        inv_freq = yarn_inv_freq(config["head_dim"], config["rope_theta"], config["rope_scaling"])
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, features, roots, starts, embed, lm_head):
        """features: the target layers' outputs, each [B, S, hidden]; roots, starts [B, N]: token and position of
        each block's root; embed, lm_head: the target's. Block n sees the context positions before starts[n] and
        itself. Returns logits [B, N, block - 1, vocab] of slots 1.. .
        """
        batch, count = starts.shape
        length, size, dtype = features[0].shape[1], self.block, self.dtype
        eps, device = self.config["rms_norm_eps"], starts.device
        context = linear(torch.cat([f.to(dtype) for f in features], dim=-1), self.fc)
        context = rms_norm(context, self.hidden_norm, eps).to(dtype)
        tokens = torch.full((batch, count, size), self.mask_id, device=device)
        tokens[:, :, 0] = roots
        x = F.embedding(tokens.flatten(1), embed.to(dtype)).float()
        positions = (starts[:, :, None] + torch.arange(size, device=device)).flatten(1)
        places = torch.arange(length, device=device)
        of_block = torch.arange(count, device=device).repeat_interleave(size)
        sees_context = places < starts.repeat_interleave(size, dim=1)[:, :, None]
        sees_block = (of_block[:, None] == of_block).expand(batch, -1, -1)
        mask = torch.cat((sees_context, sees_block), dim=-1).unsqueeze(1)
        rope = lambda p: ((a := p[..., None].float() * self.inv_freq).cos(), a.sin())
        context_rope, block_rope = rope(places), tuple(r.unsqueeze(1) for r in rope(positions))
        for layer in self.layers:
            x = layer(x, context, context_rope, block_rope, mask, dtype)
        x = x.view(batch, count, size, -1)[:, :, 1:]
        return linear(rms_norm(x, self.norm, eps).to(dtype), lm_head)


def checkpoint_name(parameter):
    parts = parameter.split(".")
    if len(parts) == 3:
        attention = parts[2] in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
        inner = "self_attn." if attention else "" if parts[2].endswith("layernorm") else "mlp."
        parts[2] = inner + parts[2]
    return ".".join(parts) + ".weight"


def save_drafter(drafter, folder):
    os.makedirs(folder, exist_ok=True)
    state = drafter.state_dict().items()
    tensors = {checkpoint_name(n): t.detach().to("cpu", torch.bfloat16).contiguous() for n, t in state}
    save_file(tensors, os.path.join(folder, "model.safetensors"), metadata={"format": "pt"})


def load_drafter(folder, dtype=torch.float32, config_folder=None):
    with open(os.path.join(config_folder or folder, "config.json"), encoding="utf-8") as file:
        drafter = Drafter(json.load(file), dtype)
    tensors = load_file(os.path.join(folder, "model.safetensors"))
    drafter.load_state_dict({n: tensors[checkpoint_name(n)].float() for n in drafter.state_dict()})
    return drafter.requires_grad_(False)
