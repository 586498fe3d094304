"""Ends what an engine leaves behind when its owner dies: `python reaper.py SESSION [SECONDS]`.

The kernel kills the engine itself then (see `leash`). Its children follow, once they have asked the
kernel to; one that was still starting lives on. Standard input is a pipe of which the owner has the
other end: if it ends, the owner is gone; a byte says that the owner has ended the engine itself.
With SECONDS the leader of the session has that long to end the session, and itself. It imports the
standard library only, so it costs milliseconds.
"""

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_PROC = Path("/proc")
_TRIES, _AGAIN_S = 40, 0.05


class _Process(NamedTuple):
    pid: int
    session: int
    start: str
    state: str


def main() -> None:
    session = int(sys.argv[1])
    leader = _process(session)
    start = leader.start if leader else ""
    if os.read(0, 1):
        return
    until = time.monotonic() + float(sys.argv[2] if sys.argv[2:] else 0)
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


if __name__ == "__main__":
    main()
