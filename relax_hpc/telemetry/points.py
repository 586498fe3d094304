"""Points of curves, made of the events as they come: what TensorBoard and other boards show.

All are over the steps of training; what engines and producers say between two steps is one point.
"""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from relax_hpc.telemetry import history
from relax_hpc.telemetry.event_names import tag
from relax_hpc.telemetry.event_table import EVENTS
from relax_hpc.telemetry.events import Event


class Point(NamedTuple):
    """A point of a curve."""

    tag: str
    step: int
    """Step, or of an evaluation the policy: that of step b is b."""
    value: float
    time: float
    """Seconds since the epoch."""


class Rewind(NamedTuple):
    """Training goes on after this step: all points after it are void."""

    step: int


class Points:
    """Turns events into points; a step has each once, unless a rewind is between."""

    def __init__(self) -> None:
        self.step = 0
        """The newest one, or the one that was resumed from since."""
        self._drawn = defaultdict[str, set[int]](set)
        self._shares = defaultdict[tuple[str, str, int, int], dict[int, Event]](dict)
        """Shares by evaluation and number of tasks: a score is said once all have told theirs."""
        self._lasting: list[Point] = []
        """Points that no trainer makes again: scores, and what the critic learned of a step."""
        self._critic_step = 0
        self._between: list[Event] = []
        """Events of the kinds that are summed up at the next step."""

    def take(self, events: Iterable[Event]) -> Iterator[Point | Rewind]:
        """Args:
        events: that were not taken before, each file's in order.
        """
        for event in events:
            match event["event"]:
                case "step":
                    yield from self._step(event)
                case "resume" if event["rank"] == 0 and event["step"] < self.step:
                    yield from self._rewind(event["step"])
                case "publish" | "loaded" if event["members"]:
                    yield from self._once("publish", event)
                case "checkpoint" | "heldout" as kind:
                    yield from self._once(kind, event)
                case "eval":
                    yield from self._score(event)
                case "critic_step" if event["step"] > self._critic_step:  # others repeat it
                    self._critic_step = event["step"]
                    points = list(_points(event))
                    self._lasting += points
                    yield from points
                case "load" | "shard":
                    self._between.append(event)

    def _step(self, event: Event) -> Iterator[Point | Rewind]:
        if event["step"] <= self.step:  # again, and from no checkpoint
            yield from self._rewind(event["step"] - 1)
        self.step = event["step"]
        yield from _points(event)
        for name, value in _summed_up(self._between):
            yield Point(name, self.step, value, event["time"])
        self._between.clear()

    def _rewind(self, step: int) -> Iterator[Point | Rewind]:
        self.step = step
        yield Rewind(step)
        for kind, drawn in self._drawn.items():
            self._drawn[kind] = {each for each in drawn if each <= step}
        yield from (point for point in self._lasting if point.step > step)

    def _once(self, kind: str, event: Event) -> Iterator[Point]:
        """Draws the first of a kind of each step: others are of engines that came later."""
        if event["step"] not in self._drawn[kind]:
            self._drawn[kind].add(event["step"])
            yield from _points(event)

    def _score(self, event: Event) -> Iterator[Point]:
        tasks = event.get("tasks", 1)
        shares = self._shares[event["name"], event["when"], event["number"], tasks]
        if len(shares) == tasks:  # a task that was started again repeats its own
            return
        shares[event["rank"]] = event
        if len(shares) < tasks:
            return
        for score in history.heldout(list(shares.values()), every_set=True):
            name = tag("eval", "correct", name=score.name)
            assert name is not None
            if all((point.tag, point.step) != (name, score.version) for point in self._lasting):
                self._lasting.append(Point(name, score.version, score.reward, score.time))
                yield self._lasting[-1]


def _points(event: Event) -> Iterator[Point]:
    for field, value in history.numbers(event).items():
        if name := tag(event["event"], field):
            yield Point(name, event["step"], value, event["time"])


def _summed_up(events: Sequence[Event]) -> Iterator[tuple[str, float]]:
    of = {kind: [event for event in events if event["event"] == kind] for kind in EVENTS}
    yield from _of_shards([shard for shard in of["shard"] if shard["num_trajectories"]])
    yield from _of_engines(of["load"])


def _of_shards(shards: Sequence[Event]) -> Iterator[tuple[str, float]]:
    """The means over their episodes, of those that have the field."""
    fields = dict.fromkeys(field for shard in shards for field in shard)
    for field in fields:
        name = tag("shard", field)
        known = [shard for shard in shards if shard.get(field) is not None]
        if name and known:
            weights = [_count(shard, field) for shard in known]
            values = [shard[field] for shard in known]
            yield name, statistics.fmean(values, weights)


def _count(shard: Event, field: str) -> int:
    """Episodes that a mean is of; of runs of before that do not say, rows."""
    every = shard.get("num_episodes", shard["num_trajectories"])
    return int(shard.get("counts", {}).get(field, every))


def _of_engines(loads: Sequence[Event]) -> Iterator[tuple[str, float]]:
    """Rates and newest states of each engine, over all tasks that ask it."""
    engines = defaultdict[str, dict[int, list[Event]]](lambda: defaultdict(list))
    for load in loads:
        engines[load["id"]][load["rank"]].append(load)
    for id, tasks in sorted(engines.items()):
        newest = [noted[-1] for noted in tasks.values()]
        caches = [load["kv_used"] for load in newest if load["kv_used"] is not None]
        numbers = {
            "num_tokens": sum(_rate(noted) for noted in tasks.values()),
            "num_cached": _share(tasks, "num_cached", "num_given"),
            "num_media_cached": _share(tasks, "num_media_cached", "num_media"),
            "in_flight": sum(load["in_flight"] for load in newest),
            "kv_used": caches[-1] if caches else None,
        }
        for field, value in numbers.items():
            if value is not None and (name := tag("load", field, id=id)):
                yield name, value


def _share(tasks: Mapping[int, Sequence[Event]], part: str, whole: str) -> float | None:
    """Part of the whole over all tasks; runs of before that do not say have none."""
    loads = [load for noted in tasks.values() for load in noted]
    of = sum(load.get(whole, 0) for load in loads)
    return sum(load[part] for load in loads if whole in load) / of if of else None


def _rate(loads: Sequence[Event]) -> float:
    seconds = sum(load["seconds"] for load in loads)
    return sum(load["num_tokens"] for load in loads) / seconds if seconds else 0.0
