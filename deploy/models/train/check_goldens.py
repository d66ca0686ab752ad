"""Compares this folder's models with the reference cases: check_goldens.py GOLDENS_FOLDER."""

import itertools
import json
import os
import sys

import torch
from safetensors.torch import load_file

from checkpoint import load_target
from drafter import load_drafter
from tree import best_first


def check_target(goldens):
    model = load_target(os.path.join(goldens, "model"))
    cases = load_file(os.path.join(goldens, "target.safetensors"))
    for prompt in range(3):
        tokens = cases[f"p{prompt}.tokens"].long()[None]
        logits, _, hidden = model(tokens, hidden_of=range(model.config.num_hidden_layers))
        error = (logits[0] - cases[f"p{prompt}.logits"]).abs().max().item()
        print(f"target prompt {prompt}: largest logit error {error:.2e}")
        assert error < 2e-3
        for layer in range(1, model.config.num_hidden_layers):
            expected = cases.get(f"p{prompt}.hidden.{layer}")
            if expected is not None:
                assert (hidden[layer - 1][0] - expected).norm() < 1e-4 * expected.norm()
    with open(os.path.join(goldens, "target.json"), encoding="utf-8") as file:
        prompt = json.load(file)["prompts"][0]
    cache, tokens, out = model.new_cache(1, 64), torch.tensor([prompt["tokens"]]), []
    for _ in range(len(prompt["greedy"])):
        tokens = model(tokens, cache=cache)[0][:, -1:].argmax(-1)
        out.append(tokens.item())
    assert out == prompt["greedy"], "greedy decoding with a cache differs"


def check_drafter(goldens):
    target, drafter = load_target(os.path.join(goldens, "model")), load_drafter(os.path.join(goldens, "drafter"))
    logits = load_file(os.path.join(goldens, "drafter.safetensors"))
    tokens = load_file(os.path.join(goldens, "target.safetensors"))
    with open(os.path.join(goldens, "drafter.json"), encoding="utf-8") as file:
        prompts = json.load(file)
    for number, rounds in enumerate(prompts):
        text = tokens[f"p{number}.tokens"].tolist()
        for index, case in enumerate(rounds):
            # The random drafter accepts nothing: each round commits its root alone.
            assert case["start"] == len(text) and case["accepted"] == 0
            features = target(torch.tensor([text]), hidden_of=drafter.target_layers)[2]
            roots, starts = torch.tensor([[case["bonus"]]]), torch.tensor([[case["start"]]])
            out = drafter(features, roots, starts, target.embed_tokens, target.lm_head)[0, 0]
            error = (out - logits[f"p{number}.r{index}.draft_logits"]).abs().max().item()
            print(f"drafter prompt {number} round {index}: largest logit error {error:.2e}")
            assert error < 2e-3
            text.append(case["bonus"])


def check_tree(goldens):
    with open(os.path.join(goldens, "ddtree.json"), encoding="utf-8") as file:
        cases = json.load(file)
    for number, case in enumerate(cases):
        nodes = list(itertools.islice(best_first(case["topk_logprobs"]), case["budget"]))
        tokens = [case["topk_ids"][len(ranks) - 1][ranks[-1]] for ranks in nodes]
        assert tokens == case["node_tokens"], f"tree case {number} differs"
    print(f"{len(cases)} trees agree")


if __name__ == "__main__":
    with torch.no_grad():
        check_target(sys.argv[1])
        check_drafter(sys.argv[1])
        check_tree(sys.argv[1])
