"""Temporary folders of this node. One that a killed process left is removed by the next that makes
one for the same purpose: its name says whose it was."""

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def scratch_folder(purpose: str, parent: Path | None = None) -> Iterator[Path]:
    """A folder that only this user may enter, for the length of the block.

    Args:
        purpose: a word, part of its name.
        parent: where; the system's folder for such things if not given.
    """
    parent = parent or Path(tempfile.gettempdir())
    here = f"relax-{purpose}-{_node()}."
    _remove_leftovers(parent, here)
    pid = os.getpid()
    folder = Path(tempfile.mkdtemp(prefix=f"{here}{pid}.{_start_of(pid)}-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_leftovers(parent: Path, here: str) -> None:
    for folder in parent.iterdir():
        if not folder.name.startswith(here):
            continue
        try:
            is_ours = folder.lstat().st_uid == os.geteuid() and not folder.is_symlink()
        except FileNotFoundError:  # its maker lives, and has just removed it
            continue
        pid, _, start = folder.name.removeprefix(here).split("-")[0].partition(".")
        if is_ours and pid.isdecimal() and _start_of(int(pid)) != start:
            shutil.rmtree(folder, ignore_errors=True)


def _node() -> str:
    """Names where a process id means the same: temporary folders may be shared by nodes or
    containers."""
    return f"{socket.gethostname()}.{os.stat('/proc/self/ns/pid').st_ino}"  # noqa: PTH116


def _start_of(pid: int) -> str:
    """Returns when a process started, in ticks since the node did; "" if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return ""
    return fields.rpartition(b")")[2].split()[19].decode()  # the name may have anything in it
