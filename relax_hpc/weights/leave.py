"""Policy v is left in the run directory, for engines that come for it: nobody is waited for."""

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from torch import Tensor

from relax_hpc.comm.bucket import BucketPlan, Digest
from relax_hpc.config.rollout import WeightsConfig
from relax_hpc.errors import SnapshotError
from relax_hpc.paths import RunPaths
from relax_hpc.storage import exists
from relax_hpc.telemetry.timers import Timers
from relax_hpc.weights.loads import Loaded
from relax_hpc.weights.newest import Newest
from relax_hpc.weights.publish import RETRY_S, Published
from relax_hpc.weights.ranks import Rest, TrainerRanks

log = logging.getLogger(__name__)


class SnapshotPublisher:
    """Lives in rank 0 of a trainer whose engines may be absent; see `publish.Publisher`."""

    def __init__(
        self, config: WeightsConfig, paths: RunPaths, plan: BucketPlan, ranks: TrainerRanks
    ) -> None:
        """Writes nothing yet.

        Args:
            config: deadlines.
            paths: of the run.
            plan: of all tensors of the policy.
            ranks: of the trainer.
        """
        self._config, self._paths, self._ranks = config, paths, ranks
        self._num_bytes = sum(plan.sizes)
        self._left: Path | None = None
        """The newest snapshot that this trainer has left."""
        self._lacks_since: float | None = None
        """Time since which a version could not be written."""
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

        Policy 0 is the model that engines begin with. A trainer that was restarted is behind the
        newest snapshot until it has made that policy again: running requests must not get older
        tokens than they have.

        Args:
            version: of the policy.
            tensors: all of its weights.
            check: engines are to compare what they load with what was written.
            check_fenced: raises if another trainer took over; asked once more before engines are
                told, since the writing may take minutes.

        Raises:
            FencedError: another trainer took over; the record is as that one left it.
            SnapshotError: none could be written for `weights.timeout_s`.
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
        """Whether what could not be written is to be tried again; engines come by themselves."""
        return self._lacks_since is not None and time.monotonic() >= self._not_before

    def ended_loads(self) -> list[Loaded]:
        """None: who loads says so."""
        return []

    def wait_for_loads(self) -> bool:
        """Whether the last policy is still to be written, after a while in which it could not."""
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
        if now - since > self._config.timeout_s:
            raise problem
        log.error("%s; tried again in %.0f s", problem, RETRY_S)
        return str(problem)


def _is_ahead(newest: Newest | None, version: int) -> bool:
    """Whether there is a snapshot for engines that is newer than a version."""
    return newest is not None and newest.version > version and exists(newest.folder)
