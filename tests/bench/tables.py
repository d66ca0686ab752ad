#!/usr/bin/env python3
"""Writes the tables of docs/ that hold measured figures from docs/data/, so that figures and data cannot drift apart.

    tests/bench/tables.py           rewrites the tables in place
    tests/bench/tables.py --check   changes nothing; names each line that differs and ends with 1

A table is found by its header line, which must stand exactly once in its file. A builder gets the table's old rows as lists of
cells and returns the new ones, so cells that are not in the data (former figures, limits) stay as they are.
"""

import argparse
import json
import pathlib
import re
import sys

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"


def data(name):
    return json.loads((DOCS / "data" / f"{name}_h200.json").read_text())


def times(name, op):
    """us by shape of one op of a kdt-kernel-bench file."""
    return {r["shape"]: r for r in data(name)["results"] if r["op"] == op}


def steps(name):
    """Results of a kdt-rank-bench file by (rows, context)."""
    return {(r["rows"], r["context"]): r for r in data(name)["results"]}


def us(value):
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}"


def factor(value):
    return f"{value:.0f}" if value >= 19.95 else f"{value:.1f}"


def rank(old):
    alone, drafter = steps("rank"), steps("rank_drafter")
    for row in old:
        key = int(row[0]), int(row[1])
        cells = []
        for result in alone[key], drafter[key]:
            floor = result["target_floor_us"] + result["drafter_floor_us"]
            step = result["with_floor_reductions_us"]
            cells += [f"{step:.0f}", f"{floor:.0f}", f"{step / floor:.2f}"]
        yield row[:2] + cells


def rank_parts(old):
    names = ["attention", "absorb", "moe", "router", "gemm", "small", "collective", "sampling"]
    results = steps("rank")
    for row in old:
        parts = results[int(row[0]), int(row[1])]["parts_us"]
        yield row[:2] + [f"{parts[name]:.0f}" for name in names]


def two_ranks(old):
    two, alone = steps("rank_two_ipc"), steps("rank")
    for row in old:
        key = int(row[0]), int(row[1])
        step, floor = two[key]["step_us"], two[key]["target_floor_us"]
        yield row[:2] + [f"{step:.0f}", f"{alone[key]['with_floor_reductions_us']:.0f}", f"{floor:.0f}",
                         f"{step / floor:.2f}", f"{two[key]['reduce_us']:.1f}"]


def two_ranks_other(old):
    slices, experts, nccl = steps("rank_two_ipc"), steps("rank_two_expert"), steps("rank_two_nccl")
    for row in old:
        key = int(row[0]), 4096
        yield [row[0], f"{slices[key]['step_us']:.0f}", f"{experts[key]['step_us']:.0f}",
               f"{experts[key]['rank_imbalance']:.2f}", f"{nccl[key]['step_us']:.0f}"]


def fragmentation(old):
    by_shape = times("fragmentation", "verify_attention")
    for row in old:
        cells = [row[0]]
        for kind in "fragmented", "relocated", "random slots":
            shape = next(s for s in by_shape if s.startswith(f"context {row[0]} rows 8, {kind}"))
            cells += [shape.rsplit(" ", 1)[1], f"{by_shape[shape]['us']:.1f}"]
        yield cells


def moe_sharding(old):
    sliced, whole = times("moe_sharding", "moe tensor"), times("moe_sharding", "moe expert")
    for row in old:
        by_rows = [next(r["us"] for shape, r in kind.items() if shape.startswith(f"rows {row[0]},")) for kind in (sliced, whole)]
        yield row[:4] + [f"{by_rows[0]:.0f}", f"{by_rows[1]:.0f}", f"{by_rows[1] / by_rows[0]:.2f}"]


CONTEXTS = [4096, 16384, 65536, 131072, 189440]


def attention(old):
    """us and, from 65536 tokens on, multiples of 6 us + max(bytes at 4.1 TB/s, FLOP at 638 TFLOP/s)."""
    results = times("kernels", "verify_attention")
    for row in old:
        cells = [row[0]]
        for context, cell in zip(CONTEXTS, row[1:]):
            time = results[f"batch 1 context {context} rows {row[0]}"]["us"]
            roof = 6 + max(context * 1152 / 4.1e6, context * 17408 * int(row[0]) / 638e6)
            note = re.search(r" \(22 us allowed\)", cell)
            cells.append(f"{time:.1f}" + (f" ({time / roof:.2f})" if context >= 65536 else note.group() if note else ""))
        yield cells + row[len(cells):]


def split_keys(old):
    results = times("kernels", "verify_attention")
    for row in old:
        batch, context, rows = re.fullmatch(r"(\d+) x (\d+), (\d+) rows?", row[0]).groups()
        shape = f"batch {batch} context {context} rows {rows}"
        yield [row[0]] + [f"{results[shape + split]['us']:.1f}" for split in ("", " split 256", " split 512", " split 1024")]


def peers(old):
    results = {(r["context"], r["rows"], r["peer"]): r for r in data("peers")["results"]}
    for row in old:
        key = int(row[0]), int(row[1])
        ours = results[(*key, "extend")]["ours_us"]
        cells = [f"{ours:.1f}"]
        for peer in "extend", "decode", "fa2", "fa3":
            time = results[(*key, peer)]["us"]
            cells.append(f"{us(time)} ({factor(time / ours)} x)")
        yield row[:2] + cells


def moe(old):
    read = data("kernels")["read_bytes_per_s"]
    results = {re.match(r"rows (\d+) ", shape).group(1): r for shape, r in times("kernels", "moe").items()}
    for row in old:
        if row[0] in results and len(row) == 6 and "launches" not in row[3]:
            result = results[row[0]]
            rate = result["bytes"] / result["us"] * 1e6
            row = [row[0], row[1], f"{result['us']:.1f}", f"{rate * 1e-12:.2f}", f"{rate / read * 100:.0f}%", row[5]]
        yield row


def gemm(old):
    ours, library = times("gemm", "gemm chain"), times("gemm", "cublaslt chain")
    for row in old:
        cells = row[:2]
        for rows in 1, 4, 8, 16, 32, 64:
            shape = f"{row[0]} rows {rows}"
            cells.append(f"{ours[shape]['us']:.1f}" + (f" ({library[shape]['us']:.1f})" if shape in library else ""))
        yield cells


def read_floors(old):
    """Products and moe beside kernels that only read the same bytes: us; the bar is a share of the read rate."""
    found = {}  # (op or product, rows) -> result
    for result in data("read_floors")["results"]:
        name, rows = re.fullmatch(r"(.*?) ?rows (\d+).*", result["shape"]).groups()
        found[name or result["op"], rows] = result
    rate = data("read_floors")["read_bytes_per_s"]
    for row in old:
        name, rows, share = (*row[0].split(", rows "), 0.7) if row[0].startswith("moe") else (row[0], "1", 0.75)
        result = found[name, rows]
        alone = result["bytes"] / rate * 1e6
        cells = [row[0], f"{result['bytes'] * 1e-6:.1f}", f"{alone:.1f}", f"{alone / share:.1f}"]
        for form in "read", "dependent", "dependent_twice":
            cells.append(f"{result[f'floor_{form}_us']:.1f}" if f"floor_{form}_us" in result else "")
        cells.append(f"{result['us']:.1f}")
        yield cells + ["" if name == "moe" else f"{found[name, more]['us']:.1f}" for more in ("8", "16", "32")]


def layers():
    """The captured layers of layer_h200.txt: rows -> (us, floor, [(op, costs, alone, floor)])."""
    found = {}
    for line in (DOCS / "data" / "layer_h200.txt").read_text().splitlines():
        if head := re.match(r"layer, context 4096, (\d+) rows: ([\d.]+) us, floor ([\d.]+) us", line):
            ops = []
            found[head.group(1)] = float(head.group(2)), float(head.group(3)), ops
        elif op := re.match(r"  (\S.*?)\s{2,}([-\d.]+)\s+([\d.]+)\s+([\d.]+)$", line):
            ops.append((op.group(1), *map(float, op.groups()[1:])))
    return found


def layer(old):
    found = layers()
    for row in old:
        time, floor, _ = found[row[0]]
        yield [row[0], f"{time:.1f}", f"{floor:.1f}", f"{time / floor:.2f}"] + row[4:]


def layer_ops(old):
    found = layers()
    for row in old:
        yield [row[0]] + [f"{alone:.1f}" + ("" if op.startswith("rms_norm") else f" ({floor:.1f})")
                          for op, _, alone, floor in found[row[0]][2]]


TABLES = [
    ("benchmarks.md", "| rows | context | step, us | floor, us | ratio | with drafter: step | floor | ratio |", rank),
    ("benchmarks.md", "| rows | context | attention | absorb | moe | router | gemm | small | reductions and norms | sampling |",
     rank_parts),
    ("benchmarks.md", "| rows | context | two ranks: step, us | rank 0 alone | floor | ratio | a reduction with its norm |",
     two_ranks),
    ("benchmarks.md", "| rows | slices | whole experts | busiest of eight ranks over the mean "
     "(`kdt_worker_expert_rank_imbalance_ratio`, a fading mean that still holds the rows before) | NCCL |", two_ranks_other),
    ("benchmarks.md", "| context | runs before | us | runs after tier 1 | us | every slot a run of its own | us |", fragmentation),
    ("benchmarks.md", "| rows | distinct experts a rank, in whole ones | busiest rank | over the mean | moe, tensor, us | "
     "moe, expert, busiest rank, us | expert over tensor |", moe_sharding),
    ("kernels/verify_attention.md", "| rows | 4096 | 16384 | 65536 | 131072 | 189440 | limit set |", attention),
    ("kernels/verify_attention.md", "| | shared out (default) | split_keys 256 | 512 | 1024 |", split_keys),
    ("kernels/peers.md", "| context | rows | ours | extend, tree mask | decode, 64 splits | FlashInfer fa2 | FlashInfer fa3 |", peers),
    ("kernels/moe.md", "| rows | experts | us | TB/s | share | before |", moe),
    ("kernels/read_floors.md", "| bytes of | MB | alone | bar | read | dependent | with a hand-over | ours | 8 rows | 16 | 32 |", read_floors),
    ("kernels/gemm.md", "| shape | floor | 1 row | 4 | 8 | 16 | 32 | 64 |", gemm),
    ("kernels/layer.md", "| rows | layer | floor | ratio | former | before | first |", layer),
    ("kernels/layer.md", "| rows | qkv_a | mla_query | attention | absorbed value | o | norm | scores, shared gate and up | "
     "choice, shared down, moe | norm |", layer_ops),
]


def cells(line):
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing, end with 1 where a table and its data differ")
    check = parser.parse_args().check
    differing = 0
    for name, header, build in TABLES:
        path = DOCS / name
        lines = path.read_text().splitlines()
        if lines.count(header) != 1:
            sys.exit(f"{path}: this header must stand exactly once: {header}")
        begin = lines.index(header) + 2
        end = next(i for i in range(begin, len(lines) + 1) if i == len(lines) or not lines[i].startswith("|"))
        new = ["| " + " | ".join(row) + " |" for row in build([cells(line) for line in lines[begin:end]])]
        if len(new) != end - begin:
            sys.exit(f"{path}: {build.__name__} made {len(new)} rows of {end - begin}")
        for number, (before, after) in enumerate(zip(lines[begin:end], new), begin + 1):
            if before != after:
                differing += 1
                print(f"{path}:{number}\n  - {before}\n  + {after}")
        if not check:
            path.write_text("\n".join(lines[:begin] + new + lines[end:]) + "\n")
    sys.exit(1 if check and differing else 0)


if __name__ == "__main__":
    main()
