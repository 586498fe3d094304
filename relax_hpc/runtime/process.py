"""Identifies processes, ties them to their parents, looks into them, and runs short programs.

`inference/leash.py`, `environments/program_keeper.py` and `environments/rewards/sandbox_stage.py`
repeat some of it: they run as scripts, with the standard library alone.
"""

import ctypes
import faulthandler
import linecache
import os
import platform
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Self

import psutil

_PROC = Path("/proc")
_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36


def end_with_parent(number: int = signal.SIGKILL) -> None:
    """Has this process sent a signal when its parent ends; 0 turns it off."""
    _prctl(_SET_PDEATHSIG, number)


def end_with(owner: int, number: int = signal.SIGKILL) -> None:
    """Calls `end_with_parent` if `owner` is still the parent; otherwise exits."""
    end_with_parent(number)
    if os.getppid() != owner:  # it ended before the call above
        os._exit(1)


def adopt_orphans() -> None:
    """Makes this process the parent of its descendants' orphans (PR_SET_CHILD_SUBREAPER)."""
    _prctl(_SET_CHILD_SUBREAPER, 1)


@cache
def _libc() -> ctypes.CDLL:
    """Loads libc before a fork: a child must not."""
    return ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    _libc().prctl(option, value, 0, 0, 0)


def start_ticks(pid: int) -> int | None:
    """Returns when a process started, in ticks since boot; None if there is none.

    `psutil` adds the boot time, which changes when the clock is set.
    """
    fields = _stat(pid)
    return int(fields[19]) if fields else None


def _stat(pid: int) -> list[bytes]:
    """Returns the fields of a process behind its name; none if it has ended."""
    try:
        text = (_PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return []
    return text.rpartition(b")")[2].split()  # the name may have anything in it


@cache
def boot_id() -> str:
    """Identifies this boot of the node; "" if Linux does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return ""


_CLOCK_SET_S = 5.0
"""Longest adjustment of the clock since an older version noted a start time."""


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process and when it started, since the kernel reuses ids."""

    pid: int
    start_time: float = field(compare=False)
    """By the node's clock, which may be set: used for older records only."""
    start_ticks: int | None = None
    """Ticks from boot to its start; None in records of older versions."""
    boot_id: str = ""
    """The boot from which these count."""

    @classmethod
    def of(cls, pid: int) -> Self:
        """Identifies a running process.

        Raises:
            psutil.NoSuchProcess: it is not running.
        """
        started, ticks = psutil.Process(pid).create_time(), start_ticks(pid)
        if ticks is None:
            raise psutil.NoSuchProcess(pid)
        return cls(pid, started, ticks, boot_id())

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> Self:
        """Reads one from a record with its fields and maybe others, also of an older version."""
        ticks, booted = record.get("start_ticks"), record.get("boot_id", "")
        return cls(record["pid"], record["start_time"], ticks, booted)

    def find(self) -> psutil.Process | None:
        """Returns the process, unless it has ended."""
        try:
            process = psutil.Process(self.pid)
            if not self._has_started(process):
                return None
            return None if process.status() == psutil.STATUS_ZOMBIE else process
        except psutil.NoSuchProcess:
            return None

    def _has_started(self, process: psutil.Process) -> bool:
        """Whether the process with this number now started when ours did."""
        if self.start_ticks is None:
            return bool(abs(process.create_time() - self.start_time) <= _CLOCK_SET_S)
        return (self.start_ticks, self.boot_id) == (start_ticks(self.pid), boot_id())


def run(
    command: Sequence[str],
    timeout_s: float,
    *,
    environment: Mapping[str, str] | None = None,
    given: str = "",
    folder: Path | None = None,
) -> "subprocess.CompletedProcess[str]":
    """Runs a short program and decodes its output as UTF-8, replacing invalid bytes.

    Slurm and shell profiles print in whatever encoding the site has; no byte of it may be an error.

    Args:
        timeout_s: limit in seconds.
        environment: of the program; default is ours.
        given: its standard input.
        folder: its working directory; default is ours.

    Raises:
        OSError: it cannot be run.
        subprocess.TimeoutExpired: it took longer.
    """
    return subprocess.run(
        command, input=given, capture_output=True, encoding="utf-8", errors="replace",
        timeout=timeout_s, check=False, env=environment, cwd=folder,
    )  # fmt: skip


MPI_RANK = ("OMPI_", "PMIX_", "PMI_", "SLURM_MPI", "SLURM_PMI", "MPI_LOCAL", "HYDI_CONTROL")
"""Prefixes of the variables by which a launcher tells a process that it is an MPI rank. One that
inherits them (an engine, an agent, a job submitted from within a step) would try to join the world
of that rank."""
MPI_SETTINGS = ("OMPI_MCA_", "PMIX_MCA_")
"""Prefixes that configure MPI and do not identify a rank."""


def is_of_a_rank(name: str) -> bool:
    return name.startswith(MPI_RANK) and not name.startswith(MPI_SETTINGS)


def without_mpi(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment for a program that is no MPI rank, started by one that is."""
    return {name: value for name, value in environment.items() if not is_of_a_rank(name)}


MAIN_SIGNAL, ALL_SIGNAL = signal.SIGRTMIN + 3, signal.SIGRTMIN + 4
"""Make our processes write the Python stack of the main thread, or of all threads (see
`faulthandler.register`). The latter may crash the process: it reads stacks of running threads."""
_OWN = "/relax_hpc/"
_COLLECTIVES = "/torch/distributed/"
_WAITS = re.compile(r"\.(wait|synchronize|item|cpu|tolist)\(")
_TGKILL = {"x86_64": 234, "aarch64": 131}
"""Numbers of the tgkill system call, which glibc wraps since 2.30 only."""
_STACK_S = 1.0
_POLL_S = 0.02
_MOST_BYTES = 1 << 16


class ProcessFacts(NamedTuple):
    """Fields of /proc for a process."""

    state: str
    """R runs, S sleeps, D waits for a device, T is stopped, Z has ended."""
    channel: str
    """Kernel function in which it sleeps; empty if unknown."""
    kernel_stack: str
    """Empty unless the reader is root."""
    command: str

    @property
    def is_stopped(self) -> bool:
        """Whether somebody stopped it; a debugger (t) does not count."""
        return self.state == "T"


def tell_stacks(fd: int = 2) -> None:
    """Makes this process write its stacks to `fd` at every `MAIN_SIGNAL` or `ALL_SIGNAL`."""
    faulthandler.register(MAIN_SIGNAL, fd, all_threads=False)
    faulthandler.register(ALL_SIGNAL, fd, all_threads=True)


def tell_no_stacks() -> None:
    """Undoes `tell_stacks`."""
    for number in (MAIN_SIGNAL, ALL_SIGNAL):
        faulthandler.unregister(number)


def facts(pid: int) -> ProcessFacts | None:
    """Reads /proc; None if there is no such process."""
    folder, fields = _PROC / str(pid), _stat(pid)
    if not fields:
        return None
    channel = _text(folder / "wchan")
    command = _text(folder / "cmdline").replace("\0", " ").strip()
    return ProcessFacts(
        fields[0].decode(), "" if channel == "0" else channel, _text(folder / "stack"), command
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace", encoding="utf-8")[:_MOST_BYTES].strip()
    except OSError:
        return ""


def _hears(pid: int) -> bool:
    """Whether the process handles the signal, which would kill it otherwise."""
    for line in _text(_PROC / str(pid) / "status").splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (MAIN_SIGNAL - 1) & 1)
    return False


def python_stacks(pid: int, fd: int, *, wake: bool = False, every: bool = False) -> str:
    """Returns the stack of a process's main thread, which its signal handler writes.

    It needs no interpreter lock, but the process must be able to run.

    Args:
        pid: a process that has not called `tell_stacks` is left alone.
        fd: file to which its stacks are appended.
        wake: continues a stopped process; only right before ending it.
        every: all threads; only right before ending it.

    Returns:
        The output within a second; may be empty.
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
    """Signals the main thread: a signal to the process may go to any thread, above all after a
    stop."""
    tgkill = _TGKILL.get(platform.machine())
    if tgkill is None:
        os.kill(pid, number)
    elif _libc().syscall(tgkill, pid, pid, number):
        raise ProcessLookupError


def frames(stacks: str) -> list[str]:
    """Returns the frames of the main thread, innermost first, as "file:line in function".

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

    It is in a function of `torch.distributed`, or its line of code calls one of `_WAITS`: native
    functions that leave no frame.
    """
    found = frames(stacks)
    if not found:
        return False
    file, _, number = found[0].partition(" in ")[0].rpartition(":")
    return _COLLECTIVES in file or bool(_WAITS.search(linecache.getline(file, int(number))))


def place_of(stacks: str) -> str:
    """Returns the innermost informative frame: one of this package, if any."""
    found = frames(stacks)
    return next((each for each in found if _OWN in each), found[0] if found else "")
