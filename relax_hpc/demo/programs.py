"""The programming task: a line of Python that computes what the prompt says of its input."""

import json
import random
from pathlib import Path

FENCE, INPUT, END = "```python\nprint(", "int(input())", ")\n```"
WORDS = [FENCE, INPUT, END]
"""Frequent in programs, so one token each: a program is 11 tokens at most, with its end."""
_FACTORS, _TERMS = range(2, 100), range(10, 100)
_TESTS = 2


def write(folder: Path, num_train: int, num_heldout: int, seed: int) -> None:
    """Writes train.jsonl and heldout.jsonl of prompts like "3n+17", as `prepare deepcoder` does.

    Every pair of numbers occurs once, so nothing held out is trained on. An answer is two tests,
    with inputs of their own: a program that prints a constant fails one of them.
    """
    draws = random.Random(seed)
    picks = draws.sample(range(len(_FACTORS) * len(_TERMS)), num_train + num_heldout)
    pairs = [divmod(pick, len(_TERMS)) for pick in picks]
    lines = [_line(_FACTORS[i], _TERMS[j], draws.sample(range(1, 1000), _TESTS)) for i, j in pairs]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.jsonl").write_text("".join(lines[:num_train]))
    (folder / "heldout.jsonl").write_text("".join(lines[num_train:]))


def _line(factor: int, term: int, numbers: list[int]) -> str:
    tests = {
        "inputs": [f"{n}\n" for n in numbers],
        "outputs": [f"{factor * n + term}" for n in numbers],
    }
    fields = {
        "prompt": [{"role": "user", "content": f"{factor}n+{term}"}],
        "answer": json.dumps(tests),
        "completion": f"{FENCE}{factor}*{INPUT}+{term}{END}",
    }
    return json.dumps(fields) + "\n"
