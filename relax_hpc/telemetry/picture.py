"""Figures without a display or global state, and files of them that are never half there."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from relax_hpc.errors import ConfigError
from relax_hpc.storage import delete, patiently

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def figure(width: float, height: float, *, dpi: int = 150) -> "Figure":
    """An empty one, in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=dpi, layout="constrained")


def check(path: Path) -> None:
    """Checks that a picture can be put there.

    Raises:
        ConfigError: it is a folder, or in none that can be written to.
    """
    if path.is_dir():
        raise ConfigError(f"{path}: is a folder; name a file of it, e.g. {path / 'picture.png'}")
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: there is no folder {path.parent}; make it, or name another")
    if not os.access(path.parent, os.W_OK | os.X_OK, effective_ids=True):
        raise ConfigError(f"{path}: {path.parent} cannot be written to; name another folder")


def save(drawn: "Figure", path: Path) -> Path:
    """Saves a figure as a PNG, in the place of an older one."""
    check(path)
    draft = path.with_name(f".{os.getpid()}.{path.name}")

    def put() -> None:
        drawn.savefig(draft, format="png")
        draft.replace(path)

    try:
        patiently(path, put)
    finally:
        delete(draft)
    return path
