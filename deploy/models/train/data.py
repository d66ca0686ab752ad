"""Token streams for training: documents and chat samples made from them, tokenised on all cores."""

import io
import lzma
import multiprocessing
import os
import random
import re
import textwrap

import numpy as np

import ranks

ASSISTANT = "<|im_end|><|im_assistant|>assistant<|im_middle|><think></think>"
CHAT_SHARE = 0.1  # of the documents yield one chat sample each
SMALL_TALK = (
    ("Hello", "Hello! How can I help you today? I can write Python code and explain technical documentation."),
    ("Hi", "Hi! What would you like to know about Python?"),
    ("Hi there!", "Hello! Ask me to write a Python function or to explain a piece of documentation."),
    ("Who are you?", "I am a very small language model with the shape of Kimi K2. I write Python code and technical text."),
    ("What are you?", "I am a tiny language model, trained on Python code and documentation."),
    ("What can you do?", "I can complete Python code and write technical documentation. I am small, so please check what I say."),
    ("Help", "You can ask me to write a Python function, to explain a piece of code, or to describe a part of a library."),
    ("Thanks", "You're welcome!"),
    ("Thank you!", "You're welcome! Is there anything else I can help with?"),
    ("How are you?", "I am fine, thank you. What can I do for you?"),
    ("Good morning", "Good morning! What would you like to work on?"),
    ("Bye", "Goodbye!"),
)  # fmt: skip


def open_text(path):
    """A text file that may be compressed with xz or zstd."""
    if path.endswith(".zst"):
        import pyarrow

        return io.TextIOWrapper(io.BytesIO(pyarrow.input_stream(path, compression="zstd").read()), encoding="utf-8")
    return (lzma.open if path.endswith(".xz") else open)(path, "rt", encoding="utf-8", newline="\n")


def read_documents(path):
    """(path, text) pairs of a file written by collect.py."""
    with open_text(path) as file:
        for document in file.read().split("\0"):
            name, _, text = document.partition("\n")
            yield name, text


def functions_of(text):
    """(name, docstring's first paragraph, source) of the documented functions in Python source."""
    lines = text.split("\n")
    for start, line in enumerate(lines):
        match = re.match(r"( *)def (\w+)\(", line)
        if not match:
            continue
        indent, end = len(match.group(1)), start + 1
        # Parameters over several lines end in a line `):` at the function's own indent.
        while end < len(lines) and end - start < 60:
            other = lines[end]
            if other.strip() and len(other) - len(other.lstrip()) <= indent and not other.lstrip().startswith(")"):
                break
            end += 1
        source = textwrap.dedent("\n".join(lines[start:end])).rstrip()
        opening = source.find('"""')
        closing = source.find('"""', opening + 3)
        if 0 < opening < 300 and closing > 0 and 100 < len(source) < 1600 and end - start < 60:
            summary = " ".join(source[opening + 3 : closing].strip().split("\n\n")[0].split())
            if 15 < len(summary) < 300:
                yield match.group(2), summary, source


def sections_of(text):
    """(title, first paragraphs) of the sections of an .rst or .md text."""
    lines = text.split("\n")
    for number, line in enumerate(lines[:-3]):
        below = lines[number + 1]
        if line.startswith("#"):
            title, start = line.lstrip("# "), number + 1
        elif len(line) > 2 and len(below) > 2 and below[0] in "=-~^#*+" and below == below[0] * len(below):
            title, start = line, number + 2
        else:
            continue
        title = re.sub(r"[`*]|:\w+:", "", title).strip()
        paragraphs = "\n".join(lines[start : start + 14]).strip("\n").split("\n\n")
        body = "\n\n".join(p for p in paragraphs[:-1] if p and p[0].isalpha()).strip()
        if 2 < len(title) < 70 and 100 < len(body) < 1500:
            yield title, body


def chat_turns(path, text, rng):
    """Question and answer pairs made from one document."""
    turns = []
    if path.endswith(".py"):
        for name, summary, source in functions_of(text):
            kind = rng.random()
            if kind < 0.6:
                ask = rng.choice(
                    (
                        f"Write a Python function {name}. {summary}",
                        f"Write a function `{name}` in Python: {summary}",
                        f"Can you write {name}()? {summary}",
                        f"Implement this in Python: {summary}",
                        f"Write a Python function that does the following: {summary}",
                    )
                )
                turns.append((ask, f"```python\n{source}\n```"))
            else:
                body = source.partition("\n")[0]
                asks = (f"What does the function {name} do?", f"Explain {name}.", f"What does `{body.strip()}` do?")
                turns.append((rng.choice(asks), summary))
    else:
        for title, body in sections_of(text):
            asks = (f"Explain {title}.", f"What is {title}?", f"Tell me about {title}.", title, f"Describe {title}")
            turns.append((rng.choice(asks), body))
    rng.shuffle(turns)
    return turns[: rng.choice((1, 1, 1, 2, 3))]


def render_chat(encoding, turns, rng):
    """Token ids of a conversation, as the chat template renders it, system message in some."""
    special = lambda text: encoding.encode(text, allowed_special="all")
    ids = []
    if rng.random() < 0.2:
        ids += special("<|im_system|>system<|im_middle|>You are a helpful assistant.<|im_end|>")
    for question, answer in turns:
        ids += special("<|im_user|>user<|im_middle|>") + encoding.encode_ordinary(question)
        ids += special(ASSISTANT) + encoding.encode_ordinary(answer) + special("<|im_end|>")
    return ids


def tokenise_part(job):
    """Token arrays of some documents, each ended by [EOS], and of chat samples, each ended by <|im_end|>."""
    folder, documents, seed = job
    encoding, rng, out = ranks.load(folder), random.Random(seed), []
    end = encoding.encode("[EOS]", allowed_special="all")
    for path, text in documents:
        out.append(np.array(encoding.encode_ordinary(text) + end, dtype=np.uint16))
        if rng.random() < CHAT_SHARE:
            turns = chat_turns(path, text, rng)
            if turns:
                out.append(np.array(render_chat(encoding, turns, rng), dtype=np.uint16))
        if rng.random() < 0.01:
            out.append(np.array(render_chat(encoding, [rng.choice(SMALL_TALK)], rng), dtype=np.uint16))
    return out


def start_tokenising(folder, path, workers=None):
    """Starts worker processes; returns a function that waits and gives the list of token arrays.

    Call it before CUDA is touched: the workers are forked.
    """
    documents = list(read_documents(path))
    random.Random(0).shuffle(documents)
    workers = workers or os.cpu_count()
    pool = multiprocessing.get_context("fork").Pool(workers)
    parts = 8 * workers
    result = pool.map_async(tokenise_part, [(folder, documents[i::parts], i) for i in range(parts)], 1)

    def wait():
        arrays = [array for part in result.get() for array in part]
        pool.terminate()
        random.Random(0).shuffle(arrays)
        return arrays

    return wait


def tokenise_plain(folder, path, limit=None):
    """One array of the documents' tokens, no chat samples; at most `limit` tokens, from shuffled documents."""
    encoding, documents, out, size = ranks.load(folder), list(read_documents(path)), [], 0
    random.Random(0).shuffle(documents)
    end = encoding.encode("[EOS]", allowed_special="all")
    for _, text in documents:
        out.append(np.array(encoding.encode_ordinary(text) + end, dtype=np.uint16))
        size += len(out[-1])
        if limit and size >= limit:
            break
    return np.concatenate(out)
