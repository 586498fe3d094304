"""Multimodal Open R1: 8 thousand verified problems of mathematics, each about one image."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from relax_hpc.preparation.data_set import DataSet, Shown, Task, image, text
from relax_hpc.rewards.answers import last_tag

_WISH = (
    "Think step by step between <think> and </think>, and then write the final answer between "
    "<answer> and </answer>."
)
_PLACE = "<image>"


def _task(fields: Mapping[str, Any]) -> Task:
    """The answer is what the solution has in its tag, or all of it where there is none."""
    problem = text(fields, "problem").replace(_PLACE, "").strip()
    solution = text(fields, "solution")
    answer = (last_tag(solution, "answer") or solution).strip()
    return Task(f"{_PLACE}{problem}\n\n{_WISH}", answer)


def _image(fields: Mapping[str, Any], _: Path | None) -> Sequence[Shown]:
    if "image" not in fields:
        raise ValueError(f"has no image, but {', '.join(fields) or 'nothing'}")
    return [image(fields["image"], "image")]


OPENR1MM = DataSet(
    "openr1mm", "lmms-lab/multimodal-open-r1-8k-verified", ("/train",), _task, _image
)
