"""Leaves each policy as a snapshot, which engines load when they come.

So the trainer waits for no engine, nor knows any: the owner of an engine has it load the newest
snapshot. An engine that fails a load holds undefined weights: it stays paused, and its owner
restarts it.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple, Self

from torch import Tensor

from relax_hpc.config.rollout import WeightsConfig
from relax_hpc.config.run import RunConfig
from relax_hpc.errors import EngineError, SnapshotError
from relax_hpc.inference.client import EngineClient
from relax_hpc.inference.members import Member
from relax_hpc.inference.switches import Notes
from relax_hpc.runtime.comm.bucket import BucketPlan, Digest
from relax_hpc.runtime.files import records
from relax_hpc.runtime.files.records import read_json, write_json
from relax_hpc.runtime.files.storage import exists
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.runtime.telemetry.events import EventWriter
from relax_hpc.runtime.telemetry.timers import Phase, Timers
from relax_hpc.weights.files import Loaded, load_snapshot
from relax_hpc.weights.publish import RETRY_S, Published
from relax_hpc.weights.transport import Rest, SentDigests, TrainerRanks

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0


class Newest(NamedTuple):
    """The newest complete snapshot. Its record has one writer, rank 0 of the trainer."""

    version: int
    """Version of the policy. It never falls: a restarted trainer is behind it for a while."""
    folder: Path
    """Never used twice: a version that is made again gets another folder."""
    checksums: list[int]
    """CRC-32 of its files in the order of their names, if engines are to be checked; else empty."""
    by_name: str
    """Digest of its tensors by name, in the same case; else empty."""

    @property
    def is_checked(self) -> bool:
        return bool(self.checksums)

    def write(self, paths: RunPaths) -> None:
        write_json(paths.snapshot, self._asdict() | {"folder": self.folder.name})
        records.folder_at(paths.control).note()

    @classmethod
    def read(cls, paths: RunPaths) -> Self | None:
        """Returns None before the first snapshot."""
        record = read_json(paths.snapshot)
        if record is None:
            return None
        return cls(**record | {"folder": paths.weights / record["folder"]})


@lru_cache(8)
def follow(paths: RunPaths) -> Callable[[], Newest | None]:
    """Does as `Newest.read`, with one poller for the whole process."""
    return records.follow(paths.snapshot, partial(Newest.read, paths))


class NewestVersion:
    """The newest policy available to engines; polls once a second at most."""

    def __init__(self, config: RunConfig, paths: RunPaths) -> None:
        """Stays 0 if the trainer delivers the weights itself."""
        self._newest, self._version = follow(paths), 0
        self._next_look = 0.0 if config.launch.layout == "separate" else math.inf

    def __call__(self) -> int:
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + LOOK_EVERY_S
            newest = self._newest()
            self._version = newest.version if newest else 0
        return self._version


class Puller:
    """Has one engine load the newest snapshot; lives in the task of its owner."""

    def __init__(self, paths: RunPaths, events: EventWriter, *, timeout_s: float) -> None:
        """`timeout_s`: limit of a load."""
        self._paths, self._events, self._timeout_s = paths, events, timeout_s
        self._notes = Notes(paths)
        self._newest = follow(paths)
        self._loaded: Newest | None = None
        self._next_look = 0.0

    def due(self) -> Newest | None:
        """Returns a snapshot that it does not have, if any; polls once a second at most."""
        if time.monotonic() < self._next_look:
            return None
        self._next_look = time.monotonic() + LOOK_EVERY_S
        newest = self._newest()
        if newest and self._loaded and newest.folder == self._loaded.folder:
            return None
        return newest

    def pull(self, engine: EngineClient, member: Member, newest: Newest) -> Member:
        """Has the engine load a snapshot, or one that has replaced it meanwhile.

        Returns:
            Its record, with the version that it holds.

        Raises:
            EngineError: it did not load any; its weights are undefined.
        """
        while True:
            begun = time.time()
            try:
                loaded = load_snapshot(
                    member, engine, newest.folder, newest.version, self._timeout_s, self._notes,
                    check=newest.is_checked,
                )  # fmt: skip
            except EngineError as error:
                # The trainer keeps two: a slow load may find its files gone.
                again = Newest.read(self._paths)
                if again is None or again.folder == newest.folder:
                    phases = [Phase("load", begun, time.time() - begun)]
                    failed = Loaded(member, newest.version, reason=str(error), phases=phases)
                    failed.emit(self._events)
                    raise EngineError(f"did not load v{newest.version}: {error}") from error
                log.warning("engine %s: %s; loading v%d", member.id, error, again.version)
                newest = again
                continue
            self._loaded = newest
            loaded.emit(self._events)
            if newest.is_checked:
                self._verify(engine, loaded, newest)
            return member._replace(version=newest.version)

    def _verify(self, engine: EngineClient, loaded: Loaded, newest: Newest) -> None:
        found = loaded.verify(engine, SentDigests(newest.checksums, newest.by_name)).verified
        assert found is not None
        self._events.emit("verify", version=newest.version, **found._asdict())
        if not found.equal:
            log.error("the engine holds other weights than the trainer: %s", found)


class SnapshotPublisher:
    """Lives in rank 0 of a trainer whose engines may be absent; see `publish.Publisher`."""

    def __init__(
        self, config: WeightsConfig, paths: RunPaths, plan: BucketPlan, ranks: TrainerRanks
    ) -> None:
        self._config, self._paths, self._ranks = config, paths, ranks
        self._num_bytes = sum(plan.sizes)
        self._left: Path | None = None
        self._lacks_since: float | None = None
        """Time of the first failed write since the last success."""
        self._not_before = 0.0

    def publish(
        self,
        version: int,
        tensors: Iterator[tuple[str, Tensor]],
        *,
        check: bool = False,
        check_fenced: Callable[[], None] = lambda: None,
    ) -> Published:
        """Writes a snapshot of the policy, unless this trainer has done so.

        Policy 0 is the model that engines start with. After a restart the trainer may be behind the
        newest snapshot. It writes none until it has caught up: running requests must not get older
        tokens than they have.

        Args:
            check: engines compare what they load with what was written.
            check_fenced: raises if another trainer took over. Called once more before engines are
                told, since writing may take minutes.

        Raises:
            FencedError: another trainer took over; its record stays.
            SnapshotError: no snapshot could be written for `weights.advanced.timeout_s`.
        """
        timers, start, error = Timers(), time.perf_counter(), ""
        newest = Newest.read(self._paths)
        is_left = newest is not None and (newest.version, newest.folder) == (version, self._left)
        is_needed = version > 0 and not is_left and not _is_ahead(newest, version)
        wanted = is_needed and time.monotonic() >= self._not_before
        if not wanted:
            self._ranks.tell(Rest())
        else:
            try:
                with timers("write"):
                    self._write(version, tensors, check_fenced, check=check)
            except SnapshotError as problem:
                error = self._suspend(problem)
        spent = {name.removeprefix("time/"): each for name, each in timers.seconds.items()}
        return Published(
            version, [], [],
            again=False,
            num_bytes=self._num_bytes,
            pause_seconds=0.0,
            seconds={"total": time.perf_counter() - start} | spent,
            verified=None,
            transport="files" if wanted else None,
            error=error,
            phases=timers.phases,
        )  # fmt: skip

    def has_newcomers(self) -> bool:
        """Whether to retry a failed write; engines come by themselves."""
        return self._lacks_since is not None and time.monotonic() >= self._not_before

    def take_ended_loads(self) -> list[Loaded]:
        """Returns none: engines report their own loads."""
        return []

    def wait_for_loads(self) -> bool:
        """Whether the last policy is still to be written; waits a while first if so."""
        if self._lacks_since is None:
            return False
        time.sleep(max(self._not_before - time.monotonic(), 0.0))
        return True

    def close(self) -> None:
        """Nothing is held."""

    def _write(
        self,
        version: int,
        tensors: Iterator[tuple[str, Tensor]],
        check_fenced: Callable[[], None],
        *,
        check: bool,
    ) -> None:
        digest = Digest() if check else None
        stream = digest.of_all(tensors) if digest else tensors
        # Engines have no other until this one is written. Times of folders do not tell which it is:
        # many file systems know seconds alone, or take the clock of the node.
        newest = Newest.read(self._paths)
        in_use = [newest.folder] if newest else []
        snapshot = self._ranks.write_snapshot(version, stream, in_use=in_use)
        checksums = snapshot.manifest.checksums if check else []
        written = Newest(version, snapshot.folder, checksums, digest.hexdigest() if digest else "")
        self._lacks_since = None
        check_fenced()
        if not _is_ahead(Newest.read(self._paths), version):  # by the trainer before, at its end
            written.write(self._paths)
            self._left = snapshot.folder

    def _suspend(self, problem: SnapshotError) -> str:
        now = time.monotonic()
        self._not_before = now + RETRY_S
        since = self._lacks_since = self._lacks_since or now
        if now - since > self._config.advanced.timeout_s:
            raise problem
        log.error("%s; tried again in %.0f s", problem, RETRY_S)
        return str(problem)


def _is_ahead(newest: Newest | None, version: int) -> bool:
    """Whether engines are offered a snapshot that is newer than `version`."""
    return newest is not None and newest.version > version and exists(newest.folder)
