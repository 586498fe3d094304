"""Ties programs to their owner, as a program of its own that costs milliseconds: it imports the
standard library only.

    python leash.py hold OWNER_PID PROGRAM ARGUMENTS...
    python leash.py reap SESSION [SECONDS]

`hold` becomes the program, which the kernel kills when its owner dies, however it dies. It runs
between fork and exec, since code in a forked child of a threaded process can deadlock.

`reap` ends the rest of a session when its owner dies. The kernel kills the held program then, and
its children follow once they have asked the kernel to; one that was still starting would live on.
Standard input is a pipe from the owner: if it closes, the owner is gone; a byte means that the
owner has ended the session itself. The leader of the session has SECONDS to end it.
"""

import ctypes
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_PR_SET_PDEATHSIG = 1
_PROC = Path("/proc")
_TRIES, _AGAIN_S = 40, 0.05


def hold(owner: int, argv: list[str]) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != owner:  # it died before the call above
        sys.exit(1)
    os.execvp(argv[0], argv)


class _Process(NamedTuple):
    pid: int
    session: int
    start: str
    state: str


def reap(session: int, grace_s: float) -> None:
    leader = _process(session)
    start = leader.start if leader else ""
    if os.read(0, 1):
        return
    until = time.monotonic() + grace_s
    while (leader := _process(session)) and leader.start == start and leader.state != "Z":
        if time.monotonic() >= until:
            break
        time.sleep(_AGAIN_S)
    for _ in range(_TRIES):
        found = [each for each in map(_process, _pids()) if each and each.session == session]
        # If the number went to another process, there is nobody left of that session.
        strange = any(each.pid == session and each.start != start for each in found)
        alive = [each for each in found if each.state != "Z"]
        if strange or not alive:
            return
        for each in alive:
            with suppress(ProcessLookupError):
                os.kill(each.pid, signal.SIGKILL)
        time.sleep(_AGAIN_S)


def _pids() -> list[int]:
    return [int(folder.name) for folder in _PROC.iterdir() if folder.name.isdecimal()]


def _process(pid: int) -> _Process | None:
    try:
        stat = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # "pid (name) state ppid pgrp session ... start ...": the name may have anything in it
    fields = stat.rpartition(")")[2].split()
    return _Process(pid, session=int(fields[3]), start=fields[19], state=fields[0])


def main() -> None:
    what, number, *rest = sys.argv[1:]
    if what == "hold":
        hold(int(number), rest)
    else:
        reap(int(number), float(rest[0] if rest else 0))


if __name__ == "__main__":
    main()
