"""Starts, calls, watches and kills a reward's worker process."""

import asyncio
import base64
import itertools
import json
import logging
import mmap
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import date
from datetime import time as time_of_day
from pathlib import Path
from typing import Any, NamedTuple, Self

import psutil

from relax_hpc.environments.rewards.contract import FIELDS, Kind, Sample, Score
from relax_hpc.environments.rewards.registry import Term
from relax_hpc.environments.rewards.worker import PROGRESS
from relax_hpc.errors import ConfigError, EngineLostError
from relax_hpc.runtime.files.user_programs import PATIENCE_S
from relax_hpc.runtime.process import start_ticks

log = logging.getLogger(__name__)

START_S = PATIENCE_S + 15.0
"""Default seconds for a worker to import the reward. The worker ends a hanging import itself, and
reports where."""
TELL_S = 10.0
"""Seconds after which a slow import is logged."""
END_S = 0.5
"""Seconds for a process to exit after it closed its end."""
GRACE_S = 0.5
"""Seconds beyond the deadline, for a worker that enforces it itself."""
LATE_S = 0.05
"""Seconds beyond that for a reply that arrived while the owner was busy."""
NONSENSE = "answered nonsense"
MOST_REPLY_BYTES = 16 << 20
"""Largest valid answer."""


class WorkerLimits(NamedTuple):
    deadline_s: float
    """Per sample; per group if the reward sees the group."""
    memory_bytes: int
    start_s: float = START_S
    """Seconds to import the reward."""


class WorkerLostError(EngineLostError):
    """A worker process ended, hung or answered nonsense, before it had scored a group."""

    def __init__(self, reason: str, guilty: int | None) -> None:
        super().__init__(reason)
        self.guilty = guilty
        """Index of the sample being scored, if known."""


class Worker:
    """One process, which has imported a reward."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        progress: mmap.mmap,
        limits: WorkerLimits,
    ) -> None:
        self.pid, self.kept_bytes = process.pid, 0
        self._process, self._progress, self._limits = process, progress, limits
        self._reader, self._writer = streams
        self._started = start_ticks(process.pid)
        self._ids = itertools.count()
        self._waiting: dict[int, asyncio.Future[list[Score]]] = {}
        self._lost = ""
        self._listening: asyncio.Task[None] | None = None
        self._watching = asyncio.create_task(self._watch())
        self.kind = Kind(sees_group=False, is_async=False)

    @property
    def usable(self) -> bool:
        """Whether it accepts more work: it runs, and its memory has not grown too much."""
        return not self._lost and self.kept_bytes < self._limits.memory_bytes / 2

    async def drain(self) -> None:
        """Waits until nobody waits for its replies."""
        while self._waiting:
            await asyncio.wait(list(self._waiting.values()))
            await asyncio.sleep(0)

    @classmethod
    async def start(
        cls, terms: Sequence[Term], limits: WorkerLimits, run_dir: Path | None = None
    ) -> Self:
        """Starts a process in its own session and waits until it has imported the reward.

        Args:
            terms: functions of the reward.
            limits: of the process.
            run_dir: whose engines the reward may use.

        Raises:
            ConfigError: the reward cannot be imported, or has unknown parameters or settings.
        """
        ours, theirs = socket.socketpair()
        page = os.memfd_create("reward-progress", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            streams = await asyncio.open_connection(sock=ours, limit=MOST_REPLY_BYTES)
            os.ftruncate(page, PROGRESS.size)
            progress = mmap.mmap(page, PROGRESS.size)
            numbers = (os.getpid(), theirs.fileno(), page, limits.memory_bytes, limits.deadline_s)
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *(
                    "-P",
                    "-m",
                    "relax_hpc.environments.rewards.worker",
                    *map(str, numbers),
                    str(run_dir or ""),
                ),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), page),
                start_new_session=True,
                env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            )
        finally:
            theirs.close()
            os.close(page)
        # Nothing is awaited between start and here: who is cancelled there leaves nobody.
        worker = cls(process, streams, progress, limits)
        try:
            await worker._meet(terms)
        except BaseException:
            await worker.end()
            raise
        return worker

    async def ask(self, group: Sequence[Sample]) -> list[Score]:
        """Scores a group.

        Raises:
            WorkerLostError: the process is gone; it was killed if needed.
        """
        number = next(self._ids)
        reply: asyncio.Future[list[Score]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = reply
        try:
            if not self._lost:
                self._progress[:] = PROGRESS.pack(-1, time.monotonic())
                message = {"id": number, "group": [_fields(each) for each in group]}
                self._writer.write(json.dumps(message, default=_plain).encode() + b"\n")
                await self._within_deadline(reply, len(group))
            if reply.done() and reply.result():
                return reply.result()
            raise WorkerLostError(self._lost, self._guilty(len(group)))
        finally:
            del self._waiting[number]
            reply.cancel()

    async def end(self) -> None:
        """Kills the process, its session and all its descendants, and waits for it."""
        self._lose("was ended")
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGSTOP)  # it starts nobody while we look
        await asyncio.to_thread(_kill_family, self.pid, self._started)
        await self._process.wait()
        await self._watching
        if self._listening:
            self._listening.cancel()
        self._writer.close()

    async def _meet(self, terms: Sequence[Term]) -> None:
        # Not on the command line, which everybody on the node can read.
        self._writer.write(json.dumps(terms).encode() + b"\n")
        key = " and ".join(f"{each.key}.name = {each.name!r}" for each in terms)
        told = asyncio.get_running_loop().call_later(
            TELL_S, log.warning, "%s: the import takes %.0f s so far", key, TELL_S
        )
        try:
            async with asyncio.timeout(self._limits.start_s):
                said = json.loads(await self._reader.readline())
        except TimeoutError:
            within = f"{self._limits.start_s:g} s"
            raise ConfigError(f"{key}: the import takes longer than {within}") from None
        except (ValueError, ConnectionError):
            await asyncio.sleep(0)
            lost = self._lost or "ended the process"
            raise ConfigError(f"{key}: the import {lost}") from None
        finally:
            told.cancel()
        if "refused" in said:
            raise ConfigError(said["refused"])
        self.kind = Kind(*said["kind"])
        if self.kind.pools is not None:
            self.kind = self.kind._replace(pools=tuple(self.kind.pools))
        self._listening = asyncio.create_task(self._listen())

    async def _within_deadline(self, reply: "asyncio.Future[list[Score]]", count: int) -> None:
        """Waits for a reply while each sample is in time; loses the worker otherwise."""
        begun, deadline_s = time.monotonic(), self._limits.deadline_s
        last = begun + deadline_s * count + GRACE_S
        end = begun + deadline_s
        while not reply.done():
            left = min(end, last) + GRACE_S * self.kind.is_async - time.monotonic()
            if left <= 0:
                await asyncio.wait([reply], timeout=LATE_S)
                if not reply.done():
                    self._lose(f"took longer than {deadline_s:g} s")
                return
            await asyncio.wait([reply], timeout=left)
            if not self.kind.is_async:
                end = max(end, PROGRESS.unpack(self._progress[:])[1] + deadline_s)

    def _guilty(self, count: int) -> int | None:
        number: int = PROGRESS.unpack(self._progress[:])[0]
        # Who answered nonsense may have gone on to the next sample since.
        known = self._lost != NONSENSE and not self.kind.is_async
        return number if known and 0 <= number < count else None

    async def _listen(self) -> None:
        """Hands replies to those who wait for them."""
        try:
            while line := await self._reader.readline():
                self._take(json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError):
            self._lose(NONSENSE)
        except OSError:
            pass
        await asyncio.wait([self._watching], timeout=END_S)  # how it ended says more
        self._lose("closed its end")

    def _take(self, said: dict[str, Any]) -> None:
        scores = [Score(float(value), dict(parts), error) for value, parts, error in said["scores"]]
        self.kept_bytes = int(said["kept_bytes"])
        reply = self._waiting.get(said["id"])
        if reply and not reply.done():
            reply.set_result(scores)

    async def _watch(self) -> None:
        # A socket does not say that a process ended while its children hold the other end.
        code = await self._process.wait()
        ended = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        self._lose(f"the process {ended}")

    def _lose(self, reason: str) -> None:
        """Fails all pending replies of this process."""
        self._lost = self._lost or reason
        for reply in self._waiting.values():
            if not reply.done():
                reply.set_result([])


def _fields(sample: Sample) -> dict[str, Any]:
    return {name: getattr(sample, name) for name in FIELDS}  # asdict copies what is below


def _plain(value: Any) -> Any:  # noqa: ANN401
    """Converts values that JSON cannot hold, which Parquet columns have."""
    if isinstance(value, date | time_of_day):
        return value.isoformat()
    if isinstance(value, bytes | bytearray):
        return base64.b64encode(value).decode()
    return str(value)


def _kill_family(leader: int, started: int | None) -> None:
    """Kills a process, its session and its descendants, and nobody else.

    Descendants in other sessions are found while the leader, the parent of orphans, is alive.
    """
    family = set[psutil.Process]()
    for _ in range(10):  # those found may have started others
        found = set(_family(leader, started)) - family
        for process in found:
            with suppress(psutil.NoSuchProcess):
                process.suspend()
        family |= found
        if not found:
            break
    for process in family:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def _family(leader: int, started: int | None) -> list[psutil.Process]:
    found = []
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(leader)
        if start_ticks(leader) not in (started, None):
            return []  # the number is another's: nobody of ours is left
        found = [process, *process.children(recursive=True)]
    return [*found, *(each for each in psutil.process_iter() if _is_of_session(each, leader))]


def _is_of_session(process: psutil.Process, leader: int) -> bool:
    try:
        return os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, psutil.NoSuchProcess):
        return False
