"""Text from the trained target, with a cache: generate.py MODEL_FOLDER [PROMPT]"""

import sys

import torch

import ranks
from checkpoint import load_target

PROMPTS = (
    "def fibonacci(n):\n",
    "def quicksort(items):\n    \"\"\"Return a sorted copy of items.\"\"\"\n",
    "import os\nimport sys\n\n\ndef main():\n",
    "class Stack:\n    \"\"\"A simple stack.\"\"\"\n\n    def __init__(self):\n",
    "The quick start guide\n=====================\n\nTo install the package, run\n",
    "A tensor is a multi-dimensional array",
    "This module implements a key-value store. It",
    "<|im_user|>user<|im_middle|>Write a Python function that adds two numbers.<|im_end|><|im_assistant|>assistant<|im_middle|><think>",
    "<|im_user|>user<|im_middle|>Hello<|im_end|><|im_assistant|>assistant<|im_middle|><think></think>",
    "<|im_user|>user<|im_middle|>What is a context manager?<|im_end|><|im_assistant|>assistant<|im_middle|><think></think>",
)  # fmt: skip


PREFILL = 64  # prompt tokens a pass, so that a large batch fits


@torch.no_grad()
def sample(model, prompts, length, temperature, generator=None):
    """prompts [B, T] -> [B, T + length]: continuations by sampling, greedy at temperature 0 (a number or [B, 1])."""
    temperature = torch.as_tensor(temperature, device=prompts.device, dtype=torch.float32)
    cache = model.new_cache(prompts.shape[0], prompts.shape[1] + length)
    out = [prompts]
    *earlier, tokens = prompts.split(PREFILL, dim=1)
    for chunk in earlier:
        model(chunk, cache=cache, last_only=True)
    for _ in range(length):
        logits = model(tokens, cache=cache, last_only=True)[0][:, -1].float()
        noise = -torch.log(torch.empty_like(logits).exponential_(generator=generator).clamp_min(1e-20))
        tokens = (logits + temperature * noise).argmax(-1, keepdim=True)
        out.append(tokens)
    return torch.cat(out, dim=1)


@torch.no_grad()
def sample_ragged(model, prompts, length, temperature=0.0, generator=None):
    """Like sample, for prompts (lists of ids) of different lengths: each list continued by `length` tokens."""
    device, count = model.embed_tokens.device, len(prompts)
    sizes = torch.tensor([len(p) for p in prompts], device=device)
    total = int(sizes.max()) + length
    tokens = torch.zeros(count, total, dtype=torch.long, device=device)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = torch.tensor(prompt, device=device)
    cache, done = model.new_cache(count, total), 0
    for end in range(int(sizes.min()), total):
        logits = model(tokens[:, done:end], cache=cache, last_only=True)[0][:, -1].float()
        noise = -torch.log(torch.empty_like(logits).exponential_(generator=generator).clamp_min(1e-20))
        chosen = (logits + temperature * noise).argmax(-1)
        tokens[:, end] = torch.where(end < sizes, tokens[:, end], chosen)
        done = end
    return [row[: size + length].tolist() for row, size in zip(tokens, sizes.tolist())]


def complete(model, encoding, prompt, length=160, temperature=0.0):
    device = model.embed_tokens.device
    ids = encoding.encode(prompt, allowed_special="all")
    out = sample(model, torch.tensor([ids], device=device), length, temperature)[0].tolist()[len(ids) :]
    ends = {encoding.encode(name, allowed_special="all")[0] for name in ("[EOS]", "<|im_end|>")}
    stop = next((i + 1 for i, token in enumerate(out) if token in ends), len(out))
    return encoding.decode(out[:stop])


if __name__ == "__main__":
    target, tokenizer = load_target(sys.argv[1]), ranks.load(sys.argv[1])
    for text in sys.argv[2:] or PROMPTS:
        print("=" * 40, text + "-->" + complete(target, tokenizer, text), sep="\n")
