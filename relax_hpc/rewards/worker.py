"""A worker process: `python -m relax_hpc.rewards.worker ARGUMENTS`. Started by `process`.

It imports no torch. Its standard streams lead nowhere; what it is asked and what it answers are
lines of JSON on a socket of their own, so nothing is unpickled, on either side.
"""

import asyncio
import ctypes
import gc
import json
import mmap
import os
import resource
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from relax_hpc.errors import first_line
from relax_hpc.rewards import registry
from relax_hpc.rewards.contract import Reward, Sample

_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36
PROGRESS = struct.Struct("qd")
"""Shared with the owner: the sample under way and the monotonic second when it was begun."""
MOST_BYTES = 1 << 30
"""Limit of a message."""


class Arguments(NamedTuple):
    """The arguments of the command line, in this order."""

    owner: int
    """Process id of the owner."""
    socket: int
    progress: int
    """File descriptors."""
    memory_bytes: int
    deadline_s: float
    place: str
    """Place of the function, see `registry.place_of`."""
    run_dir: str
    """Directory of the run whose engines it may ask; "" where there is no run yet."""


def main(argv: list[str]) -> None:
    given = Arguments(*(kind(text) for kind, text in zip(_KINDS, argv, strict=True)))
    _tie(given.owner, given.memory_bytes)
    progress = mmap.mmap(given.progress, PROGRESS.size)
    channel = socket.socket(fileno=given.socket)
    channel.set_inheritable(False)
    try:
        function = registry.function_of(given.place)
        reward = Reward(function, _engines_of(given.run_dir))
    except BaseException as error:  # noqa: BLE001 - SystemExit of somebody's program, too
        said = f"{type(error).__name__}: {first_line(error)}"
        channel.sendall(_line({"refused": said[:1000]}))
        return
    channel.sendall(_line({"kind": list(reward.kind)}))
    asyncio.run(_serve(reward, channel, progress, given.deadline_s))


_KINDS = (int, int, int, int, float, str, str)


def _engines_of(run_dir: str) -> Callable[[], object] | None:
    def engines() -> object:
        from relax_hpc.rewards.engines import Engines  # a second that other rewards do not pay

        return Engines(Path(run_dir))

    return engines if run_dir else None


async def _serve(
    reward: Reward, channel: socket.socket, progress: mmap.mmap, deadline_s: float
) -> None:
    """Answers until the owner closes its end."""
    own = os.getpid()
    reader, writer = await asyncio.open_connection(sock=channel, limit=MOST_BYTES)

    def begin(number: int) -> None:
        progress[:] = PROGRESS.pack(number, time.monotonic())

    async def answer(line: bytes) -> None:
        asked = json.loads(line)
        group = [Sample(**each) for each in asked["group"]]
        scores = await reward(group, deadline_s, begin)
        if os.getpid() != own:  # a plugin that forked returns twice
            os._exit(0)
        gc_due = _resident_bytes() > _GARBAGE_BYTES
        if gc_due:
            gc.collect()
        writer.write(
            _line(
                {
                    "id": asked["id"],
                    "scores": [list(asdict(score).values()) for score in scores],
                    "resident_bytes": _resident_bytes(),
                }
            )
        )

    running = set[asyncio.Task[None]]()
    while line := await reader.readline():
        if reward.kind.is_async:
            running.add(task := asyncio.create_task(answer(line)))
            task.add_done_callback(running.discard)
        else:
            await answer(line)
    os._exit(0)  # whatever threads a plugin may have started


_GARBAGE_BYTES = 256 << 20


def _tie(owner: int, memory_bytes: int) -> None:
    """Dies with its owner, keeps those it starts in sight, and gets no more than its memory."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if os.getppid() != owner:  # it died before the call above
        sys.exit(1)
    # Memory that can be written to: address space alone is reserved freely, and costs nothing.
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":"), allow_nan=False).encode() + b"\n"


if __name__ == "__main__":
    main(sys.argv[1:])
