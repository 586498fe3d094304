"""Geometry3K: 3 thousand problems about drawn figures (arXiv:2105.04165)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from relax_hpc.preparation.data_set import DataSet, Shown, Task, image, text

_WISH = (
    "Think step by step between <think> and </think>, and then put the final answer into \\boxed{}."
)
_PLACE = "<image>"


def _task(fields: Mapping[str, Any]) -> Task:
    problem = text(fields, "problem")
    places, shown = problem.count(_PLACE), len(_images(fields, None))
    if places != shown:
        raise ValueError(f"problem has {places} places {_PLACE}, and there are {shown} images")
    return Task(f"{problem}\n\n{_WISH}", text(fields, "answer"))


def _images(fields: Mapping[str, Any], _: Path | None) -> Sequence[Shown]:
    found = fields.get("images")
    if not isinstance(found, Sequence) or isinstance(found, str | bytes) or not found:
        raise ValueError(f"has no images, but {', '.join(fields) or 'nothing'}")
    return [image(each, "images") for each in found]


GEOMETRY3K = DataSet(
    "geometry3k", "hiyouga/geometry3k", ("/train", "/validation", "/test"), _task, _images
)
