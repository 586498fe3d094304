"""The rollout role: makes prompt groups, publishes them, and stays within the staleness bound."""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Protocol

import numpy as np

from relax_hpc.bus.credits import Credit, CreditTail
from relax_hpc.bus.durable import Space
from relax_hpc.config.run import RunConfig
from relax_hpc.roles.rollout.episodes import Grouper
from relax_hpc.roles.rollout.evaluation import Evaluator
from relax_hpc.roles.rollout.folders import Folders
from relax_hpc.roles.rollout.pace import Pace
from relax_hpc.roles.rollout.skips import Skips
from relax_hpc.schema import FinishReason, PromptGroup, Trajectory, key_of_medium
from relax_hpc.telemetry.events import EventWriter

POLL_S = 0.05
BREAK_OFF_S = 5.0
"""Time for groups to end that are broken off."""
READY_S = 1.0
"""A finished group waits no longer for others to fill its shard."""


class Engines(Protocol):
    """The engines, as far as they pace this role."""

    async def version(self) -> int | None:
        """The oldest policy that would sample now; None while there is no engine for it."""
        ...


class End(Protocol):
    """The end of the job, if it is announced, and what is kept then."""

    def begin(self, *, start: int) -> None:
        """Takes up what an earlier task has kept of ordinals from `start` on."""
        ...

    def is_near(self) -> bool: ...

    def note(self, version: int | None, *, idle: bool) -> None:
        """Takes whether there is nothing to do with engines that hold `version`."""
        ...

    def keep(self, guids: Collection[int]) -> None:
        """Keeps what there is of some groups; called again and again while the end is near."""
        ...

    def close(self) -> None:
        """Says that the task has nothing more to keep."""
        ...


class NoEnd:
    """An end that nobody announces."""

    def begin(self, *, start: int) -> None: ...
    def is_near(self) -> bool:
        return False

    def note(self, version: int | None, *, idle: bool) -> None: ...
    def keep(self, guids: Collection[int]) -> None: ...
    def close(self) -> None: ...


async def run(
    config: RunConfig,
    engines: Engines,
    group: Grouper,
    evaluator: Evaluator,
    folders: Folders,
    credits: CreditTail,
    events: EventWriter,
    end: End | None = None,
    skips: Skips | None = None,
) -> None:
    """Samples every prompt ordinal this task owns, once, until the trainer says it is finished.

    When the job is about to end it stops sampling, publishes what is finished, and keeps what is
    not for the task that comes after it; if the job goes on, so does the task.

    Nothing is remembered outside the bus: what is committed is done, everything else is owed. So a
    task that is killed anywhere goes on where its log ends, with no prompt skipped or doubled.
    """
    outbox = Outbox(folders, events, config)
    retired = credit.retired_guid_below if (credit := credits.latest()) else 0
    owed, rest = deque[int](), folders.owed(start=retired)
    pace, skips, end = Pace(config), skips or Skips(config, folders), end or NoEnd()
    end.begin(start=retired)
    running = dict[asyncio.Task[PromptGroup], int]()
    while not await _is_over(config, engines, evaluator, credits, running, owed):
        credit, version = credits.latest(), await engines.version()
        evaluator.consider(version, trained=credit.step if credit else 0)
        again = folders.owe_again(credit.owed if credit else ())
        owed.extendleft(reversed(again))
        skips.take_back(again)
        pace.follow(credit or Credit(), skips.unknown_to(credit))
        is_ending = end.is_near()  # from here on the same, whatever is announced meanwhile
        while not (outbox.full or is_ending) and pace.may_start(_first(owed, rest), version):
            guid = owed.popleft()
            running[asyncio.create_task(group(guid, pace.min_version(guid, version)))] = guid
        if is_ending:
            await _break_off(running, owed)
        finished = await _finished(running)
        outbox.add(finished)
        skips.judge(finished)
        folders.collect(credit.retired_guid_below if credit else 0)
        outbox.send(rest=is_ending or pace.is_done(outbox.guids, running.values()))
        if is_ending and not outbox.guids:
            end.keep(owed)
        idle = not (running or outbox.guids or evaluator.is_busy)
        end.note(version, idle=idle)
        skips.note(idle=idle)
    end.close()
    await evaluator.finish(config.schedule.num_steps)


async def _is_over(
    config: RunConfig,
    engines: Engines,
    evaluator: Evaluator,
    credits: CreditTail,
    running: "dict[asyncio.Task[PromptGroup], int]",
    owed: deque[int],
) -> bool:
    """Whether nothing more is to be trained on, and the engines hold what is to be evaluated last.

    In between it waits: for the records to say so, or for a trainer that starts again after the
    last step. One that has lost that step may want what is `running`, and more.
    """
    while (credit := credits.latest()) and credit.finished:
        await _break_off(running, owed)
        if not evaluator.owes_last or await engines.version() == config.schedule.num_steps:
            return True
        await asyncio.sleep(POLL_S)
    return False


def _first(owed: deque[int], rest: Iterator[int]) -> int:
    """The ordinal that is next: of those owed again, or else of the rest."""
    if not owed:
        owed.append(next(rest))
    return owed[0]


class Outbox:
    """Finished groups on their way to the bus. A full file system holds them up; it loses none."""

    def __init__(self, folders: Folders, events: EventWriter, config: RunConfig) -> None:
        self._folders = folders
        self._publish = partial(publish, events=events, masks_errors=config.reward.masks_errors)
        self._groups_per_shard = config.rollout.groups_per_shard
        self._ready: list[PromptGroup] = []
        self._ready_since = 0.0
        self._space = Space()

    @property
    def full(self) -> bool:
        """Whether to start nothing new, because what is finished finds no space."""
        return self._space.full

    @property
    def guids(self) -> list[int]:
        """Numbers of groups that are finished and not published yet."""
        return [group.guid for group in self._ready]

    def add(self, groups: Sequence[PromptGroup]) -> None:
        if groups and not self._ready:
            self._ready_since = time.monotonic()
        self._ready += groups

    def send(self, *, rest: bool) -> None:
        """Publishes what is enough for a shard, or has waited; with `rest`, whatever there is."""
        waited = time.monotonic() - self._ready_since > READY_S
        enough = len(self._ready) >= self._groups_per_shard or rest or waited
        if not self._ready or not enough:
            return
        left = list[PromptGroup]()
        for lot in self._folders.lots(self._ready):
            if not self._space.write(partial(self._publish, self._folders, lot)):
                left += lot
        self._ready = left


def publish(
    folders: Folders,
    groups: Sequence[PromptGroup],
    events: EventWriter,
    *,
    masks_errors: bool = False,
) -> None:
    """Commits finished groups of one folder as one shard and says so.

    Args:
        folders: that take it.
        groups: of one of them.
        events: that tell of it.
        masks_errors: an episode whose reward failed is not in the mean.
    """
    start = time.perf_counter()
    folders.put(groups)
    rows = [row for group in groups for row in group.trajectories]
    rows = [row for row in rows if row.finish is not FinishReason.RETIRED]
    if not rows:
        return
    first = [row for row in rows if not row.segment]
    rewards = [row.reward for row in first if not (masks_errors and row.reward_error)]
    told = {"parts": [row.parts for row in first],
            "rollout": [metrics for group in groups for metrics in group.metrics]}  # fmt: skip
    counts = Counter(f"{area}/{name}" for area in told for each in told[area] for name in each)
    events.emit(
        "shard",
        seconds=round(time.perf_counter() - start, 4),
        first_guid=min(group.guid for group in groups),
        num_groups=len(groups),
        num_episodes=len(first),
        num_trajectories=len(rows),
        num_tokens=sum(len(row.token_ids) for row in rows),
        policy_version_min=min(row.policy_version_min for row in rows),
        policy_version_max=max(row.policy_version_max for row in rows),
        **({"reward/mean": float(np.mean(rewards))} if rewards else {}),
        **means_of("parts", told["parts"]),
        **means_of("rollout", told["rollout"]),
        counts={name: count for name, count in counts.items() if count < len(first)},
        **_of_media(rows),
    )


def _of_media(rows: Sequence[Trajectory]) -> dict[str, float]:
    """`rollout/media/...` of what is committed; nothing of text."""
    known = {key_of_medium(row, at): m.data.size for row in rows for at, m in enumerate(row.media)}
    if not known:
        return {}
    tokens = sum(int(row.media_spans[:, 2].sum()) for row in rows)
    return {
        "rollout/media/number": len(known),
        "rollout/media/bytes": sum(known.values()),
        "rollout/media/tokens": tokens,
    }


def means_of(area: str, episodes: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """`<area>/<name>`: the mean over those episodes that have a number of that name."""
    found: dict[str, list[float]] = {}
    for numbers in episodes:
        for name, value in numbers.items():
            found.setdefault(f"{area}/{name}", []).append(value)
    return {name: float(np.mean(values)) for name, values in found.items()}


async def _break_off(running: "dict[asyncio.Task[PromptGroup], int]", owed: deque[int]) -> None:
    """Ends groups where they are, and owes them again.

    Some may be finished all the same, or are held up by an environment that does not heed its end:
    they stay.
    """
    for each in running:
        each.cancel()
    if running:
        await asyncio.wait(running, timeout=BREAK_OFF_S)
    ended = [each for each in running if each.cancelled()]
    owed.extendleft(sorted((running.pop(each) for each in ended), reverse=True))


async def _finished(running: "dict[asyncio.Task[PromptGroup], int]") -> list[PromptGroup]:
    """Waits briefly for groups to finish; takes those that have, which run no more.

    Raises:
        Exception: what ended one of them.
    """
    if not running:
        await asyncio.sleep(POLL_S)
        return []
    done, _ = await asyncio.wait(running, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
    groups = [task.result() for task in done]
    for task in done:
        del running[task]
    return groups
