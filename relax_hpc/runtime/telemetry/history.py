"""Reads a run's history from its events: each step once, held-out scores, announced ends, and the
points of curves.

The axis of curves is the training step; reports of engines and producers between two steps become
one point. Nodes' clocks may differ: events carry a task's own time, and the file server knows when
their file was last written.
"""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from relax_hpc.runtime.telemetry.event_table import EVENTS, tag
from relax_hpc.runtime.telemetry.events import Event, parse, read_newest
from relax_hpc.runtime.telemetry.progress import RECENT, duration
from relax_hpc.runtime.telemetry.timers import Phase


class Heldout(NamedTuple):
    """One evaluation of a held-out set, summed over all rollout ranks."""

    name: str
    when: str
    """"before", "during" or "after"."""
    version: int
    """Oldest policy that sampled a token."""
    time: float
    correct: float
    num_samples: int
    version_max: int = -1
    """Newest one."""
    truncated: float | None = None
    """Part of the samples that a limit cut off; None for older runs."""

    @property
    def reward(self) -> float:
        return self.correct / self.num_samples


def describe_policies(oldest: int, newest: int) -> str:
    return str(oldest) if oldest >= newest else f"{oldest} to {newest}"


def steps(events: Sequence[Event]) -> list[Event]:
    """Returns the newest `step` event of each step up to the present one, in order.

    Steps after the one that training resumed from count once they are trained again.
    """
    newest = {e["step"]: e for e in events if e["event"] == "step"}
    last = present_step(events)
    return [newest[step] for step in sorted(newest) if step <= last]


def present_step(events: Sequence[Event]) -> int:
    """Returns the step trained last, or the one resumed from since; 0 before the first."""
    last = next((e for e in reversed(events) if e["event"] in ("step", "resume")), None)
    return int(last["step"]) if last else 0


def heldout(events: Sequence[Event], *, every_set: bool = False) -> list[Heldout]:
    """Returns evaluations by policy version; a rank's repetition replaces its first try.

    Skips one for which a rank's share is missing: other prompts have other scores.

    Args:
        every_set: all sets instead of the job's first.
    """
    scored = [
        event
        for event in events
        if event["event"] == "eval" and event["correct"] is not None
        if every_set or event["headline"]
    ]
    points = []
    for (name, when, _), by_rank in shares_of(scored).items():
        if count_missing(by_rank):
            continue
        if count := sum(e["num_samples"] for e in by_rank.values()):
            correct = sum(e["correct"] for e in by_rank.values())
            newest = max(e["time"] for e in by_rank.values())
            version = min((v for e in by_rank.values() if (v := e["version"]) >= 0), default=0)
            last = max(e.get("version_max", version) for e in by_rank.values())
            truncated = _share_truncated(list(by_rank.values()))
            points.append(Heldout(name, when, version, newest, correct, count, last, truncated))
    return sorted(points, key=lambda point: (point.version, point.time))


def _share_truncated(shares: Sequence[Event]) -> float | None:
    if any("num_truncated" not in event for event in shares):
        return None
    count = sum(event["num_samples"] + event.get("num_masked", 0) for event in shares)
    return float(sum(event["num_truncated"] for event in shares) / count)


def shares_of(events: Sequence[Event]) -> dict[tuple[str, str, int], dict[int, Event]]:
    """Returns the newest `eval` event of each task by set, `when` and number.

    Skips reports from a different number of tasks, whose shares were different.
    """
    shares = defaultdict[tuple[str, str, int], dict[int, Event]](dict)
    for event in (each for each in events if each["event"] == "eval"):
        by_rank = shares[event["name"], event["when"], event["number"]]
        if any(each.get("tasks", 1) != event.get("tasks", 1) for each in by_rank.values()):
            by_rank.clear()
        by_rank[event["rank"]] = event
    return shares


def count_missing(by_rank: Mapping[int, Event]) -> int:
    """Counts tasks whose share of an evaluation is missing."""
    tasks: int = max(event.get("tasks", 1) for event in by_rank.values())
    return max(tasks - len(by_rank), 0)


def heldout_losses(events: Sequence[Event]) -> list[Event]:
    """Returns the newest `heldout` event of each step, in order."""
    newest = {e["step"]: e for e in events if e["event"] == "heldout"}
    return [newest[step] for step in sorted(newest)]


def loads(events: Sequence[Event]) -> list[Event]:
    return [e for e in events if e["event"] == "load"]


def newest(events: Sequence[Event], event: str) -> Event | None:
    return next((e for e in reversed(events) if e["event"] == event), None)


def numbers(event: Event) -> dict[str, float]:
    """Returns the fields that can be plotted, non-finite ones included."""
    skip = {"time", "rank", "pid", "step"}
    odd = {key: float(said) for key, said in event.get("not_finite", {}).items()}
    known = {k: float(v) for k, v in event.items() if k not in skip and _is_number(v)}
    return known | {k: v for k, v in odd.items() if event[k] is None}


def seconds_per_step(done: Sequence[Event]) -> float | None:
    """Mean seconds of the newest steps, including gaps; None after one step.

    The first step of each start is slower, and does not count.
    """
    recent = _recent(done)
    return statistics.fmean(e["time/step"] for e in recent) if recent else None


def tokens_per_s(done: Sequence[Event]) -> float | None:
    """Tokens of the newest steps divided by their seconds; of the first step if it is the only one.

    A mean of the steps' rates would overweight the tokens of a short step.
    """
    recent = [e for e in _recent(done) or done[-1:] if "num_tokens" in e and e.get("time/step")]
    seconds = sum(e["time/step"] for e in recent)
    return sum(e["num_tokens"] for e in recent) / seconds if recent else None


def _recent(done: Sequence[Event]) -> list[Event]:
    return [e for e in done if e.get("eta_s") is not None][-RECENT:]


def _is_number(value: Any) -> bool:  # noqa: ANN401
    return isinstance(value, int | float) and not isinstance(value, bool)


def longest_save_s(events: Sequence[Event]) -> float | None:
    times = [
        each["wait_s"] + each["background_s"] for each in events if each["event"] == "checkpoint"
    ]
    return max(times, default=None)


WINDOW_S = 600.0
"""The last seconds of an attempt, of which waste is a share."""


class AttemptEnd(NamedTuple):
    """An attempt with an announced end that requested its requeue."""

    attempt: str
    drained_s: float
    """Seconds from the announcement to that request: all was saved, or time ran out."""
    window_s: float
    """The last 10 minutes of the attempt, or all of it."""
    wasted_s: float
    """Lost seconds of these: draining, in which nothing is sampled, and steps that were trained
    again."""


def share_wasted(ends: Sequence[AttemptEnd]) -> float:
    """Returns the lost share of the last minutes before all of these ends; 0 if there are none."""
    window_s = sum(each.window_s for each in ends)
    return sum(each.wasted_s for each in ends) / window_s if window_s else 0.0


def sum_up_ends(
    records: Mapping[str, Mapping[str, Any]], events: Sequence[Event]
) -> list[AttemptEnd]:
    """Sums up the announced ends of a run, in order, without those that were refused.

    Args:
        records: attempt -> record of its end.
        events: of the run, in order of time.
    """
    begun = dict[str, float]()
    for event in events:
        if event["event"] == "start":
            begun.setdefault(str(event.get("attempt")), event["time"])
    asked = {name: each for name, each in records.items() if name in begun and "asked" in each}
    ends = []
    for name, record in sorted(asked.items(), key=lambda item: item[1]["asked"]):
        end, drained_s = record["asked"], record["asked"] - record["time"]
        window_s = max(min(WINDOW_S, end - begun[name]), 0.0)
        lost_s = drained_s + _measure_repeated_s(events, end - window_s, record["time"], end)
        ends.append(AttemptEnd(name, drained_s, window_s, min(lost_s, window_s)))
    return ends


def _measure_repeated_s(events: Sequence[Event], begin: float, until: float, end: float) -> float:
    """Seconds from `begin` to `until` of steps before the end that were trained again after it."""
    steps = [event for event in events if event["event"] == "step"]
    again = {event["step"] for event in steps if event["time"] > end}
    lost = (event for event in steps if event["time"] <= end and event["step"] in again)
    spans = ((max(e["time"] - e.get("time/step", 0.0), begin), min(e["time"], until)) for e in lost)
    return float(sum(max(last - first, 0.0) for first, last in spans))


def attempts(events: Sequence[Event]) -> list[tuple[float, float]]:
    """Returns first and last time of each attempt of the job; events are in order of time."""
    spans = dict[str, tuple[float, float]]()
    attempt = ""
    for event in events:
        if event["event"] == "start":
            attempt = str(event.get("attempt"))
        begun, _ = spans.get(attempt, (event["time"], 0.0))
        spans[attempt] = (begun, event["time"])
    return list(spans.values())


def elapsed_s(spans: Sequence[tuple[float, float]], until: float) -> float:
    """Returns the seconds of attempts before a time; waits in the queue do not count."""
    return sum(max(0.0, min(until, end) - begun) for begun, end in spans)


class Point(NamedTuple):
    tag: str
    step: int
    """Step, or for an evaluation the policy: step b trains policy b."""
    value: float
    time: float
    """Seconds since the epoch."""


class Rewind(NamedTuple):
    """Training continues after this step: all later points are void."""

    step: int


class Points:
    """Turns events into points; a step has each once, unless a rewind lies between."""

    def __init__(self) -> None:
        self.step = 0
        """The newest step, or the one resumed from since."""
        self._drawn = defaultdict[str, set[int]](set)
        self._shares = defaultdict[tuple[str, str, int, int], dict[int, Event]](dict)
        """Shares by evaluation and number of tasks: a score needs the shares of all tasks."""
        self._lasting: list[Point] = []
        """Points that no trainer repeats: scores, and the critic's results for a step."""
        self._critic_step = 0
        self._between: list[Event] = []
        """Events that the next step sums up."""

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
        for name, value in _sum_up(self._between):
            yield Point(name, self.step, value, event["time"])
        self._between.clear()

    def _rewind(self, step: int) -> Iterator[Point | Rewind]:
        self.step = step
        yield Rewind(step)
        for kind, drawn in self._drawn.items():
            self._drawn[kind] = {each for each in drawn if each <= step}
        yield from (point for point in self._lasting if point.step > step)

    def _once(self, kind: str, event: Event) -> Iterator[Point]:
        """Draws the first event of a kind per step: later ones come from engines added later."""
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
        for score in heldout(list(shares.values()), every_set=True):
            for field, value in (("correct", score.reward), ("num_truncated", score.truncated)):
                name = tag("eval", field, name=score.name)
                assert name is not None
                drawn = any((p.tag, p.step) == (name, score.version) for p in self._lasting)
                if value is not None and not drawn:
                    self._lasting.append(Point(name, score.version, value, score.time))
                    yield self._lasting[-1]


def _points(event: Event) -> Iterator[Point]:
    for field, value in numbers(event).items():
        if name := tag(event["event"], field):
            yield Point(name, event["step"], value, event["time"])


def _sum_up(events: Sequence[Event]) -> Iterator[tuple[str, float]]:
    of = {kind: [event for event in events if event["event"] == kind] for kind in EVENTS}
    yield from _of_shards([shard for shard in of["shard"] if shard["num_trajectories"]])
    yield from _of_engines(of["load"])


def _of_shards(shards: Sequence[Event]) -> Iterator[tuple[str, float]]:
    """Means over episodes, of the events that have the field."""
    fields = dict.fromkeys(field for shard in shards for field in shard)
    for field in fields:
        name = tag("shard", field)
        known = [shard for shard in shards if shard.get(field) is not None]
        if name and known:
            weights = [_count(shard, field) for shard in known]
            values = [shard[field] for shard in known]
            yield name, statistics.fmean(values, weights)


def _count(shard: Event, field: str) -> int:
    """Episodes behind a mean; older runs count rows instead."""
    every = shard.get("num_episodes", shard["num_trajectories"])
    return int(shard.get("counts", {}).get(field, every))


def _of_engines(loads: Sequence[Event]) -> Iterator[tuple[str, float]]:
    """Rates and newest states of each engine, summed over all tasks that use it."""
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
    """The part's share of the whole over all tasks; None for older runs."""
    loads = [load for noted in tasks.values() for load in noted]
    of = sum(load.get(whole, 0) for load in loads)
    return sum(load[part] for load in loads if whole in load) / of if of else None


def _rate(loads: Sequence[Event]) -> float:
    seconds = sum(load["seconds"] for load in loads)
    return sum(load["num_tokens"] for load in loads) / seconds if seconds else 0.0


APART_S = 60.0
"""Differences below this many seconds are ignored."""
_HEAD_BYTES = 1 << 14


class _SeenClock(NamedTuple):
    begun: float
    behind: float
    """Seconds that its clock is behind the file server's, as of its last event."""


def find_late_clocks(events_folder: Path) -> dict[str, float]:
    """Finds tasks whose clock differs from most others' in a run, and by how much.

    A copied run has the times of the copy: only differences between its files count, and only if
    tasks that began together say that they did not.

    Returns:
        Task, by the name of its file -> seconds that its clock is behind; negative if ahead.
    """
    seen = {
        path.stem: found
        for path in events_folder.glob("*.jsonl")
        if (found := _look_at_clock(path))
    }
    if len(seen) < 2:
        return {}
    usual = statistics.median_low(each.behind for each in seen.values())
    near = min((each.behind for each in seen.values()), key=abs)
    usual = near if abs(near) < APART_S else usual
    begun = max(each.begun for each in seen.values() if abs(each.behind - usual) < APART_S)
    return {
        name: each.behind - usual
        for name, each in sorted(seen.items())
        if abs(each.behind - usual) >= APART_S
        and abs((each.begun + each.behind - usual) - begun) < abs(each.begun - begun)
    }


def align_clocks(events: Iterable[Event], clocks: Mapping[str, float]) -> list[Event]:
    """Sorts events by time, after correcting differing clocks."""
    moved = [
        _move_event(event, clocks.get(f"{event['role']}-{event['rank']}", 0.0)) for event in events
    ]
    return sorted(moved, key=lambda event: event["time"])


def describe_clocks(clocks: Mapping[str, float]) -> str:
    """Describes the differing clocks in a line."""
    said = [
        f"{name}'s is {duration(abs(by))} {'behind' if by > 0 else 'ahead'}"
        for name, by in clocks.items()
    ]
    return f"differ from the others' and from the file server's: {', '.join(said)}" if said else ""


def _move_event(event: Event, by: float) -> Event:
    if not by:
        return event
    phases = [Phase(*each) for each in event.get("phases") or ()]
    moved = [[each.name, each.start + by, each.seconds] for each in phases]
    return event | {"time": event["time"] + by} | ({"phases": moved} if moved else {})


def _look_at_clock(path: Path) -> _SeenClock | None:
    try:
        with path.open("rb") as file:
            head = parse(file.read(_HEAD_BYTES))
        events, written = read_newest(path), path.stat().st_mtime
    except OSError:
        return None
    if not events:
        return None
    starts = [*head[:1], *(event for event in events if event["event"] == "start")] or events
    # Tasks of an attempt begin together; those that fail in it begin again alone, where they were.
    attempt = starts[-1].get("attempt")
    first = next(event for event in starts if event.get("attempt") == attempt)
    return _SeenClock(first["time"], written - events[-1]["time"])
