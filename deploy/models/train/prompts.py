"""Draws held-out prompts: prompts.py MODEL_FOLDER WORK_FOLDER OUT.json

From packages that no part of the training saw: code that starts at a definition or at the file's start, documentation
that starts at a paragraph; 30 to 200 tokens each.
"""

import random
import re
import sys

import data
import ranks
from checkpoint import write_json
from collect import read_packages

EACH = 60  # prompts of code, and as many of documentation


def starts_of(path, text):
    """Offsets at which a prompt may start."""
    pattern = r"^(?=class |def |    def |import |from |\"\"\")" if path.endswith(".py") else r"(?<=\n\n)(?=[A-Z])"
    return [0] + [m.start() for m in re.finditer(pattern, text, re.M)]


def main(model, work, out):
    rng, encoding = random.Random(7), ranks.load(model)
    licences = {p["name"]: p["licence"] for p in read_packages()}
    versions = {p["name"]: p["version"] for p in read_packages()}
    documents = list(data.read_documents(f"{work}/heldout_packages.txt"))
    prompts, used = {"code": [], "docs": []}, set()
    while min(map(len, prompts.values())) < EACH:
        path, text = rng.choice(documents)
        kind = "code" if path.endswith(".py") else "docs"
        if path in used or len(prompts[kind]) >= EACH or re.search("change|release|news", path, re.I):
            continue
        used.add(path)
        start = rng.choice(starts_of(path, text))
        ids = encoding.encode_ordinary(text[start : start + 2000])
        if len(ids) < 250:
            continue
        prompt = encoding.decode(ids[: rng.randint(30, 200)])
        if not prompt.isascii():
            continue
        package, _, file = path.partition("/")
        source = {"package": package, "version": versions[package], "licence": licences[package], "file": file}
        prompts[kind].append({"kind": kind, "tokens": len(encoding.encode_ordinary(prompt)), **source, "text": prompt})
    for kind in prompts:
        for number, prompt in enumerate(prompts[kind]):
            prompts[kind][number] = {"id": f"{kind}-{number:03d}", **prompt}
    about = "Excerpts of packages that kimi-tiny was not trained on; each keeps the licence of its package."
    write_json(out, {"about": about, "prompts": prompts["code"] + prompts["docs"]})


if __name__ == "__main__":
    main(*sys.argv[1:])
