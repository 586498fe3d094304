"""AVQA-R1-6K: 6 thousand questions about an image and a sound, four choices (arXiv:2505.04623)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from relax_hpc.preparation.data_set import DataSet, Shown, Task, beside, letter, text

_WISH = (
    "Look and listen. Think step by step between <think> and </think>, and then write the letter "
    "of your choice alone between <answer> and </answer>."
)
_LETTERS = "ABCD"


def _task(fields: Mapping[str, Any]) -> Task:
    options = fields.get("options")
    if not isinstance(options, Sequence) or not options or isinstance(options, str):
        raise ValueError(f"has no options, but {', '.join(fields) or 'nothing'}")
    starts = [f"{each}." for each in _LETTERS[: len(options)]]
    if not all(str(o).strip().startswith(s) for o, s in zip(options, starts, strict=True)):
        raise ValueError(f"options do not begin with {', '.join(starts)}")
    lines = "\n".join(str(option).strip() for option in options)
    problem = text(fields, "problem")
    prompt = f"<image><audio>{problem}\n{lines}\n\n{_WISH}"
    return Task(prompt, letter(fields, "solution", _LETTERS[: len(options)]))


def _media(fields: Mapping[str, Any], folder: Path | None) -> Sequence[Shown]:
    files = fields.get("path")
    if not isinstance(files, Mapping):
        raise ValueError(f"has no path, but {', '.join(fields) or 'nothing'}")
    return [
        beside(folder, files.get("image"), "path.image", "image"),
        beside(folder, files.get("audio"), "path.audio", "audio"),
    ]


AVQA = DataSet(
    "avqa", "harryhsing/AVQA-R1-6K", (), _task, _media, heldout="valid", kinds=(".json",)
)
