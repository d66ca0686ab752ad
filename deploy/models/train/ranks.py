"""Trains the tokenizer's ranks: ranks.py WORK_FOLDER MODEL_FOLDER

Byte-pair merges under the Kimi split pattern, from a sample of WORK_FOLDER/train.txt; writes MODEL_FOLDER/tiktoken.model
and tokenizer_config.json, and checks the result with tiktoken.
"""

import base64
import os
import random
import sys

import tiktoken
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from checkpoint import write_json

RANKS = 3840
SAMPLE_CHARACTERS = 24_000_000
WORD_A = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
WORD_B = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?" + WORD_A + "*" + WORD_B + "+" + CONTRACTION,
        r"[^\r\n\p{L}\p{N}]?" + WORD_A + "+" + WORD_B + "*" + CONTRACTION,
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
# Names of reserved ids, by offset behind the ranks; the rest are <|reserved_token_ID|>.
SPECIAL = {
    0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 3: "<|im_user|>", 4: "<|im_assistant|>", 6: "<|start_header_id|>",
    7: "<|end_header_id|>", 9: "[EOT]", 10: "<|im_system|>", 11: "<|tool_calls_section_begin|>",
    12: "<|tool_calls_section_end|>", 13: "<|tool_call_begin|>", 14: "<|tool_call_argument_begin|>",
    15: "<|tool_call_end|>", 17: "<|im_middle|>", 18: "<|media_begin|>", 19: "<|media_content|>", 20: "<|media_end|>",
    21: "<|media_pad|>", 22: "<think>", 23: "</think>", 254: "[UNK]", 255: "[PAD]",
}  # fmt: skip


def load(folder):
    """The tokenizer of a model folder, as tiktoken runs it; special tokens by name."""
    ranks = {}
    with open(os.path.join(folder, "tiktoken.model"), "rb") as file:
        for line in file:
            token, rank = line.split()
            ranks[base64.b64decode(token)] = int(rank)
    special = {SPECIAL.get(i, f"<|reserved_token_{len(ranks) + i}|>"): len(ranks) + i for i in range(256)}
    return tiktoken.Encoding("kimi-tiny", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special)


def train(texts):
    """Byte strings in order of rank."""
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(PATTERN), "isolated"), byte_level])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=RANKS, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    bytes_of = byte_level_table()
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    merged = [bytes(bytes_of[c] for c in token) for token, _ in vocabulary if len(token) > 1]
    return [bytes([b]) for b in range(256)] + merged


def byte_level_table():
    """The character that stands for each byte in byte-level BPE, inverted."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}


def main(work, folder):
    with open(os.path.join(work, "train.txt"), encoding="utf-8") as file:
        documents = [d.partition("\n")[2] for d in file.read().split("\0")]
    random.Random(1).shuffle(documents)
    sample, size = [], 0
    while documents and size < SAMPLE_CHARACTERS:
        sample.append(documents.pop())
        size += len(sample[-1])
    tokens = train(sample)
    assert len(tokens) == len(set(tokens)) == RANKS
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "tiktoken.model"), "wb") as file:
        for rank, token in enumerate(tokens):
            file.write(base64.b64encode(token) + b" %d\n" % rank)
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    named = {str(RANKS + i): {"content": name, **flags} for i, name in SPECIAL.items()}
    config = {"added_tokens_decoder": named, "bos_token": "[BOS]", "eos_token": "[EOS]", "pad_token": "[PAD]"}
    config |= {"unk_token": "[UNK]", "model_max_length": 32768, "tokenizer_class": "TikTokenTokenizer"}
    config["additional_special_tokens"] = [n for n in SPECIAL.values() if n.startswith(("<|im", "<|st", "<|en", "<|media", "[EOT"))]
    write_json(os.path.join(folder, "tokenizer_config.json"), config)
    encoding = load(folder)
    for name in ("train.txt", "heldout_packages.txt"):
        with open(os.path.join(work, name), encoding="utf-8") as file:
            text = file.read(2_000_000)
        ids = encoding.encode_ordinary(text)
        assert encoding.decode(ids) == text
        print(f"{name}: {len(text.encode()) / len(ids):.3f} bytes a token")


if __name__ == "__main__":
    main(*sys.argv[1:])
