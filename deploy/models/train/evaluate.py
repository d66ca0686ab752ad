"""Tokens a round on held-out prompts: evaluate.py MODEL_FOLDER DRAFTER_FOLDER PROMPTS.json

The target's continuation of each prompt is drawn once; what a chain or a tree of any budget accepts along it follows
from the drafter's proposals at each position.
"""

import json
import sys

import torch

import ranks
from checkpoint import load_target
from drafter import load_drafter
from generate import sample_ragged
from tree import accepted_by_budget

BUDGETS = (4, 7, 16, 32, 64, 128)
TOP_K = 64
NEW_TOKENS = 128


@torch.no_grad()
def proposals(target, drafter, tokens, first):
    """Top-k log-probabilities and ids of slots 1.. for a root at each position from `first` on, [N, slots, k]."""
    device = target.embed_tokens.device
    row = torch.tensor([tokens], device=device)
    starts = torch.arange(first, len(tokens), device=device)[None]
    features = target(row, hidden_of=drafter.target_layers, last_only=True)[2]
    logits = drafter(features, row[:, first:], starts, target.embed_tokens, target.lm_head)[0]
    best = logits.float().log_softmax(-1).topk(TOP_K, dim=-1)
    return best.values.tolist(), best.indices.tolist()


def rounds_of(tokens, first, log_probs, ids, slots):
    """Runs the rounds of every configuration along `tokens`: {configuration: (tokens, rounds)}."""
    found = {}
    for name in ("chain",) + BUDGETS:
        place, rounds, made = first, 0, 0
        while place + slots < len(tokens):
            at, truth = place - first, tokens[place + 1 : place + 1 + slots]
            true_ranks = [ids[at][i].index(t) if t in ids[at][i] else None for i, t in enumerate(truth)]
            if name == "chain":
                accepted = next((i for i, rank in enumerate(true_ranks) if rank != 0), slots)
            else:
                accepted = accepted_by_budget(log_probs[at], true_ranks, (name,))[name]
            place, rounds, made = place + accepted + 1, rounds + 1, made + accepted + 1
        found[name] = (made, rounds)
    return found


def tokens_a_round(target, drafter, prompts, temperature, length=NEW_TOKENS):
    """Mean tokens a round over all rounds of all prompts (lists of ids), by configuration."""
    totals = {}
    generator = torch.Generator(target.embed_tokens.device).manual_seed(1)
    for prompt, tokens in zip(prompts, sample_ragged(target, prompts, length, temperature, generator)):
        log_probs, ids = proposals(target, drafter, tokens, len(prompt))
        for name, (made, rounds) in rounds_of(tokens, len(prompt), log_probs, ids, drafter.block - 1).items():
            before = totals.get(name, (0, 0))
            totals[name] = (before[0] + made, before[1] + rounds)
    return {str(name): round(made / max(rounds, 1), 3) for name, (made, rounds) in totals.items()}


def read_prompts(model_folder, path):
    encoding = ranks.load(model_folder)
    with open(path, encoding="utf-8") as file:
        return {p["id"]: encoding.encode_ordinary(p["text"]) for p in json.load(file)["prompts"]}


if __name__ == "__main__":
    model, draft_folder, prompt_file = sys.argv[1:]
    pair = load_target(model), load_drafter(draft_folder)
    cases = read_prompts(model, prompt_file)
    for kind in ("code", "docs"):
        chosen = [ids for name, ids in cases.items() if name.startswith(kind)]
        for heat in (0.0, 0.7, 1.0):
            print(f"{kind}, {len(chosen)} prompts, temperature {heat}:", tokens_a_round(*pair, chosen, heat), flush=True)
