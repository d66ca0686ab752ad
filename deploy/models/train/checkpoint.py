"""Reading and writing the checkpoint format: nested kimi_k25 config, INT4 pack-quantized experts, bf16 for the rest."""

import json
import os

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from kimi import Kimi, KimiConfig, int4_quantize

PREFIX = "language_model."


def pack_int4(q):
    """[out, in] integers in [-8, 7] -> int32 [out, in / 8], element i of eight in bits 4i..4i+3, stored as q + 8."""
    nibbles = (q.to(torch.int64) + 8).unflatten(-1, (-1, 8))
    words = (nibbles << (4 * torch.arange(8, device=q.device))).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def unpack_int4(packed, scales):
    nibbles = (packed.to(torch.int64).unsqueeze(-1) >> (4 * torch.arange(8))) & 15
    q = (nibbles - 8).flatten(-2).float()
    return (q.unflatten(-1, (scales.shape[-1], -1)) * scales.float().unsqueeze(-1)).flatten(-2)


def tensor_names(config):
    """(checkpoint name, module parameter) of every tensor that is not a routed expert's."""
    yield "model.embed_tokens.weight", "embed_tokens"
    yield "lm_head.weight", "lm_head"
    yield "model.norm.weight", "norm"
    for i in range(config.num_hidden_layers):
        layer = f"layers.{i}."
        names = ["input_layernorm", "post_attention_layernorm"]
        names += ["self_attn." + n for n in ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa")]
        names += ["self_attn." + n for n in ("kv_a_layernorm", "kv_b_proj", "o_proj")]
        mlp = "mlp.shared_experts." if i >= config.first_k_dense_replace else "mlp."
        names += [mlp + n for n in ("gate_proj", "up_proj", "down_proj")]
        if i >= config.first_k_dense_replace:
            names.append("mlp.gate")
            yield f"model.{layer}mlp.gate.e_score_correction_bias", layer + "mlp.e_score_correction_bias"
        for name in names:
            yield f"model.{layer}{name}.weight", layer + name


def moe_layers(config):
    return range(config.first_k_dense_replace, config.num_hidden_layers)


def save_target(model, folder, shards=2):
    """Writes the weights of `model`, experts quantised, in `shards` files and an index."""
    config, state, tensors = model.config, model.state_dict(), {}
    for name, parameter in tensor_names(config):
        dtype = torch.float32 if name.endswith("bias") else torch.bfloat16
        tensors[PREFIX + name] = state[parameter].detach().to("cpu", dtype).contiguous()
    for i in moe_layers(config):
        for kind in ("gate", "up", "down"):
            for e, weight in enumerate(state[f"layers.{i}.mlp.expert_{kind}"].detach().float().cpu()):
                q, scales = int4_quantize(weight)
                name = f"{PREFIX}model.layers.{i}.mlp.experts.{e}.{kind}_proj."
                tensors[name + "weight_packed"] = pack_int4(q)
                tensors[name + "weight_scale"] = scales.to(torch.bfloat16)
                tensors[name + "weight_shape"] = torch.tensor(weight.shape, dtype=torch.int32)
    os.makedirs(folder, exist_ok=True)
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    files, used = [{} for _ in range(shards)], 0
    for name, tensor in tensors.items():
        files[min(used * shards // total, shards - 1)][name] = tensor
        used += tensor.numel() * tensor.element_size()
    weight_map = {}
    for number, file in enumerate(files, 1):
        file_name = f"model-{number:05d}-of-{shards:05d}.safetensors"
        save_file(file, os.path.join(folder, file_name), metadata={"format": "pt"})
        weight_map.update({name: file_name for name in file})
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(os.path.join(folder, "model.safetensors.index.json"), index)


def load_target(folder, dtype=torch.float32, config_folder=None):
    """The model with exactly the stored weights, in fp32 parameters; config.json may lie in another folder."""
    config = KimiConfig.from_file(os.path.join(config_folder or folder, "config.json"))
    with open(os.path.join(folder, "model.safetensors.index.json"), encoding="utf-8") as file:
        weight_map = json.load(file)["weight_map"]
    files = {n: safe_open(os.path.join(folder, n), "pt") for n in set(weight_map.values())}
    get = lambda name: files[weight_map[PREFIX + name]].get_tensor(PREFIX + name)
    state = {parameter: get(name).float() for name, parameter in tensor_names(config)}
    for i in moe_layers(config):
        for kind in ("gate", "up", "down"):
            names = [f"model.layers.{i}.mlp.experts.{e}.{kind}_proj." for e in range(config.n_routed_experts)]
            experts = [unpack_int4(get(n + "weight_packed"), get(n + "weight_scale")) for n in names]
            state[f"layers.{i}.mlp.expert_{kind}"] = torch.stack(experts)
    model = Kimi(config, dtype)
    model.load_state_dict(state)
    return model.requires_grad_(False)


def write_json(path, value):
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=1, ensure_ascii=False)
        file.write("\n")
