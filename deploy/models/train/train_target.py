"""Trains the target: train_target.py MODEL_FOLDER DATA_FOLDER OUT_FOLDER [--seconds N]

MODEL_FOLDER holds config.json and the tokenizer; DATA_FOLDER holds train.txt, heldout_packages.txt and
heldout_files.txt, plain or compressed (.xz, .zst). Writes shards, index, log and samples to OUT_FOLDER, a first version half way.

The schedule follows the clock: constant learning rate, then linear to zero; INT4 fake quantisation of the experts is
blended in from QAT_START to QAT_FULL, so that the stored weights are the ones that were trained.
"""

import argparse
import json
import os
import time

import numpy as np
import torch
import torch.nn.functional as F

import data
import ranks
from checkpoint import load_target, save_target, write_json
from generate import PROMPTS, complete
from kimi import Kimi, KimiConfig
from muon import Muon

WARMUP_STEPS = 60
DECAY_START = 0.35  # share of the time from which the learning rate falls
QAT_START, QAT_FULL = 0.45, 0.6
BIAS_STEP = 1e-3  # of the router's correction bias, per step, towards equal load


def find(folder, name):
    paths = [os.path.join(folder, name + ending) for ending in ("", ".xz", ".zst")]
    return next(path for path in paths if os.path.exists(path))


def make_loss(model):
    def loss_of(rows, int4):
        logits, loads, _ = model(rows[:, :-1], int4)
        return F.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten()), loads

    return loss_of


class Rows:
    """Endless batches of [batch, seq + 1] tokens; each pass shifts the cuts between rows and shuffles the rows."""

    def __init__(self, tokens, batch, seq, device):
        self.tokens = torch.from_numpy(tokens.astype(np.int16)).to(device)
        self.batch, self.seq, self.epoch, self.order = batch, seq, 0, []

    def next(self):
        if len(self.order) < self.batch:
            shift = int(torch.randint(self.seq, ()).item())
            count = (len(self.tokens) - 1 - shift) // self.seq
            self.starts = shift + self.seq * torch.randperm(count, device=self.tokens.device)
            self.order = self.starts
            self.epoch += 1
        starts, self.order = self.order[: self.batch], self.order[self.batch :]
        index = starts[:, None] + torch.arange(self.seq + 1, device=starts.device)
        return self.tokens[index].long()


def optimizers_of(model):
    matrices = [p for n, p in model.layers.named_parameters() if p.dim() >= 2 and not n.endswith("mlp.gate")]
    chosen = {id(p) for p in matrices} | {id(model.embed_tokens), id(model.lm_head)}
    others = [p for p in model.parameters() if id(p) not in chosen]
    groups = [
        {"params": [model.embed_tokens], "lr": 6e-3},
        {"params": [model.lm_head], "lr": 3e-3},
        {"params": others, "lr": 3e-3},
    ]
    on_gpu = model.embed_tokens.is_cuda
    adam = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0, fused=on_gpu)
    made = [adam, Muon(matrices, lr=0.02, weight_decay=0.02)]
    for optimizer in made:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return made


@torch.no_grad()
def heldout_loss(model, tokens, seq, device):
    """Mean loss a token, in rows of `seq` tokens, and bits a byte's numerator: the summed loss."""
    count = (len(tokens) - 1) // seq
    rows = torch.from_numpy(tokens[: count * seq + 1].astype(np.int64)).to(device)
    total = 0.0
    for start in range(0, count, 16):
        index = torch.arange(start, min(start + 16, count), device=device)[:, None] * seq
        batch = rows[index + torch.arange(seq + 1, device=device)]
        logits = model(batch[:, :-1])[0]
        total += F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten(), reduction="sum").item()
    return total / (count * seq)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument("out")
    parser.add_argument("--seconds", type=float, default=330)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--heldout-tokens", type=int, default=1_500_000)
    args = parser.parse_args()
    begin = time.time()
    say = lambda *words: print(f"[{time.time() - begin:6.1f}]", *words, flush=True)

    wait_for_tokens = data.start_tokenising(args.model, find(args.data, "train.txt"))
    say("tokenising")
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = KimiConfig.from_file(os.path.join(args.model, "config.json"))
    model = Kimi(config, torch.bfloat16 if device == "cuda" else torch.float32).to(device)
    loss_of = make_loss(model)
    if device == "cuda":
        torch.set_float32_matmul_precision("high")
        torch.cuda.set_device(0)
        plain, loss_of = loss_of, torch.compile(loss_of, dynamic=False)
        dummy = torch.randint(config.vocab_size, (args.batch, args.seq + 1), device=device)
        try:
            loss_of(dummy, torch.zeros((), device=device))[0].backward()
            say("compiled")
        except Exception as error:  # slower, but a paid machine is not given back for it
            say("not compiled:", str(error)[:2000])
            loss_of = plain
        model.zero_grad()
        torch.cuda.synchronize()
    tokens = np.concatenate(wait_for_tokens())
    say(f"{len(tokens) / 1e6:.1f}M training tokens")
    rows = Rows(tokens, args.batch, args.seq, device)
    optimizers = optimizers_of(model)
    biases = [layer.mlp.e_score_correction_bias for layer in model.layers if layer.is_moe]
    int4 = torch.zeros((), device=device)
    curve, saved, step, start = [], False, 0, time.time()
    while (progress := (time.time() - start) / args.seconds) < 1:
        rate = min(1.0, (step + 1) / WARMUP_STEPS) * min(1.0, (1 - progress) / (1 - DECAY_START))
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * rate
        int4.fill_(min(1.0, max(0.0, (progress - QAT_START) / (QAT_FULL - QAT_START))))
        loss, loads = loss_of(rows.next(), int4)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        for bias, load in zip(biases, loads):
            bias += BIAS_STEP * rate * torch.sign(load.float().mean() - load)
        step += 1
        if step % 100 == 0 or step in (1, 10, 30):
            curve.append((step, round(loss.item(), 4)))
            spread = (loads.max(-1).values / loads.mean(-1)).max().item()
            rate_now = step * args.batch * args.seq / (time.time() - start)
            say(f"step {step} epoch {rows.epoch} loss {loss.item():.4f} busiest expert {spread:.2f} {rate_now / 1e3:.0f}k tokens/s")
        if progress > 0.5 and not saved:
            save_target(model, args.out)
            saved = True
            say("saved a first version")
    seconds = time.time() - start
    save_target(model, args.out)
    say("saved")
    log = {"seconds": round(seconds, 1), "steps": step, "tokens_seen": step * args.batch * args.seq}
    log |= {"training_tokens": len(tokens), "epochs": rows.epoch, "curve": curve}
    write_json(os.path.join(args.out, "log.json"), log)

    # What counts is the stored checkpoint: read it back and judge that.
    stored = load_target(args.out, model.dtype, args.model).to(device)
    for name in ("heldout_packages", "heldout_files"):
        held = data.tokenise_plain(args.model, find(args.data, name + ".txt"), args.heldout_tokens)
        log[name + "_loss"] = round(heldout_loss(stored, held, args.seq, device), 4)
        log[name + "_tokens"] = len(held)
        say(name, "loss", log[name + "_loss"])
    log["train_loss_end"] = round(float(np.mean([loss for _, loss in curve[-5:]])), 4)
    write_json(os.path.join(args.out, "log.json"), log)
    encoding = ranks.load(args.model)
    with open(os.path.join(args.out, "samples.txt"), "w", encoding="utf-8") as file:
        for temperature in (0.0, 0.7):
            for prompt in PROMPTS:
                text = prompt + "-->" + complete(stored, encoding, prompt, 160, temperature)
                file.write(f"{'=' * 20} temperature {temperature}\n{text}\n")
    say("samples written")
    print(json.dumps({k: v for k, v in log.items() if k != "curve"}))


if __name__ == "__main__":
    main()
