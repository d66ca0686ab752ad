"""Writes a checkpoint of any size with the tensors of the full model and meaningless values, for load_bench.

    python3 tests/bench/make_checkpoint.py OUT --config tests/bench/rank_bench/k26/config.json --layers 3 --experts 96 --shards 8
"""

import argparse
import json
import os
import struct

BLOCK = 64 << 20


def tensors(text, prefix):
    """(name, dtype, shape) of everything the engine reads."""
    h, heads, qk = text["hidden_size"], text["num_attention_heads"], text["qk_nope_head_dim"] + text["qk_rope_head_dim"]
    q, kv, rope = text["q_lora_rank"], text["kv_lora_rank"], text["qk_rope_head_dim"]
    inner, vocab = text["moe_intermediate_size"], text["vocab_size"]
    yield prefix + "model.embed_tokens.weight", "BF16", [vocab, h]
    for layer in range(text["num_hidden_layers"]):
        p = f"{prefix}model.layers.{layer}."
        yield p + "input_layernorm.weight", "BF16", [h]
        yield p + "post_attention_layernorm.weight", "BF16", [h]
        a = p + "self_attn."
        yield a + "q_a_proj.weight", "BF16", [q, h]
        yield a + "q_a_layernorm.weight", "BF16", [q]
        yield a + "q_b_proj.weight", "BF16", [heads * qk, q]
        yield a + "kv_a_proj_with_mqa.weight", "BF16", [kv + rope, h]
        yield a + "kv_a_layernorm.weight", "BF16", [kv]
        yield a + "kv_b_proj.weight", "BF16", [heads * (text["qk_nope_head_dim"] + text["v_head_dim"]), kv]
        yield a + "o_proj.weight", "BF16", [h, heads * text["v_head_dim"]]

        def mlp(p, width):
            yield p + "gate_proj.weight", "BF16", [width, h]
            yield p + "up_proj.weight", "BF16", [width, h]
            yield p + "down_proj.weight", "BF16", [h, width]

        m = p + "mlp."
        if layer < text["first_k_dense_replace"]:
            yield from mlp(m, text["intermediate_size"])
            continue
        yield m + "gate.weight", "BF16", [text["n_routed_experts"], h]
        yield m + "gate.e_score_correction_bias", "F32", [text["n_routed_experts"]]
        yield from mlp(m + "shared_experts.", text["n_shared_experts"] * inner)
        for expert in range(text["n_routed_experts"]):
            for part, out, width in (("gate", inner, h), ("up", inner, h), ("down", h, inner)):
                e = f"{m}experts.{expert}.{part}_proj."
                yield e + "weight_packed", "I32", [out, width // 8]
                yield e + "weight_scale", "BF16", [out, width // 32]
                yield e + "weight_shape", "I32", [2, out, width]  # [2]; the two values follow
    yield prefix + "model.norm.weight", "BF16", [h]
    yield prefix + "lm_head.weight", "BF16", [vocab, h]


def write_shard(path, entries, block):
    header, at = {}, 0
    for name, dtype, shape in entries:
        values = None
        if name.endswith("weight_shape"):
            shape, values = [2], shape[1:]
        size = {"BF16": 2, "I32": 4, "F32": 4}[dtype]
        for extent in shape:
            size *= extent
        header[name] = (dtype, shape, at, at + size, values)
        at += size
    text = json.dumps({n: {"dtype": d, "shape": s, "data_offsets": [b, e]} for n, (d, s, b, e, _) in header.items()})
    text += " " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)))
        file.write(text.encode())
        for _, _, begin, end, values in header.values():
            if values is not None:
                file.write(struct.pack("<2i", *values))
                continue
            while begin < end:
                part = min(BLOCK, end - begin)
                file.write(block[:part])
                begin += part
    return at


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--config", required=True)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--experts", type=int)
    parser.add_argument("--vocab", type=int)
    parser.add_argument("--shards", type=int, default=8)
    args = parser.parse_args()
    with open(args.config) as file:
        config = json.load(file)
    text = config.get("text_config", config)
    text["num_hidden_layers"] = args.layers or text["num_hidden_layers"]
    text["n_routed_experts"] = args.experts or text["n_routed_experts"]
    if args.vocab:
        text["vocab_size"] = args.vocab
        for part in (config, text):
            for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
                part.pop(key, None)
    os.makedirs(args.out, exist_ok=True)
    with open(os.path.join(args.out, "config.json"), "w") as file:
        json.dump(config, file)
    entries = list(tensors(text, "language_model." if "text_config" in config else ""))
    block = memoryview(os.urandom(1 << 20) * (BLOCK >> 20))
    index, total = {}, 0
    for shard in range(args.shards):
        name = f"model-{shard + 1:05d}-of-{args.shards:05d}.safetensors"
        begin, end = (len(entries) * i // args.shards for i in (shard, shard + 1))
        total += write_shard(os.path.join(args.out, name), entries[begin:end], block)
        index.update({entry[0]: name for entry in entries[begin:end]})
    with open(os.path.join(args.out, "model.safetensors.index.json"), "w") as file:
        json.dump({"metadata": {"total_size": total}, "weight_map": index}, file)
    print(f"{total / 1e9:.2f} GB in {args.shards} shards")


if __name__ == "__main__":
    main()
