"""Prompts that have been solved often enough: which groups of them are not sampled any more.

The order of prompts does not change: the group of a retired prompt is passed over. Whether a group
is follows from the plan's skips of groups a fixed number of guids in front of it, which all have
been judged by then. So a task decides the same before and after any restart, whoever asks when.
"""

import asyncio
from bisect import insort
from collections.abc import Iterable

from relax_hpc.bus.credits import CreditTail
from relax_hpc.bus.follower import PlanTail
from relax_hpc.bus.plan import AnyRecord, SkippedGroup
from relax_hpc.bus.staleness import judging_span
from relax_hpc.config.run import RunConfig
from relax_hpc.paths import BusPaths, RunPaths
from relax_hpc.roles.rollout.episodes import IsRetired

LOOK_EVERY_S = 1.0
"""Time between looks at how far groups are judged, while that is waited for."""


class Retirement:
    """Tells which prompts are retired, by the plan. It reads each record of the plan once.

    Args:
        paths: of the bus.
        times: a prompt is solved before it is retired.
        span: guids that are decided on together, by what is in front of the span before theirs.
    """

    def __init__(self, paths: BusPaths, times: int, span: int) -> None:
        self._span, self._solved = span, Solved(times)
        self._credits = CreditTail(paths, every_s=LOOK_EVERY_S)
        self._plan = PlanTail(paths, CreditTail(paths))
        self._known_below = 0
        self._finding: asyncio.Task[None] | None = None
        """It goes on when who asked is cancelled: a look that is lost would take its records along.
        """

    async def __call__(self, guid: int, row: int) -> bool:
        """Whether the group is passed over; waits until that is decided.

        Raises:
            BusError: the plan is damaged.
        """
        below = (guid // self._span - 1) * self._span
        if below <= 0:
            return False
        while below > self._known_below:
            if self._finding is None or self._finding.done():
                self._finding = asyncio.create_task(self._find())
            await asyncio.shield(self._finding)
        return self._solved.is_retired(row, below)

    async def _find(self) -> None:
        """Returns once the skips of more guids are known."""
        while True:
            credit = self._credits.latest()
            judged = credit.judged_guid_below if credit else 0
            found = None
            if judged > self._known_below:
                found = await asyncio.to_thread(self._plan.look)
            if found is not None:  # else a trainer has just begun
                self._solved.add(record for _, record in found)
                self._known_below = judged
                return
            await asyncio.sleep(LOOK_EVERY_S)


class Solved:
    """How often prompts were solved, and up to where.

    Args:
        times: solved groups that retire a prompt.
    """

    def __init__(self, times: int) -> None:
        self._times = times
        self._guids: dict[int, list[int]] = {}
        """Row of the data -> the lowest guids of groups that solved its prompt, no more than count.
        """

    def add(self, records: Iterable[AnyRecord]) -> None:
        """Takes records of the plan, each once."""
        for group in records:
            if isinstance(group, SkippedGroup) and _is_solved(group):
                guids = self._guids.setdefault(group.prompt, [])
                insort(guids, group.guid)
                del guids[self._times :]

    def is_retired(self, row: int, below: int) -> bool:
        """Whether a row of the data is retired by groups with guids under `below`."""
        guids = self._guids.get(row, [])
        return len(guids) == self._times and guids[-1] < below


def _is_solved(group: SkippedGroup) -> bool:
    """Whether it was sampled, and its prompt solved by it."""
    return group.solved and not (group.retired or group.truncated)


def retirement_of(config: RunConfig, paths: RunPaths) -> IsRetired | None:
    """Returns what a job asks for; None if prompts are never retired."""
    if not config.prompts.retire_after:
        return None
    schedule = config.schedule
    span = judging_span(schedule.prompts_per_step, schedule.max_staleness)
    return Retirement(paths.bus, config.prompts.retire_after, span)
