"""Temporary folders of this node. One that a killed process left is removed by the next that makes
one for the same purpose: its name says whose it was."""

import logging
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from pathlib import Path

from relax_hpc.process_start import start_ticks

log = logging.getLogger(__name__)

COMPILED = "TORCHINDUCTOR_CACHE_DIR"
"""Variable that names the folder in which torch's compiler keeps what it made."""
_TORCHS_OWN = "torchinductor_"
"""How torch's default begins, which its children hear of, too, e.g. a job that is submitted."""
_OURS = "relax-compiled-"
_WRITE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


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
    folder = Path(tempfile.mkdtemp(prefix=f"{here}{pid}.{start_ticks(pid)}-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def compiled_folder(environment: MutableMapping[str, str]) -> Iterator[None]:
    """Within it torch's compiler runs nothing that somebody else may have put there.

    By default it keeps programs and pickles in a temporary folder of a name that everybody can
    tell, and runs what it finds there, whoever made it. Here it is our own one, which stays for the
    next task; where another has taken its name, one for the length of the block.

    Args:
        environment: of this process and those that it starts. A folder that it names stays, unless
            torch has named it. Must be called before torch's compiler is imported.
    """
    if is_said(environment):
        yield
        return
    folder = Path(tempfile.gettempdir()) / f"{_OURS}{os.geteuid()}"
    if _make_ours(folder):
        environment[COMPILED] = str(folder)
        yield
        return
    log.warning("%s: is not this user's alone, so torch compiles again in another folder", folder)
    with scratch_folder("compiled") as instead:
        environment[COMPILED] = str(instead)
        yield


def is_said(environment: Mapping[str, str]) -> bool:
    """Whether the user has named a folder for what torch's compiler makes."""
    said = environment.get(COMPILED, "")
    return bool(said) and not Path(said).name.startswith((_TORCHS_OWN, _OURS))


def _make_ours(folder: Path) -> bool:
    """Makes a folder unless there is one, and tells whether only this user can write in it."""
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    return (
        stat.S_ISDIR(found.st_mode)
        and found.st_uid == os.geteuid()
        and not found.st_mode & _WRITE_BY_OTHERS
    )


def _remove_leftovers(parent: Path, here: str) -> None:
    for folder in parent.iterdir():
        if not folder.name.startswith(here):
            continue
        try:
            is_ours = folder.lstat().st_uid == os.geteuid() and not folder.is_symlink()
        except FileNotFoundError:  # its maker lives, and has just removed it
            continue
        pid, _, start = folder.name.removeprefix(here).split("-")[0].partition(".")
        if is_ours and pid.isdecimal() and str(start_ticks(int(pid))) != start:
            shutil.rmtree(folder, ignore_errors=True)


def _node() -> str:
    """Names where a process id means the same: temporary folders may be shared by nodes or
    containers."""
    return f"{socket.gethostname()}.{os.stat('/proc/self/ns/pid').st_ino}"  # noqa: PTH116
