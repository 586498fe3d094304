"""Makes figures without a display or global state, and saves them atomically."""

import io
import os
from pathlib import Path
from typing import TYPE_CHECKING

from relax_hpc.errors import ConfigError
from relax_hpc.runtime.files.records import write_bytes
from relax_hpc.runtime.files.user_files import write_named

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def figure(width: float, height: float, *, dpi: int = 150) -> "Figure":
    """Makes an empty figure, sized in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=dpi, layout="constrained")


def check(path: Path) -> None:
    """Checks that a picture can be written there.

    Raises:
        ConfigError: it is a folder, or its folder is not writable.
    """
    if path.is_dir():
        raise ConfigError(f"{path}: is a folder; name a file of it, e.g. {path / 'picture.png'}")
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: there is no folder {path.parent}; make it, or name another")
    if not os.access(path.parent, os.W_OK | os.X_OK, effective_ids=True):
        raise ConfigError(f"{path}: {path.parent} cannot be written to; name another folder")


def save(drawn: "Figure", path: Path) -> Path:
    """Saves a figure as a PNG, replacing an older one."""
    check(path)
    write_bytes(path, _png(drawn))
    return path


def save_as_named(drawn: "Figure", path: Path, *, in_run: bool) -> Path:
    """Saves to a file that a user named, or the default in a run; see `written`."""
    with write_named(path, "--out", replace=True, in_run=in_run) as file:
        file.write(_png(drawn))
    return path


def _png(drawn: "Figure") -> bytes:
    buffer = io.BytesIO()
    drawn.savefig(buffer, format="png")
    return buffer.getvalue()
