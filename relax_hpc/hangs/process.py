"""Tells what the kernel and the interpreter know of a process, without help of its own code."""

import ctypes
import faulthandler
import linecache
import os
import platform
import re
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

MAIN_SIGNAL, ALL_SIGNAL = signal.SIGRTMIN + 3, signal.SIGRTMIN + 4
"""Make a process of ours write the Python stack of its main thread, or of all of its threads, see
`faulthandler.register`. The latter may end it: stacks of threads that run are read as they
change."""
_PROC = Path("/proc")
_OWN = "/relax_hpc/"
_COLLECTIVES = "/torch/distributed/"
_WAITS = re.compile(r"\.(wait|synchronize|item|cpu|tolist)\(")
_TGKILL = {"x86_64": 234, "aarch64": 131}
"""Numbers of the system call, which glibc has a function for since 2.30 only."""
_STACK_S = 1.0
_POLL_S = 0.02
_MOST_BYTES = 1 << 16


class Facts(NamedTuple):
    """The words of /proc about a process."""

    state: str
    """A letter: R runs, S sleeps, D waits for a device, T is stopped, Z has ended."""
    channel: str
    """The function of the kernel that it sleeps in; empty if the kernel does not say."""
    kernel_stack: str
    """Empty unless the reader is root."""
    command: str

    @property
    def is_stopped(self) -> bool:
        """Whether somebody stopped it; under a debugger it is not (t)."""
        return self.state == "T"


def tell_stacks(fd: int = 2) -> None:
    """Has this process write its stacks to `fd` at every `MAIN_SIGNAL` or `ALL_SIGNAL`."""
    faulthandler.register(MAIN_SIGNAL, fd, all_threads=False)
    faulthandler.register(ALL_SIGNAL, fd, all_threads=True)


def tell_no_stacks() -> None:
    """Takes `tell_stacks` back."""
    for number in (MAIN_SIGNAL, ALL_SIGNAL):
        faulthandler.unregister(number)


def facts(pid: int) -> Facts | None:
    """Reads the facts of a process; None if there is none."""
    folder = _PROC / str(pid)
    try:
        stat = (folder / "stat").read_text(errors="replace")
    except OSError:
        return None
    state = stat.rpartition(")")[2].split()[0]
    channel = _text(folder / "wchan")
    command = _text(folder / "cmdline").replace("\0", " ").strip()
    return Facts(state, "" if channel == "0" else channel, _text(folder / "stack"), command)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")[:_MOST_BYTES].strip()
    except OSError:
        return ""


def _hears(pid: int) -> bool:
    """Whether the process has a handler for the signal, which would else end it."""
    for line in _text(_PROC / str(pid) / "status").splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (MAIN_SIGNAL - 1) & 1)
    return False


def python_stacks(pid: int, fd: int, *, wake: bool = False, every: bool = False) -> str:
    """The stack of a process's main thread, which its signal handler writes.

    No thread of it needs the lock of the interpreter for that, but the process must be able to run.

    Args:
        pid: of a process; one that has not called `tell_stacks` is left alone.
        fd: of what its stacks are added to.
        wake: continues a process that is stopped; it is to be ended right afterwards.
        every: tells those of all threads; it is to be ended right afterwards.

    Returns:
        What was written within a second; may be empty.
    """
    before = os.fstat(fd).st_size
    if not _hears(pid):
        return ""
    with suppress(ProcessLookupError):
        _signal_main_thread(pid, ALL_SIGNAL if every else MAIN_SIGNAL)
        if wake:
            os.kill(pid, signal.SIGCONT)
    size, deadline = before, time.monotonic() + _STACK_S
    while time.monotonic() < deadline:
        time.sleep(_POLL_S)
        last, size = size, os.fstat(fd).st_size
        if size > before and size == last:
            break
    return os.pread(fd, _MOST_BYTES, before).decode(errors="replace")


def _signal_main_thread(pid: int, number: int) -> None:
    """Sends a signal to the main thread: that of a process goes to any, above all in one that was
    stopped."""
    tgkill = _TGKILL.get(platform.machine())
    if tgkill is None:
        os.kill(pid, number)
    elif ctypes.CDLL(None).syscall(tgkill, pid, pid, number):
        raise ProcessLookupError


def frames(stacks: str) -> list[str]:
    """The frames of the main thread, innermost first, as "file:line in function".

    Args:
        stacks: as faulthandler writes them.
    """
    found = list[str]()
    _, _, block = stacks.rpartition("hread 0x")  # of several the oldest thread comes last
    for line in block.splitlines()[1:]:
        if not line.startswith("  File "):
            break
        place, _, function = line.strip().removeprefix("File ").partition(" in ")
        name, _, number = place.replace('"', "").partition(", line ")
        found.append(f"{name}:{number} in {function}")
    return found


def waits_for_others(stacks: str) -> bool:
    """Whether the main thread waits for other ranks, or for a device that may wait for them.

    It is in a function of `torch.distributed`, or its line of code calls one of `_WAITS`, which are
    not of Python and leave no frame.
    """
    found = frames(stacks)
    if not found:
        return False
    file, _, number = found[0].partition(" in ")[0].rpartition(":")
    return _COLLECTIVES in file or bool(_WAITS.search(linecache.getline(file, int(number))))


def place_of(stacks: str) -> str:
    """The innermost frame that says something: one of this package, if there is any."""
    found = frames(stacks)
    return next((each for each in found if _OWN in each), found[0] if found else "")
