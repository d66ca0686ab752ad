"""Trains the drafter: train_drafter.py MODEL_FOLDER DATA_FOLDER PROMPTS.json OUT_FOLDER [--until N]

MODEL_FOLDER is the finished target, with the drafter's config.json in its folder drafter/. The drafter learns the
stored target's own distributions, on training text and on the target's continuations of it (greedy and sampled).
Every row of text carries many blocks with random roots; they see the row before their root, and themselves.
"""

import argparse
import json
import os
import time

import numpy as np
import torch

import data
from checkpoint import load_target, write_json
from drafter import Drafter, load_drafter, save_drafter
from evaluate import read_prompts, tokens_a_round
from generate import sample
from muon import Muon
from train_target import Rows, find

SEQ = 768  # tokens a row
GREEDY_PROMPTS = (32, 96, 192)  # lengths of the prompts continued greedily
GREEDY_TOKENS = 192
SAMPLED_PROMPT = 48
SLOT_DECAY = 0.85  # weight of slot i + 1 against slot i: it counts only if slot i was right
FOLLOW = 0.5  # on the target's own text: weight of the token that it did choose, against its whole distribution
WARMUP_STEPS = 100


def own_text(target, rows, greedy_rows, sampled_rows):
    """The target's continuations: tokens [R, SEQ], and the range [R, 2] in which roots may lie."""
    device, parts, ranges = target.embed_tokens.device, [], []

    def add(prompt, count, length, temperature):
        prompts = torch.cat([rows.next() for _ in range(-(-count // rows.batch))])[:count, :prompt]
        tokens = sample(target, prompts, length, temperature)
        parts.append(torch.nn.functional.pad(tokens, (0, SEQ - tokens.shape[1])).to(torch.int16))
        ranges.append(torch.tensor([prompt, prompt + length - 8], device=device).expand(count, 2))

    for prompt in GREEDY_PROMPTS:
        add(prompt, greedy_rows, GREEDY_TOKENS, 0.0)
    heat = torch.where(torch.arange(sampled_rows, device=device) % 2 == 0, 0.7, 1.0)[:, None]
    add(SAMPLED_PROMPT, sampled_rows, SEQ - SAMPLED_PROMPT, heat)
    return torch.cat(parts), torch.cat(ranges)


def make_loss(target, drafter, slots):
    weights = SLOT_DECAY ** torch.arange(slots, device=target.embed_tokens.device)
    weights = weights / weights.sum()

    def look(tokens):
        with torch.no_grad():
            logits, _, features = target(tokens, hidden_of=drafter.target_layers)
        return logits, features

    def loss_of(tokens, logits, features, starts, follow):
        """Cross entropy of the slots against the target's distribution; starts [B, N]; follow [B]."""
        batch, count = starts.shape
        roots = tokens.gather(1, starts)
        places = starts[:, :, None] + torch.arange(1, slots + 1, device=starts.device)
        flat = places.flatten(1)
        wanted = logits.gather(1, (flat - 1)[..., None].expand(-1, -1, logits.shape[-1])).float().softmax(-1)
        draft = drafter(features, roots, starts, target.embed_tokens, target.lm_head)
        log_q = draft.flatten(1, 2).float().log_softmax(-1)
        soft = -(wanted * log_q).sum(-1)
        hard = -log_q.gather(-1, tokens.gather(1, flat)[..., None]).squeeze(-1)
        mixed = soft + follow[:, None] * (hard - soft)
        return (mixed.view(batch, count, slots).mean((0, 1)) * weights).sum()

    return look, loss_of


def main():
    parser = argparse.ArgumentParser()
    for name in ("model", "data", "prompts", "out"):
        parser.add_argument(name)
    parser.add_argument("--until", type=float, default=275, help="seconds from the start of the program")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--blocks", type=int, default=64)
    parser.add_argument("--greedy-rows", type=int, default=3072)
    parser.add_argument("--sampled-rows", type=int, default=4096)
    parser.add_argument("--eval-prompts", type=int, default=120)
    args = parser.parse_args()
    begin = time.time()
    say = lambda *words: print(f"[{time.time() - begin:6.1f}]", *words, flush=True)

    wait_for_tokens = data.start_tokenising(args.model, find(args.data, "train.txt"))
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    target = load_target(args.model, dtype).to(device)
    with open(os.path.join(args.model, "drafter", "config.json"), encoding="utf-8") as file:
        drafter = Drafter(json.load(file), dtype).to(device)
    slots = drafter.block - 1
    plain = look, loss_of = make_loss(target, drafter, slots)
    if device == "cuda":
        torch.set_float32_matmul_precision("high")
        look, loss_of = (torch.compile(f, dynamic=False) for f in plain)
        tokens = torch.randint(4000, (args.batch, SEQ), device=device)
        starts = torch.randint(8, SEQ - slots - 1, (args.batch, args.blocks), device=device)
        try:
            loss_of(tokens, *look(tokens), starts, torch.zeros(args.batch, device=device)).backward()
            say("compiled")
        except Exception as error:  # slower, but a paid machine is not given back for it
            say("not compiled:", str(error)[:2000])
            look, loss_of = plain
        drafter.zero_grad()
    rows = Rows(np.concatenate(wait_for_tokens()), args.batch, SEQ - 1, device)
    say(f"{len(rows.tokens) / 1e6:.1f}M tokens of text")
    own, ranges = own_text(target, rows, args.greedy_rows, args.sampled_rows)
    say(f"{own.shape[0]} rows of the target's own text")

    matrices = [p for p in drafter.parameters() if p.dim() == 2]
    others = [p for p in drafter.parameters() if p.dim() == 1]
    adam = torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0, fused=device == "cuda")
    optimizers = [adam, Muon(matrices, lr=0.02, weight_decay=0.02)]
    peaks = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    step, start, saved, curve = 0, time.time(), False, []
    seconds = max(begin + args.until - start, 60.0)
    third = torch.arange(args.batch, device=device) % 3 == 0  # of each batch: plain training text
    wide = torch.tensor([8, SEQ - slots - 1], device=device)
    while (progress := (time.time() - start) / seconds) < 1:
        rate = min(1.0, (step + 1) / WARMUP_STEPS) * min(1.0, (1 - progress) / 0.75)
        for optimizer, peak in zip(optimizers, peaks):
            optimizer.param_groups[0]["lr"] = peak * rate
        chosen = torch.randint(len(own), (args.batch,), device=device)
        tokens = torch.where(third[:, None], rows.next(), own[chosen].long())
        limits = torch.where(third[:, None], wide, ranges[chosen])
        spread = torch.rand(args.batch, args.blocks, device=device)
        starts = (limits[:, :1] + spread * (limits[:, 1:] - limits[:, :1])).long()
        loss = loss_of(tokens, *look(tokens), starts, torch.where(third, 0.0, FOLLOW))
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % 500 == 0 or step in (1, 10, 50):
            curve.append((step, round(loss.item(), 4)))
            say(f"step {step} loss {loss.item():.4f} {(time.time() - start) / step * 1e3:.1f} ms a step")
        if progress > 0.6 and not saved:
            save_drafter(drafter, args.out)
            saved = True
    save_drafter(drafter, args.out)
    say("saved")
    log = {"seconds": round(time.time() - start, 1), "steps": step, "predictions": step * args.batch * args.blocks * slots}
    log |= {"text_tokens": len(rows.tokens), "own_tokens": own.numel(), "curve": curve}
    write_json(os.path.join(args.out, "log.json"), log)
    stored = load_drafter(args.out, dtype, os.path.join(args.model, "drafter")).to(device)
    prompts = list(read_prompts(args.model, args.prompts).values())
    prompts = prompts[:: max(1, len(prompts) // args.eval_prompts)]
    for temperature in (0.0, 0.7):
        found = log[f"tokens_a_round_{temperature}"] = tokens_a_round(target, stored, prompts, temperature)
        say(f"tokens a round at temperature {temperature}:", found)
    write_json(os.path.join(args.out, "log.json"), log)


if __name__ == "__main__":
    main()
