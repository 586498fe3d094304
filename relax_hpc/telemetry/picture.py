"""Figures without a display or global state, and files of them that are never half there."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def figure(width: float, height: float, *, dpi: int = 150) -> "Figure":
    """An empty one, in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=dpi, layout="constrained")


def save(drawn: "Figure", path: Path) -> Path:
    """As a PNG, in the place of an older one."""
    draft = path.with_name(f".{os.getpid()}.{path.name}")
    drawn.savefig(draft, format="png")
    draft.replace(path)
    return path
