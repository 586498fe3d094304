"""Makes temporary folders on this node, and removes those that killed processes left.

A folder's name says whose it was; the next process with the same purpose removes it.
"""

import logging
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from pathlib import Path

from relax_hpc.runtime.files import permissions
from relax_hpc.runtime.process import start_ticks

log = logging.getLogger(__name__)

COMPILED = "TORCHINDUCTOR_CACHE_DIR"
"""Cache folder of torch's compiler."""
_TORCHS_OWN = "torchinductor_"
"""Prefix of torch's default folder, which child processes inherit, e.g. a submitted job."""
_OURS = "relax-compiled-"


@contextmanager
def scratch_folder(purpose: str, parent: Path | None = None) -> Iterator[Path]:
    """Makes a folder that only this user may enter, for the length of the block.

    Args:
        purpose: a word, part of its name.
        parent: default is the system's temporary folder.
    """
    parent = parent or _temporary()
    here = f"relax-{purpose}-{_node()}."
    _remove_leftovers(parent, here)
    pid = os.getpid()
    folder = Path(tempfile.mkdtemp(prefix=f"{here}{pid}.{start_ticks(pid)}-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def use_private_folder(environment: MutableMapping[str, str]) -> Iterator[None]:
    """Gives torch's compiler a cache folder that nobody else can write.

    By default it keeps programs and pickles in a temporary folder with a predictable name, and runs
    whatever it finds there. Here it is our own folder, which the next task reuses; if somebody else
    has taken its name, one for the length of the block.

    Args:
        environment: of this process and its children. A folder named there stays, unless torch
            named it. Call before torch's compiler is imported.
    """
    if is_said(environment):
        yield
        return
    folder = _temporary() / f"{_OURS}{os.geteuid()}"
    if _make_ours(folder):
        environment[COMPILED] = str(folder)
        yield
        return
    log.warning("%s: is not this user's alone, so torch compiles again in another folder", folder)
    with scratch_folder("compiled") as instead:
        environment[COMPILED] = str(instead)
        yield


def _temporary() -> Path:
    """Returns the system's temporary folder, or another if others may replace its contents."""
    asked = Path(tempfile.gettempdir())
    for each in (asked, Path("/tmp"), Path("/dev/shm")):
        if each.is_dir() and not permissions.replaceable(each / _OURS):
            return each
    return asked


def is_said(environment: Mapping[str, str]) -> bool:
    """Whether the user has named a cache folder for torch's compiler."""
    said = environment.get(COMPILED, "")
    return bool(said) and not Path(said).name.startswith((_TORCHS_OWN, _OURS))


def _make_ours(folder: Path) -> bool:
    """Creates a folder if needed, and returns whether only this user can write in it."""
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and permissions.is_own(found)


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
    """Names the scope of process ids: nodes or containers may share temporary folders."""
    return f"{socket.gethostname()}.{os.stat('/proc/self/ns/pid').st_ino}"  # noqa: PTH116
