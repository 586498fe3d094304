"""Weights as a Hugging Face folder in the run directory: the `files` transport."""

import shutil
from collections.abc import Iterable
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from relax_hpc.records import write_json

_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".pt")


def write(folder: Path, tensors: Iterable[tuple[str, Tensor]], model_folder: Path) -> Path:
    """Publishes `tensors` as a folder that loads like `model_folder`, which lends all but weights.

    The folder appears whole, by a rename, and is never changed afterwards.
    """
    draft = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    for path in model_folder.iterdir():
        if path.is_file() and not path.name.endswith(_WEIGHTS):
            shutil.copy(path, draft)
    named = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors}
    save_file(named, draft / "model.safetensors", metadata={"format": "pt"})
    write_json(draft / "MANIFEST.json", {"tensors": len(named)})
    shutil.rmtree(folder, ignore_errors=True)
    draft.rename(folder)
    return folder


def prune(newest: Path, *, keep: int = 2) -> None:
    """Deletes all but the `keep` newest snapshots beside `newest`."""
    for old in sorted(newest.parent.glob("v*"))[:-keep]:
        shutil.rmtree(old)
