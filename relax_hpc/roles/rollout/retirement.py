"""Prompts that have been solved often enough: which groups of them are not sampled any more.

The order of prompts does not change: the group of a retired prompt is passed over. Whether a group
is follows from the plan's skips of groups a fixed number of guids in front of it, which all have
been judged by then. So a task decides the same before and after any restart, whoever asks when.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable

from relax_hpc.bus.credits import CreditTail
from relax_hpc.bus.plan import SkippedGroup, read_chain
from relax_hpc.bus.staleness import judging_span
from relax_hpc.config.run import RunConfig
from relax_hpc.paths import BusPaths, RunPaths
from relax_hpc.roles.rollout.episodes import IsRetired

LOOK_EVERY_S = 1.0
"""Time between looks at how far groups are judged, while that is waited for."""
_KEPT = 3
"""Spans whose retired rows are remembered: groups of two are sampled at a time."""


class Retirement:
    """Tells which prompts are retired, by the plan.

    Args:
        paths: of the bus.
        times: a prompt is solved before it is retired.
        span: guids that are decided on together, by what is in front of the span before theirs.
    """

    def __init__(self, paths: BusPaths, times: int, span: int) -> None:
        self._paths, self._times, self._span = paths, times, span
        self._credits = CreditTail(paths, every_s=LOOK_EVERY_S)
        self._found: dict[int, asyncio.Task[frozenset[int]]] = {}
        """Guids below which skips count -> rows that are retired by them."""

    async def __call__(self, guid: int, row: int) -> bool:
        """Whether the group is passed over; waits until that is decided.

        Raises:
            BusError: the plan is damaged.
        """
        below = (guid // self._span - 1) * self._span
        if below <= 0:
            return False
        if below not in self._found:
            self._found[below] = asyncio.create_task(self._find(below))
            for old in sorted(self._found)[:-_KEPT]:
                if old != below:
                    del self._found[old]
        return row in await asyncio.shield(self._found[below])

    async def _find(self, below: int) -> frozenset[int]:
        while (credit := self._credits.latest()) is None or credit.judged_guid_below < below:
            await asyncio.sleep(LOOK_EVERY_S)
        chain = await asyncio.to_thread(read_chain, self._paths)
        return retired_rows(chain.skipped, below, self._times)


def retired_rows(skipped: Iterable[SkippedGroup], below: int, times: int) -> frozenset[int]:
    """Returns the rows of the data whose prompts are retired.

    Args:
        skipped: of the plan.
        below: guids that count.
        times: solved groups that retire a prompt.
    """
    solved = Counter(
        group.prompt
        for group in skipped
        if group.guid < below and group.solved and not (group.retired or group.truncated)
    )
    return frozenset(row for row, count in solved.items() if count >= times)


def retirement_of(config: RunConfig, paths: RunPaths) -> IsRetired | None:
    """Returns what a job asks for; None if prompts are never retired."""
    if not config.prompts.retire_after:
        return None
    schedule = config.schedule
    span = judging_span(schedule.prompts_per_step, schedule.max_staleness)
    return Retirement(paths.bus, config.prompts.retire_after, span)
