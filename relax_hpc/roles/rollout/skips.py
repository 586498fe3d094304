"""Tracks groups that no batch will have before the trainer knows it, and retires solved prompts.

Tasks apply the trainer's skip rule themselves, so replacements are sampled at once, even while the
trainer is busy or, with separate sides, absent. Then idle tasks exchange their skips.

Retirement does not change the order of prompts: a retired prompt's group is passed over. It follows
from the plan's skips of groups a fixed number of guids before it, all judged by then. So a task
decides the same before and after any restart.
"""

import asyncio
import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from relax_hpc.algorithms.groups import Refill
from relax_hpc.bus.credits import Credit, CreditTail
from relax_hpc.bus.plan import AnyRecord, PlanTail, SkippedGroup
from relax_hpc.bus.reader import BatchIndex
from relax_hpc.bus.staleness import judging_span
from relax_hpc.config.run import RunConfig
from relax_hpc.roles.dealing.portions import judge_of, most_skipped
from relax_hpc.roles.rollout.episodes import IsRetired
from relax_hpc.roles.rollout.folders import Folders
from relax_hpc.runtime.files.records import RecordCache, read_json, write_json
from relax_hpc.runtime.paths import BusPaths, RunPaths
from relax_hpc.schema import PromptGroup

RECENT_BATCHES = 3
PRIOR = 8
"""Groups that are taken to have taught something before the first."""
MOST_SHARE = 0.8
EXCHANGE_EVERY_S = 1.0
CREDITS_EVERY_S = 1.0
"""Interval of polling credits: shards to delete, groups to sample again, the end. Pacing follows
the engine."""
REFILLED_EVERY_S = 0.2
"""The same if groups are refilled: a replacement waits for the credits."""


def credits_of(config: RunConfig, paths: RunPaths) -> CreditTail:
    return CreditTail(paths.bus, num_steps=config.num_steps, every_s=credits_every_s(config))


def credits_every_s(config: RunConfig) -> float:
    return REFILLED_EVERY_S if isinstance(config.algorithm.groups, Refill) else CREDITS_EVERY_S


class GroupSkip(NamedTuple):
    """A committed group that teaches nothing."""

    guid: int
    producer: int
    """Index in the header of the bus."""
    seq: int
    """Sequence number of its shard."""


SkipExchange = Callable[[Sequence[GroupSkip]], Sequence[GroupSkip]]
"""Publishes this task's skips to the other tasks of a run; returns theirs."""


class TaskSkips:
    """The groups of this task that teach nothing, until the trainer knows of them.

    Args:
        exchange: used while the task is idle; None: there are no other tasks, or the trainer is
            there to report their skips.
    """

    def __init__(
        self, config: RunConfig, folders: Folders, exchange: SkipExchange | None = None
    ) -> None:
        self._judge, self._most, self._folders = judge_of(config), most_skipped(config), folders
        self._exchange = None if self._judge is None else exchange
        self._guids = set[int]()
        self._others: Sequence[GroupSkip] = ()
        in_batch = config.schedule.prompts_per_step // config.rollout_pool.num_hosts
        self._recent = deque[bool](maxlen=max(RECENT_BATCHES * in_batch, PRIOR))
        """Whether groups were skipped, the newest last."""

    def judge(self, groups: Sequence[PromptGroup]) -> None:
        if self._judge is None or not groups:
            return
        verdicts = self._judge(BatchIndex.of([row for each in groups for row in each.trajectories]))
        for group, verdict in zip(groups, verdicts, strict=True):
            if not verdict.teaches:
                self._guids.add(group.guid)
            if not verdict.retired:  # these cost no time
                self._recent.append(not verdict.teaches)

    @property
    def share(self) -> float:
        """Returns the share of groups that will probably be skipped, by those of late."""
        return min(sum(self._recent) / (len(self._recent) + PRIOR), MOST_SHARE)

    def has(self, guid: int) -> bool:
        return guid in self._guids

    def take_back(self, guids: Iterable[int]) -> None:
        self._guids.difference_update(guids)

    def note(self, *, idle: bool) -> None:
        """Takes whether the task is idle; cheap to call."""
        if idle and self._exchange is not None:
            own = map(self._of, sorted(self._guids))
            self._others = self._exchange([skip for skip in own if skip is not None])

    def unknown_to(self, credit: Credit | None) -> list[int]:
        """Returns the guids that the trainer did not know when it wrote the credit, rising.

        At most as many as may be skipped for one step: ending such a run is up to the trainer.

        Args:
            credit: the newest; None before the first trainer has started.
        """
        if credit is not None and not credit.seen:
            return []  # whether it knows cannot be told
        others = self._others
        if credit is not None:
            place = self._folders.place_of
            self._guids = {guid for guid in self._guids if not credit.covers(guid, place(guid))}
            others = [s for s in others if not credit.covers(s.guid, (s.producer, s.seq))]
        return sorted(self._guids | {skip.guid for skip in others})[: self._most]

    def _of(self, guid: int) -> GroupSkip | None:
        place = self._folders.place_of(guid)
        return None if place is None else GroupSkip(guid, *place)


class SkipBoard:
    """The records of all tasks in the run directory, polled at intervals."""

    def __init__(self, paths: RunPaths, number: int, size: int) -> None:
        self._record = paths.skips(number)
        self._names = [paths.skips(n).name for n in range(size) if n != number]
        self._read = RecordCache(paths.control, lambda name: read_json(paths.control / name) or {})
        self._told, self._found = list[GroupSkip](), list[GroupSkip]()
        self._next_look = 0.0

    def __call__(self, own: Sequence[GroupSkip]) -> Sequence[GroupSkip]:
        """Implements `SkipExchange`; each call replaces the task's record."""
        if time.monotonic() < self._next_look:
            return self._found
        self._next_look = time.monotonic() + EXCHANGE_EVERY_S
        if own != self._told:
            write_json(self._record, {"skips": own})
            self._told = list(own)
        records = self._read.get(*self._names)
        self._found = [GroupSkip(*skip) for record in records for skip in record.get("skips", ())]
        return self._found


def exchange_of(config: RunConfig, paths: RunPaths, number: int, size: int) -> SkipBoard | None:
    """Returns the exchange of a task, if the trainer may be absent and there are other tasks."""
    return (
        SkipBoard(paths, number, size) if config.launch.layout == "separate" and size > 1 else None
    )


LOOK_EVERY_S = 1.0
"""Interval of polls while waiting for judged groups."""


class Retirement:
    """Finds retired prompts from the plan; reads each record of the plan once.

    Args:
        span: guids that are decided together, by the skips before the previous span.
    """

    def __init__(self, paths: BusPaths, times: int, span: int) -> None:
        self._span, self._solved = span, Solved(times)
        self._credits = CreditTail(paths, every_s=LOOK_EVERY_S)
        self._plan = PlanTail(paths, CreditTail(paths))
        self._known_below = 0
        self._finding: asyncio.Task[None] | None = None
        """Continues when a caller is cancelled: a lost read would lose its records."""

    async def __call__(self, guid: int, row: int) -> bool:
        """Whether to pass over the group; waits until that is decided.

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
        """Reads the plan until the skips of more guids are known."""
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
    """Counts how often prompts were solved, and up to which guid."""

    def __init__(self, times: int) -> None:
        self._times = times
        self._guids: dict[int, list[int]] = {}
        """Row of the data -> the lowest guids of groups that solved its prompt, at most `times`."""

    def add(self, records: Iterable[AnyRecord]) -> None:
        for group in records:
            if isinstance(group, SkippedGroup) and _is_solved(group):
                guids = self._guids.setdefault(group.prompt, [])
                insort(guids, group.guid)
                del guids[self._times :]

    def is_retired(self, row: int, below: int) -> bool:
        """Whether a row of the data is retired by groups with guids below `below`."""
        guids = self._guids.get(row, [])
        return len(guids) == self._times and guids[-1] < below


def _is_solved(group: SkippedGroup) -> bool:
    return group.solved and not (group.retired or group.truncated)


def retirement_of(config: RunConfig, paths: RunPaths) -> IsRetired | None:
    """Returns the rule of the job; None if prompts are never retired."""
    if not config.prompts.retire_after:
        return None
    schedule = config.schedule
    span = judging_span(schedule.prompts_per_step, schedule.max_staleness)
    return Retirement(paths.bus, config.prompts.retire_after, span)
