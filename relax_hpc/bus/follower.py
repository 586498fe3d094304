"""The plan as it grows, for who trains on the same batches as the one that makes it."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from relax_hpc.bus.credits import CreditTail
from relax_hpc.bus.frames import decode
from relax_hpc.bus.plan import (
    AnyRecord,
    Chain,
    Part,
    PlanPosition,
    PlanRecord,
    Sidecar,
    parse,
    read_chain,
)
from relax_hpc.bus.tail import GrowingFile
from relax_hpc.paths import BusPaths
from relax_hpc.schema import Role


class PlannedBatch(NamedTuple):
    """All of a step, however many portions it was planned in; rows count in their order."""

    step: int
    parts: list[Part]
    sidecars: dict[str, dict[Role, Sidecar]]


class PlanTail:
    """Gives the records of the plan as they come, each once, and none that is not valid.

    A record counts if, after it was read, the credits show no trainer newer than the one whose log
    it stands in: every trainer writes a credit before it reads the plan that it continues, so that
    one still to come finds this record there and keeps it.

    Args:
        paths: of the bus.
        credits: of the trainer; every look of theirs is fresh.
        num_records: of the plan that are not given.
        check: is told of the plan whenever another trainer goes on with it.
    """

    def __init__(
        self,
        paths: BusPaths,
        credits: CreditTail,
        *,
        num_records: int = 0,
        check: Callable[[Chain], None] = lambda _: None,
    ) -> None:
        self._paths, self._credits, self._check = paths, credits, check
        self.fence = 0
        """Fence of the trainer whose log is read."""
        self._end, self._num_read, self._num_given = 0, 0, num_records
        self._log: GrowingFile | None = None
        self._fresh: list[tuple[int, AnyRecord]] = []

    def look(self) -> list[tuple[int, AnyRecord]] | None:
        """The records that came since it was last asked, each with its number, from 1.

        None while the newest trainer has not told how much of the plan it keeps.

        Raises:
            BusError: the plan is damaged, or `check` does not agree to it.
        """
        self._credits.latest()
        if self._credits.plan_fence != self.fence and not self._follow(self._credits.plan_fence):
            return None
        if self._log is None:
            return None
        records, size = decode(self._log.read_from(self._end), self._log.path, self._end)
        if not self._is_newest():
            return None  # a newer trainer may cut off what was read
        is_header = self._end == 0 and bool(records)
        self._end += size
        self._count([parse(record) for record in records[is_header:]])
        found, self._fresh = self._fresh, []
        return found

    def close(self) -> None:
        if self._log:
            self._log.close()

    def _follow(self, fence: int) -> bool:
        """Takes up the log of a trainer, if it has told how much of the plan it keeps."""
        chain = read_chain(self._paths, whole=False)
        if chain.fence != fence or not self._is_newest():
            return False
        self._check(chain)
        if chain.base.records > self._num_given:  # some are summed up that were not given
            chain = read_chain(self._paths, below=fence + 1)
        in_front = chain.base.fence == fence
        self.close()
        self._log = GrowingFile(self._paths.plan_log(fence))
        self.fence, self._end = fence, chain.base.end if in_front else 0
        self._num_read = chain.base.records
        self._count([each.record for each in chain.records if each.fence != fence])
        return True

    def _is_newest(self) -> bool:
        fence = self._credits.plan_fence
        self._credits.latest()
        return self._credits.plan_fence == fence

    def _count(self, records: Sequence[AnyRecord]) -> None:
        """Takes the next records of the plan; some may have been given."""
        for number, record in enumerate(records, self._num_read + 1):
            if number > self._num_given:
                self._fresh.append((number, record))
        self._num_read += len(records)
        self._num_given = max(self._num_read, self._num_given)


class PlanFollower:
    """Gives batch after batch, each once its last portion is planned, and never one that is not.

    Args:
        paths: of the bus.
        credits: of the trainer; every look of theirs is fresh.
        position: behind the last batch that is not to be given again; None begins with step 1.
    """

    def __init__(
        self, paths: BusPaths, credits: CreditTail, position: PlanPosition | None = None
    ) -> None:
        self._position = position or PlanPosition(0, 0, 0)
        self._tail = PlanTail(
            paths,
            credits,
            num_records=self._position.records,
            check=lambda chain: chain.check(self._position),
        )
        self._portions: list[PlanRecord] = []
        self._ready: deque[tuple[PlannedBatch, PlanPosition]] = deque()

    @property
    def position(self) -> PlanPosition:
        """The end of the batch that was given last."""
        return self._position

    def next_batch(self) -> PlannedBatch | None:
        """The batch of the step behind the last one given; None while it is not planned.

        Raises:
            BusError: the plan is damaged, or `position` is not on it.
        """
        if not self._ready:
            self._look()
        if not self._ready:
            return None
        batch, self._position = self._ready.popleft()
        return batch

    def close(self) -> None:
        self._tail.close()

    def _look(self) -> None:
        for number, record in self._tail.look() or ():
            if not isinstance(record, PlanRecord):
                continue
            self._portions.append(record)
            if record.last:
                position = PlanPosition(self._tail.fence, number, record.step)
                self._ready.append((_batch_of(self._portions), position))
                self._portions = []


def _batch_of(portions: Sequence[PlanRecord]) -> PlannedBatch:
    sidecars = {uuid: roles for each in portions for uuid, roles in each.sidecars.items()}
    parts = [part for each in portions for part in each.parts]
    return PlannedBatch(portions[0].step, parts, sidecars)
