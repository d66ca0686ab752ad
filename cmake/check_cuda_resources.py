#!/usr/bin/env python3
"""Runs a CUDA compilation and fails on kernels that spill or take too much static shared memory.

    check_cuda_resources.py --shared-limit BYTES --report FILE -- nvcc ... -Xptxas -v ...

The report, one line a kernel and architecture, goes to FILE. Dynamic shared memory is not in the compiler's report; kernels
that use it assert its size where they define it.
"""
import argparse
import re
import subprocess
import sys

ENTRY = re.compile(r"Compiling entry function '([^']+)' for '([^']+)'")
SPILL = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")
SHARED = re.compile(r"(\d+) bytes smem")


def parse(lines):
    """Yields (kernel, arch, registers, shared bytes, spilled bytes) and then the lines that say something else."""
    kernels, rest = [], []
    for line in lines:
        if match := ENTRY.search(line):
            kernels.append([match[1], match[2], 0, 0, 0])
        elif (match := SPILL.search(line)) and kernels:
            kernels[-1][4] = int(match[2]) + int(match[3])
        elif (match := USED.search(line)) and kernels:
            kernels[-1][2] = int(match[1])
            if match := SHARED.search(line):
                kernels[-1][3] = int(match[1])
        elif line.strip() and "ptxas info" not in line and "Function properties" not in line:
            rest.append(line)
    return kernels, rest


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--shared-limit", type=int, required=True)
    parser.add_argument("--report", required=True)
    parser.add_argument("command", nargs="+")
    args = parser.parse_args()
    done = subprocess.run(args.command, stderr=subprocess.PIPE, text=True, check=False)
    kernels, rest = parse(done.stderr.splitlines())
    for line in rest:
        print(line, file=sys.stderr)
    if done.returncode != 0:
        return done.returncode
    with open(args.report, "w", encoding="utf-8") as report:
        for name, arch, registers, shared, spilled in kernels:
            report.write(f"{arch} registers {registers} shared {shared} spilled {spilled} {name}\n")
    bad = [k for k in kernels if k[4] > 0 or k[3] > args.shared_limit]
    for name, arch, registers, shared, spilled in bad:
        print(f"{arch}: {name}: {registers} registers, {shared} bytes shared (limit {args.shared_limit}), "
              f"{spilled} bytes spilled (none allowed)", file=sys.stderr)
    if not kernels:
        print("no resource report found: is -Xptxas -v missing?", file=sys.stderr)
        return 1
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
