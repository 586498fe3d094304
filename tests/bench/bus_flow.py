"""Producers, metadata server, sequencer and trainer as a flow, with back-pressure and outages.

Time goes in ticks; trajectories go in cohorts that know when, and by which policy, they were begun.
What `bus_simulation` says about a single moment becomes here what a run loses by it.
"""

from collections import defaultdict, deque
from collections.abc import Iterator
from typing import NamedTuple

from bus_simulation import COST, Load, Site, per_shard, sequencer

TICK_S = 0.1


class Flow(NamedTuple):
    """The course of a run."""

    steps: int
    ideal_steps: int
    """With a bus that costs nothing."""
    idle: float
    """Fraction of the time that the trainer waited."""
    median_age_s: float
    """Age of a trajectory when it is trained on."""
    max_staleness: int
    outstanding: float
    """Most trajectories that were begun and not yet trained on, in batches."""
    paused: float
    """Fraction of the time that the producers had nothing that they may begin."""


class Outage(NamedTuple):
    """The metadata server, or the sequencer, stands still."""

    what: str
    start_s: float
    end_s: float

    def holds(self, what: str, now: float) -> bool:
        return self.what == what and self.start_s <= now < self.end_s


class _Cohort(NamedTuple):
    ready_s: float
    begun_s: float
    batch: int
    """Which batch it belongs to: fixed when it is begun, as `over_age = wait` has it."""
    policy: int
    size: float


def run(
    load: Load,
    site: Site,
    *,
    step_s: float = 60.0,
    duration_s: float = 1800.0,
    max_staleness: int = 2,
    outage: Outage | None = None,
) -> Flow:
    """Simulates a run whose producers make exactly one batch per step."""
    bus = _Bus(load, site, step_s, max_staleness)
    for tick in range(int(duration_s / TICK_S)):
        now = tick * TICK_S
        bus.sample(now)
        if outage is None or not outage.holds("metadata server", now):
            bus.publish(now)
        if outage is None or not outage.holds("sequencer", now):
            bus.plan(now)
        bus.train(now)
    return bus.result(duration_s)


class _Bus:
    """The state between two ticks."""

    def __init__(self, load: Load, site: Site, step_s: float, max_staleness: int) -> None:
        self._rate = load.producers * load.trajectories_per_s
        self._batch = self._rate * step_s
        self._step_s, self._max_staleness = step_s, max_staleness
        units = sum(COST[name] * count for name, count in per_shard(load).items())
        rows = load.trajectories_per_s * load.seconds_per_shard
        self._published_per_s = site.capacity / units * rows
        self._admitted_per_s = self._rate / sequencer(load, site).busy
        self._sweep_s = sequencer(load._replace(seconds_per_shard=1e9), site).delay_s
        self._shard_wait_s = load.seconds_per_shard / 2
        self._open, self._durable, self._committed = (deque[_Cohort]() for _ in range(3))
        self._ready: dict[int, list[_Cohort]] = {}
        self._ready_size: defaultdict[int, float] = defaultdict(float)
        self._begun = self._trained = 0.0
        self._policy, self._training_until = 0, 0.0
        self._idle = self._paused = self._most = 0.0
        self._ages: list[tuple[float, float]] = []
        self._stalest = 0

    def sample(self, now: float) -> None:
        """Begins what the staleness rule allows: batch b while b - 1 - policy <= the bound."""
        allowed = (self._policy + self._max_staleness + 1) * self._batch
        size = min(self._rate * TICK_S, allowed - self._begun)
        if size > self._rate * TICK_S / 2:
            batch = int((self._begun + size / 2) // self._batch) + 1
            ready_s = now + self._shard_wait_s
            self._open.append(_Cohort(ready_s, now, batch, self._policy, size))
            self._begun += size
        else:
            self._paused += TICK_S
        self._most = max(self._most, (self._begun - self._trained) / self._batch)

    def publish(self, now: float) -> None:
        while self._open and self._open[0].ready_s <= now:
            self._durable.append(self._open.popleft())
        for cohort in _take(self._durable, self._published_per_s * TICK_S, now):
            self._committed.append(cohort._replace(ready_s=now + self._sweep_s))

    def plan(self, now: float) -> None:
        for cohort in _take(self._committed, self._admitted_per_s * TICK_S, now):
            self._ready.setdefault(cohort.batch, []).append(cohort)
            self._ready_size[cohort.batch] += cohort.size

    def train(self, now: float) -> None:
        if now < self._training_until:
            return
        if self._training_until:
            self._policy, self._training_until = self._policy + 1, 0.0
        step = self._policy + 1
        if self._ready_size[step] < self._batch * (1 - 1e-6):
            self._idle += TICK_S
            return
        batch = self._ready.pop(step)
        self._ages += [(now - cohort.begun_s, cohort.size) for cohort in batch]
        self._stalest = max(self._stalest, *(step - 1 - cohort.policy for cohort in batch))
        self._trained += self._batch
        self._training_until = now + self._step_s

    def result(self, duration_s: float) -> Flow:
        return Flow(
            steps=self._policy + (1 if self._training_until else 0),
            ideal_steps=int(duration_s / self._step_s),
            idle=self._idle / duration_s,
            median_age_s=_median(self._ages),
            max_staleness=self._stalest,
            outstanding=self._most,
            paused=self._paused / duration_s,
        )


def _take(queue: deque[_Cohort], amount: float, now: float) -> Iterator[_Cohort]:
    """The first `amount` of what is ready; the last cohort is cut."""
    while queue and amount > 0 and queue[0].ready_s <= now:
        cohort = queue.popleft()
        taken = min(cohort.size, amount)
        amount -= taken
        if taken < cohort.size:
            queue.appendleft(cohort._replace(size=cohort.size - taken))
        yield cohort._replace(size=taken)


def _median(weighted: list[tuple[float, float]]) -> float:
    """Returns the median of (value, weight); nan if there are none."""
    half, below = sum(weight for _, weight in weighted) / 2, 0.0
    for value, weight in sorted(weighted):
        below += weight
        if below >= half:
            return value
    return float("nan")
