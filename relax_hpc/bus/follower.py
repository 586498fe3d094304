"""The plan as it grows, for who trains on the same batches as the one that makes it."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from relax_hpc.bus.credits import CreditTail
from relax_hpc.bus.frames import decode
from relax_hpc.bus.plan import (
    AnyRecord,
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


class PlanFollower:
    """Gives batch after batch, each once its last portion is planned, and never one that is not.

    A record counts if, after it was read, the credits show no trainer newer than the one whose log
    it stands in: every trainer writes a credit before it reads the plan that it continues, so that
    one still to come finds this record there and keeps it.

    Args:
        paths: of the bus.
        credits: of the trainer; every look of theirs is fresh.
        position: behind the last batch that is not to be given again; None begins with step 1.
    """

    def __init__(
        self, paths: BusPaths, credits: CreditTail, position: PlanPosition | None = None
    ) -> None:
        self._paths, self._credits = paths, credits
        self._position = position or PlanPosition(0, 0, 0)
        self._fence = self._records = self._end = 0
        self._log: GrowingFile | None = None
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
        if self._log:
            self._log.close()

    def _look(self) -> None:
        self._credits.latest()
        if self._credits.plan_fence != self._fence and not self._follow(self._credits.plan_fence):
            return
        if self._log is None:
            return
        records, size = decode(self._log.read_from(self._end), self._log.path, self._end)
        if not self._is_newest():
            return  # a newer trainer may cut off what was read
        is_header = self._end == 0 and bool(records)
        self._end += size
        self._count([parse(record) for record in records[is_header:]])

    def _follow(self, fence: int) -> bool:
        """Takes up the log of a trainer, if it has told how much of the plan it keeps."""
        chain = read_chain(self._paths, whole=False)
        if chain.fence != fence or not self._is_newest():
            return False
        chain.check(self._position)
        in_front = chain.base.fence == fence
        self.close()
        self._log = GrowingFile(self._paths.plan_log(fence))
        self._fence, self._end = fence, chain.base.end if in_front else 0
        self._records, self._portions = chain.base.records, []
        self._ready.clear()
        self._count([each.record for each in chain.records if each.fence != fence])
        return True

    def _is_newest(self) -> bool:
        fence = self._credits.plan_fence
        self._credits.latest()
        return self._credits.plan_fence == fence

    def _count(self, records: Sequence[AnyRecord]) -> None:
        for record in records:
            self._records += 1
            if not isinstance(record, PlanRecord):
                continue
            self._portions.append(record)
            if record.last:
                found, self._portions = self._portions, []
                if record.step > self._position.step:
                    position = PlanPosition(self._fence, self._records, record.step)
                    self._ready.append((_batch_of(found), position))


def _batch_of(portions: Sequence[PlanRecord]) -> PlannedBatch:
    sidecars = {uuid: roles for each in portions for uuid, roles in each.sidecars.items()}
    parts = [part for each in portions for part in each.parts]
    return PlannedBatch(portions[0].step, parts, sidecars)
