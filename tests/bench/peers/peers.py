#!/usr/bin/env python3
"""Times peers of verify_attention on the shapes of kdt-kernel-bench, in the same way: one rank's 8 heads, latent 512 + rope
64, page size 1, random slots, keys not in cache, medians of single runs between two events behind a delay.

    peers.py --sglang DIR [--flashinfer NAME=LIB.so ...] [--ours kdt-kernel-bench.json] [--json FILE]

DIR is an unpacked SGLang wheel (pip download --no-deps sglang; unzip). Its Triton kernels are imported from there by path with
the few things they want of the rest of SGLang stubbed; nothing of it is copied. Peers:
    extend   extend_attention_fwd with a tree mask: what SGLang verifies trees with
    decode   decode_attention_fwd, split over the keys: one row; a chain's rows as so many sequences, no tree
LIB.so is flashinfer_mla.cu compiled against an unpacked FlashInfer wheel; its MLA takes one row or a chain, no tree.
The outputs of the peers that compute the same thing are compared with each other. A peer that cannot be imported or does not take a shape is reported as such.
"""
import argparse
import ctypes
import json
import random
import statistics
import sys
import types

import torch

HEADS, LATENT, ROPE = 8, 512, 64
WIDTH = LATENT + ROPE
POOL_SLOTS = 1_200_000
SPLITS = 64  # of the decode kernel


class _AnyFlag:
    """Stands for sglang.srt.environ.envs: every flag is off."""

    def __getattr__(self, name):
        return types.SimpleNamespace(get=lambda: False)


def import_peers(folder):
    sys.path.insert(0, folder)
    for name in ("sglang", "sglang.srt", "sglang.kernels", "sglang.kernels.ops", "sglang.kernels.ops.attention"):
        module = types.ModuleType(name)
        module.__path__ = [f"{folder}/{name.replace('.', '/')}"]
        sys.modules[name] = module
    environ = types.ModuleType("sglang.srt.environ")
    environ.envs = _AnyFlag()
    utils = types.ModuleType("sglang.srt.utils")
    utils.is_cuda = lambda: True
    utils.is_hip = utils.is_gfx95_supported = utils.is_gfx1250_supported = lambda: False
    utils.get_device_core_count = lambda device=0: torch.cuda.get_device_properties(device).multi_processor_count
    sys.modules["sglang.srt.environ"], sys.modules["sglang.srt.utils"] = environ, utils
    from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd
    from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd
    return extend_attention_fwd, decode_attention_fwd


class FlashInfer:
    """One of the kernels of flashinfer_mla.cu; a plan is made for each shape, outside of the time, as its users do."""

    def __init__(self, path):
        self.lib = ctypes.CDLL(path)
        self.lib.PeerPlan.restype = ctypes.c_void_p
        self.floats = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
        self.ints = torch.empty(8 << 20, dtype=torch.uint8, device="cuda")

    def plan(self, rows, context):
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        handle = self.lib.PeerPlan(ctypes.c_void_p(self.floats.data_ptr()), ctypes.c_size_t(self.floats.numel()),
                                   ctypes.c_void_p(self.ints.data_ptr()), ctypes.c_size_t(self.ints.numel()), rows, context,
                                   HEADS, stream)
        if not handle:
            raise RuntimeError("no plan")
        return ctypes.c_void_p(handle)

    def run(self, handle, q, pool, slots, out, scale):
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        error = self.lib.PeerRun(handle, *(ctypes.c_void_p(t.data_ptr()) for t in (q, pool, slots, out)), ctypes.c_float(scale),
                                 stream)
        if error != 0:
            raise RuntimeError(f"CUDA error {error}")


def median_us(run, repeats):
    for i in range(2):
        run(i)
    begin = [torch.cuda.Event(enable_timing=True) for _ in range(repeats)]
    end = [torch.cuda.Event(enable_timing=True) for _ in range(repeats)]
    torch.cuda.synchronize()
    for i in range(repeats):
        torch.cuda._sleep(400_000)  # the launches are queued behind it, so their cost on the host is not in the time
        begin[i].record()
        run(i + 2)
        end[i].record()
    torch.cuda.synchronize()
    return statistics.median(b.elapsed_time(e) for b, e in zip(begin, end)) * 1e3


def time_of_run(run):
    run(0)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run(1)
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e3


def tree_mask(rows):
    mask = torch.zeros(rows, rows, dtype=torch.bool)
    for i in range(rows):
        if i > 0:
            mask[i] = mask[random.randrange(i)]
        mask[i, i] = True
    return mask


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--sglang", required=True)
    parser.add_argument("--flashinfer", nargs="*", default=[])
    parser.add_argument("--ours")
    parser.add_argument("--json")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--contexts", default="4096,16384,65536,131072,189440")
    parser.add_argument("--rows", default="1,8,16,32,64")
    args = parser.parse_args()
    random.seed(1)
    extend, decode = import_peers(args.sglang)
    others = {}
    for entry in args.flashinfer:
        name, path = entry.split("=", 1)
        others[name] = FlashInfer(path)
    ours = {}
    if args.ours:
        with open(args.ours, encoding="utf-8") as file:
            ours = {r["shape"]: r["us"] for r in json.load(file)["results"] if r["op"] == "verify_attention"}

    device = "cuda"
    pool = torch.randn(POOL_SLOTS, 1, WIDTH, device=device, dtype=torch.bfloat16)
    order = torch.randperm(POOL_SLOTS, device=device).to(torch.int64)
    scale = 0.1
    results = []
    for context in map(int, args.contexts.split(",")):
        regions = min(POOL_SLOTS // context, 8)
        slots = [order[r * context:(r + 1) * context].contiguous() for r in range(regions)]
        kv_indptr = torch.tensor([0, context], device=device, dtype=torch.int32)
        for rows in map(int, args.rows.split(",")):
            q = torch.randn(rows, HEADS, WIDTH, device=device, dtype=torch.bfloat16)
            own = torch.randn(rows, 1, WIDTH, device=device, dtype=torch.bfloat16)
            out = torch.empty(rows, HEADS, LATENT, device=device, dtype=torch.bfloat16)
            qo_indptr = torch.tensor([0, rows], device=device, dtype=torch.int32)
            whole = torch.cat([torch.ones(rows, context, dtype=torch.bool), tree_mask(rows)], dim=1)
            mask = whole.flatten().to(device)
            mask_indptr = torch.tensor([0, mask.numel()], device=device, dtype=torch.int64)

            def run_extend(i):
                extend(q, own, own[..., :LATENT], out, pool, pool[..., :LATENT], qo_indptr, kv_indptr, slots[i % regions], mask,
                       True, mask_indptr, rows, 1.0, 1.0, sm_scale=scale)

            # Chains: the row's own keys lie behind the context, row i sees i + 1 of them.
            chain = [torch.cat([s, order[:rows]]) for s in slots]
            chain_indptr = torch.tensor([0] + [context + i + 1 for i in range(rows)], device=device).cumsum(0).to(torch.int32)
            chains = [torch.cat([c[:context + i + 1] for i in range(rows)]) for c in chain]
            logits = torch.empty(rows, HEADS, SPLITS, LATENT, device=device, dtype=torch.float32)
            lse = torch.empty(rows, HEADS, SPLITS, device=device, dtype=torch.float32)
            splits = torch.full((rows,), SPLITS, device=device, dtype=torch.int32)

            def run_decode(i):
                decode(q, pool, pool[..., :LATENT], out, chain_indptr, chains[i % regions], logits, lse, splits, SPLITS, scale,
                       1.0, 1.0)

            runs = [("extend", run_extend), ("decode", run_decode)]
            narrow = [c.to(torch.int32) for c in chain]
            for name, other in others.items():
                handle = other.plan(rows, context)
                runs.append((name, lambda i, other=other, handle=handle: other.run(handle, q, pool, narrow[i % regions], out,
                                                                                   scale)))
            outputs = {}
            mine = ours.get(f"batch 1 context {context} rows {rows}")
            for name, run in runs:
                try:
                    time = median_us(run, args.repeats if time_of_run(run) < 5000 else 3)
                    if name != "extend":
                        out.fill_(float("nan"))
                        run(0)
                        torch.cuda.synchronize()
                        outputs[name] = out.float().clone()
                except Exception as error:  # a peer's limits are a result too
                    print(f"{name:8} context {context:7} rows {rows:3}: does not run: {type(error).__name__}: {str(error)[:200]}")
                    continue
                ratio = f", {time / mine:6.1f} x ours ({mine:.1f} us)" if mine else ""
                print(f"{name:8} context {context:7} rows {rows:3}: {time:9.1f} us{ratio}", flush=True)
                results.append({"peer": name, "context": context, "rows": rows, "us": time, "ours_us": mine})
            for name in outputs:
                error = (outputs[name] - outputs["decode"]).norm() / outputs["decode"].norm() if "decode" in outputs else 0
                if not error < 0.01:
                    print(f"{name} and decode differ by {error:.4f}")
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"device": torch.cuda.get_device_name(), "results": results}, file, indent=1)


if __name__ == "__main__":
    main()
