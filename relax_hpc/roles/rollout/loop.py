"""Runs rollout: samples prompt groups and publishes them, within the staleness bound.

`Pace.wait_reason` says why it starts no further group now; `_is_over` adds last_evaluation. Groups
under way wait in `skips` (a prompt may be retired), `episodes` (media, environment, reward) and
`inference.pool` (engines that are full, too old, or rest; siblings for their prompt's prefix;
suspect requests, one at a time). docs/explanation/architecture.md lists all waits with what shows
each.
"""

import asyncio
import time
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from relax_hpc.bus.credits import Credit, CreditTail
from relax_hpc.bus.durable import Space
from relax_hpc.config.run import RunConfig
from relax_hpc.inference.pool_client import PoolClient
from relax_hpc.roles.rollout.episodes import Grouper
from relax_hpc.roles.rollout.folders import Folders
from relax_hpc.roles.rollout.heldout import Evaluator
from relax_hpc.roles.rollout.pace import Early, Pace, WaitReason
from relax_hpc.roles.rollout.skips import TaskSkips
from relax_hpc.roles.rollout.unfinished import AnnouncedEnd
from relax_hpc.runtime import heartbeat
from relax_hpc.runtime.telemetry.events import EventWriter
from relax_hpc.schema import FinishReason, PromptGroup, Trajectory, key_of_medium


class WaitTimes:
    """Notes what the task waits for: for `status`, and in a `waits` event per step."""

    def __init__(self, events: EventWriter, counts: Counter[str] | None = None) -> None:
        """`counts`: what else to tell of a step; cleared then."""
        self._events, self._counts = events, Counter[str]() if counts is None else counts
        self._now, self._since, self._step = "sampling", time.monotonic(), -1
        self._seconds = defaultdict[str, float](float)

    def note(self, reason: WaitReason, *, step: int, is_sampling: bool) -> None:
        """Takes why no further group is started, the last step that is trained, and whether any
        group is under way; cheap to call."""
        heartbeat.say(f"sampling (next: {reason})" if is_sampling else f"waits ({reason})")
        now = time.monotonic()
        self._seconds[f"time/{self._now}"] += now - self._since
        self._now, self._since = "sampling" if is_sampling else reason, now
        if step != self._step:
            if self._step >= 0:
                self._events.emit("waits", step=self._step + 1, **self._seconds, **self._counts)
            self._seconds.clear()
            self._counts.clear()
            self._step = step


POLL_S = 0.05
BREAK_OFF_S = 5.0
"""Time for cancelled groups to end."""
READY_S = 1.0
"""Longest wait of a finished group for others to fill its shard."""


async def run(
    config: RunConfig,
    engines: PoolClient,
    group: Grouper,
    evaluator: Evaluator,
    folders: Folders,
    credits: CreditTail,
    events: EventWriter,
    end: AnnouncedEnd,
    skips: TaskSkips,
) -> None:
    """Samples every guid of this task, once, until the trainer has finished.

    When the job is about to end it stops sampling, publishes finished groups, and keeps the others
    for its successor. If the job continues, so does the task.

    Nothing is remembered outside the bus: committed groups are done, all others are owed. So a
    killed task continues where its log ends, with no prompt skipped or doubled.
    """
    outbox = Outbox(folders, events, config)
    retired = credit.retired_guid_below if (credit := credits.latest()) else 0
    owed, rest = deque[int](), folders.list_owed(start=retired)
    end.begin(start=retired)
    pace, running = Pace(config), dict[asyncio.Task[PromptGroup], int]()
    early = Early(config, pace, skips)
    waits = WaitTimes(events, early.counts)
    while not await _is_over(config, engines, evaluator, credits, running, owed, waits):
        credit, version = credits.latest(), await engines.version()
        step = credit.step if credit else 0
        evaluator.consider(version, trained=step)
        _owe_again(owed, folders.owe_again(credit.owed if credit else ()), skips)
        pace.follow(credit or Credit(), skips.unknown_to(credit))
        is_ending = end.is_near()  # from here on the same, whatever is announced meanwhile
        why = partial(pace.wait_reason, is_ending=is_ending, disk_full=outbox.full)
        while (reason := why(guid := _first(owed, rest), version)) is None or early.take(
            guid, running.values(), why=reason, version=version, step=step
        ):
            owed.popleft()
            running[asyncio.create_task(group(guid, pace.min_version(guid, version)))] = guid
        if is_ending:
            await _break_off(running, owed)
            early.drop(owed)
        else:
            surplus = early.find_surplus(running.values(), why=reason, version=version, step=step)
            await _sample_again(surplus, running, owed, early, skips)
        waits.note(reason, step=step, is_sampling=bool(running))
        finished = await _take_finished(running)
        outbox.add(early.pass_on(finished, credit))
        folders.collect(credit.retired_guid_below if credit else 0)
        outbox.send(rest=is_ending or pace.is_done(outbox.guids, running.values()))
        if is_ending and not outbox.guids:
            end.keep(owed, early.held)
        idle = not (running or outbox.guids or evaluator.is_busy)
        end.note(version, idle=idle)
        skips.note(idle=idle)
    end.close()
    await evaluator.finish(config.schedule.num_steps)


async def _is_over(
    config: RunConfig,
    engines: PoolClient,
    evaluator: Evaluator,
    credits: CreditTail,
    running: "dict[asyncio.Task[PromptGroup], int]",
    owed: deque[int],
    waits: WaitTimes,
) -> bool:
    """Whether training is over, and the engines hold the policy of the last evaluation.

    Until then it waits for the records to say so, or for a trainer that restarts after the last
    step. A trainer that has lost that step may need the `running` groups, and more.
    """
    while (credit := credits.latest()) and credit.finished:
        waits.note("last_evaluation", step=credit.step, is_sampling=False)
        await _break_off(running, owed)
        if not evaluator.owes_last or await engines.version() == config.schedule.num_steps:
            return True
        await asyncio.sleep(POLL_S)
    return False


def _first(owed: deque[int], rest: Iterator[int]) -> int:
    """Returns the next guid: one to sample again, or else of the rest."""
    if not owed:
        owed.append(next(rest))
    return owed[0]


class Outbox:
    """Finished groups on their way to the bus. A full file system delays them but loses none."""

    def __init__(self, folders: Folders, events: EventWriter, config: RunConfig) -> None:
        self._folders = folders
        self._publish = partial(publish, events=events, masks_errors=config.reward.masks_errors)
        self._groups_per_shard = config.rollout.advanced.groups_per_shard
        self._ready: list[PromptGroup] = []
        self._ready_since = 0.0
        self._space = Space()

    @property
    def full(self) -> bool:
        """Whether to start no new groups, because finished ones find no space."""
        return self._space.full

    @property
    def guids(self) -> list[int]:
        return [group.guid for group in self._ready]

    def add(self, groups: Sequence[PromptGroup]) -> None:
        if groups and not self._ready:
            self._ready_since = time.monotonic()
        self._ready += groups

    def send(self, *, rest: bool) -> None:
        """Publishes full shards and groups that have waited; with `rest`, all."""
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
    """Commits finished groups of one folder as one shard, and logs it.

    Args:
        masks_errors: whether the mean excludes episodes with a failed reward.
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
    """Returns `rollout/media/...` of committed rows; nothing for text."""
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
    """Returns `<area>/<name>`: the mean over the episodes with a number of that name."""
    found: dict[str, list[float]] = {}
    for numbers in episodes:
        for name, value in numbers.items():
            found.setdefault(f"{area}/{name}", []).append(value)
    return {name: float(np.mean(values)) for name, values in found.items()}


async def _break_off(
    running: "dict[asyncio.Task[PromptGroup], int]",
    owed: deque[int],
    guids: Collection[int] | None = None,
) -> None:
    """Cancels groups, and owes them again.

    Some may finish all the same, or hang in an environment that ignores cancellation: they stay.

    Args:
        guids: the groups to cancel; None: all.
    """
    chosen = [each for each, guid in running.items() if guids is None or guid in guids]
    for each in chosen:
        each.cancel()
    if chosen:
        await asyncio.wait(chosen, timeout=BREAK_OFF_S)
    _owe(owed, [running.pop(each) for each in chosen if each.cancelled()])


async def _sample_again(
    surplus: Sequence[int],
    running: "dict[asyncio.Task[PromptGroup], int]",
    owed: deque[int],
    early: Early,
    skips: TaskSkips,
) -> None:
    await _break_off(running, owed, surplus)
    left = [guid for guid in surplus if guid not in running.values()]
    _owe_again(owed, left, skips)
    early.drop(left)


def _owe_again(owed: deque[int], guids: Sequence[int], skips: TaskSkips) -> None:
    _owe(owed, guids)
    skips.take_back(guids)


def _owe(owed: deque[int], guids: Iterable[int]) -> None:
    """Adds guids to sample again, in their order: a later one may have to wait for an earlier."""
    if fresh := set(guids):
        whole = sorted(fresh.union(owed))
        owed.clear()
        owed.extend(whole)


async def _take_finished(running: "dict[asyncio.Task[PromptGroup], int]") -> list[PromptGroup]:
    """Waits briefly for groups to finish; removes and returns the finished ones.

    Raises:
        Exception: the error of a group.
    """
    if not running:
        await asyncio.sleep(POLL_S)
        return []
    done, _ = await asyncio.wait(running, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
    groups = [task.result() for task in done]
    for task in done:
        del running[task]
    return groups
