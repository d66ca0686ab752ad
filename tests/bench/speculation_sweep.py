#!/usr/bin/env python3
"""Speculation settings side by side on held-out prompts: tokens a round and tokens/s.

Starts a cluster with kdt-launch, then runs every setting in turn, several times over, so that a drift of the machine's speed
falls on all of them; prints medians as a Markdown table. Needs only Python's standard library.

  tests/bench/speculation_sweep.py --tp 1 --concurrency 1 8
"""
import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
SETTINGS = {
    "off": ["--speculation=off"],
    "chain 2": ["--speculation=chain", "--budget=2"],
    "chain 3": ["--speculation=chain", "--budget=3"],
    "chain 7": ["--speculation=chain", "--budget=7"],
    "tree 2": ["--speculation=tree", "--budget=2"],
    "tree 4": ["--speculation=tree", "--budget=4"],
    "tree 7": ["--speculation=tree", "--budget=7"],
    "tree 16": ["--speculation=tree", "--budget=16"],
    "tree 32": ["--speculation=tree", "--budget=32"],
    "tree 64": ["--speculation=tree", "--budget=64"],
    "tree 128": ["--speculation=tree", "--budget=128"],
    "auto": [],
}


def start(args):
    model = ROOT / "deploy/models/kimi-tiny"
    command = [args.bin / "kdt-launch", f"--model={model}", f"--drafter={model / 'drafter'}", f"--tp={args.tp}",
               "--listen=127.0.0.1:0", "--log_level=warn"]
    if args.threads:
        command.append(f"--threads={args.threads}")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line.startswith("kdt ready listen="):
            return process, line.strip().split("=", 1)[1]
    sys.exit("the cluster did not start")


def bench(args, server, setting, concurrency):
    command = [args.bin / "kdt", "bench", f"--server={server}", "--json", "--warmup=2",
               f"--prompts={ROOT / 'tests/bench/prompts/heldout.json'}", f"--requests={args.requests}",
               f"--concurrency={concurrency}", f"--output_tokens={args.tokens}", f"--temperature={args.temperature}",
               "--seed=1", "--ignore_eos", *SETTINGS[setting]]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", type=pathlib.Path, default=ROOT / "build/release/bin")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1])
    parser.add_argument("--requests", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    args = parser.parse_args()

    process, server = start(args)
    try:
        for concurrency in args.concurrency:
            speed = {name: [] for name in args.settings}
            a_round = {name: 0.0 for name in args.settings}
            for _ in range(args.repeats):
                for name in args.settings:
                    result = bench(args, server, name, concurrency)
                    speed[name].append(result["throughput_tokens_per_second"])
                    a_round[name] = result["tokens_a_round"]
            medians = {name: statistics.median(values) for name, values in speed.items()}
            fixed = {name: value for name, value in medians.items() if name != "auto"}
            base = medians.get("off")
            print(f"tp {args.tp}, concurrency {concurrency}, temperature {args.temperature:g}, {args.requests} prompts of "
                  f"{args.tokens} new tokens, median of {args.repeats}, load {os.getloadavg()[0]:.1f}\n")
            print("| setting | tokens a round | tokens/s | against off | lowest to highest |")
            print("|---|---|---|---|---|")
            for name in args.settings:
                ratio = f"{medians[name] / base:.2f}" if base else "-"
                print(f"| {name} | {a_round[name]:.2f} | {medians[name]:.0f} | {ratio} | "
                      f"{min(speed[name]):.0f} to {max(speed[name]):.0f} |")
            if "auto" in medians and fixed:
                best = max(fixed, key=fixed.get)
                print(f"\nauto against the best fixed setting ({best}): {medians['auto'] / fixed[best]:.3f}\n", flush=True)
    finally:
        process.terminate()
        process.wait(60)


if __name__ == "__main__":
    main()
