"""Weights as Hugging Face folders in the run directory: the `files` transport."""

import shutil
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from relax_hpc import hf_folder


def write(folder: Path, tensors: Iterable[tuple[str, Tensor]], model_folder: Path) -> Path:
    """Publishes `tensors` as a folder that loads like `model_folder`, and is never changed."""
    # A restarted run publishes again, so nothing has to outlive a crash of the machine.
    hf_folder.write(folder, tensors, model_folder, durable=False)
    return folder


def prune(newest: Path, *, keep: int = 2) -> None:
    """Deletes all but the `keep` newest snapshots beside `newest`."""
    for old in sorted(newest.parent.glob("v*"))[:-keep]:
        shutil.rmtree(old)
