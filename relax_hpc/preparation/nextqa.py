"""NExT-QA: questions about short videos, five choices each (arXiv:2105.08276).

In the edition of TinyLLaVA-Video-R1 (arXiv:2504.09641): 5 thousand, of at most 30 seconds.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from relax_hpc.preparation.data_set import DataSet, Shown, Task, beside, letter, text

_WISH = (
    "Watch the video. Think step by step between <think> and </think>, and then write the letter "
    "of your choice alone between <answer> and </answer>."
)


def _task(fields: Mapping[str, Any]) -> Task:
    """The problem has its choices in it."""
    problem = text(fields, "problem").removeprefix("<video>").strip()
    return Task(f"<video>{problem}\n\n{_WISH}", letter(fields, "solution", "ABCDE"))


def _media(fields: Mapping[str, Any], folder: Path | None) -> Sequence[Shown]:
    if "video_filename" not in fields:
        raise ValueError(f"has no video_filename, but {', '.join(fields) or 'nothing'}")
    return [beside(folder, fields["video_filename"], "video_filename", "video")]


NEXTQA = DataSet(
    "nextqa", "Zhang199/TinyLLaVA-Video-R1-training-data", (), _task, _media, kinds=(".jsonl",)
)
