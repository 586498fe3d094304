"""Runs a reward: `python -m relax_hpc.environments.rewards.worker`, started by `process`.

It is two processes: one runs the reward; its parent ends with it and kills its descendants, in
whatever session. Neither imports torch. Standard streams lead nowhere; messages are lines of JSON
on a socket, so nothing is unpickled.
"""

import asyncio
import fcntl
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
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from relax_hpc.environments import program_keeper
from relax_hpc.environments.rewards import registry
from relax_hpc.environments.rewards.contract import Reward, Sample, Weighted
from relax_hpc.errors import ConfigError, ends_of, first_line
from relax_hpc.runtime.files.user_programs import describe_error
from relax_hpc.runtime.process import adopt_orphans, end_with

_SEAL_FUTURE_WRITE = 0x10
PROGRESS = struct.Struct("qd")
"""Shared with the owner: the current sample and the monotonic second of its start."""
MOST_BYTES = 1 << 30
"""Largest message."""


class Arguments(NamedTuple):
    """The command line, in this order."""

    owner: int
    socket: int
    progress: int
    """File descriptors."""
    memory_bytes: int
    deadline_s: float
    run_dir: str
    """Run whose engines it may use; "" if there is none yet."""


def main(argv: list[str]) -> None:
    given = Arguments(*(kind(text) for kind, text in zip(_KINDS, argv, strict=True)))
    _go_on_below(given)
    # Memory that can be written to: address space alone is reserved freely, and costs nothing.
    resource.setrlimit(resource.RLIMIT_DATA, (given.memory_bytes, given.memory_bytes))
    progress = mmap.mmap(given.progress, PROGRESS.size)
    with suppress(OSError):  # before Linux 5.1 who writes to all descriptors may blame a sibling
        fcntl.fcntl(given.progress, fcntl.F_ADD_SEALS, _SEAL_FUTURE_WRITE)
    os.close(given.progress)
    channel = socket.socket(fileno=given.socket)
    channel.set_inheritable(False)
    try:
        reward = _reward(_first_line(channel), _engines_of(given.run_dir))
    except ConfigError as error:
        channel.sendall(_line({"refused": ends_of(str(error), 1000)}))
        return
    channel.sendall(_line({"kind": list(reward.kind)}))
    asyncio.run(_serve(reward, channel, progress, given.deadline_s))


_KINDS = (int, int, int, int, float, str)


def _first_line(channel: socket.socket) -> bytes:
    """Reads the owner's first message: a list of `registry.Term`."""
    with channel.makefile("rb", buffering=0) as stream:
        return stream.readline()


def _reward(line: bytes, engines: Callable[[], object] | None) -> Reward:
    functions = []
    for each in json.loads(line):
        term = registry.Term(*each)
        try:
            function = term.function()
            title, weight, sources = term.title, term.weight, term.sources
            weighted = Weighted(function, engines, title=title, weight=weight, sources=sources)
            functions.append(weighted)
        except BaseException as error:  # noqa: BLE001 - SystemExit of somebody's program, too
            said = first_line(error) if isinstance(error, ConfigError) else describe_error(error)
            raise ConfigError(f"{term.key}.name = {term.name!r}: {said}") from None
    return Reward(functions)


def _engines_of(run_dir: str) -> Callable[[], object] | None:
    def engines() -> object:
        # A second that other rewards do not pay.
        from relax_hpc.environments.rewards.engines import Engines

        return Engines(Path(run_dir))

    return engines if run_dir else None


async def _serve(
    reward: Reward, channel: socket.socket, progress: mmap.mmap, deadline_s: float
) -> None:
    own = os.getpid()
    reader, writer = await asyncio.open_connection(sock=channel, limit=MOST_BYTES)

    def begin(number: int) -> None:
        progress[:] = PROGRESS.pack(number, time.monotonic())

    async def answer(line: bytes) -> None:
        asked = json.loads(line)
        group = [Sample(**each) for each in asked["group"]]
        scores = await reward(group, deadline_s, begin)
        begin(-1)  # whatever ends this process from here on, any of them may have done
        if os.getpid() != own:  # a plugin that forked returns twice
            os._exit(0)
        if _count_kept_bytes() > _GARBAGE_BYTES:
            gc.collect()
        writer.write(
            _line(
                {
                    "id": asked["id"],
                    "scores": [[each.value, dict(each.parts), each.error] for each in scores],
                    "kept_bytes": _count_kept_bytes(),
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


def _go_on_below(given: Arguments) -> None:
    """Returns in a child; the parent exits when the child or the owner has ended.

    As a subreaper, the parent keeps all descendants below it, in whatever session.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    end_with(given.owner, signal.SIGTERM)
    adopt_orphans()
    above = os.getpid()
    # Until it is ready to take along what the child starts, which may be soon.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    child = os.fork()
    if child == 0:
        end_with(above)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        return
    os.close(given.socket)
    os.close(given.progress)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    status = 0
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        while (ended := os.wait()) and ended[0] != child:
            pass
        status = ended[1]
    finally:  # also if the owner has ended
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        program_keeper.end_children()
        program_keeper.end_likewise(status)


def _count_kept_bytes() -> int:
    """Memory that counts towards the limit: all writable memory, touched or not."""
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[5]) * mmap.PAGESIZE


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":"), allow_nan=False).encode() + b"\n"


if __name__ == "__main__":
    main(sys.argv[1:])
