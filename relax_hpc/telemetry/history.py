"""A run's events, step by step, counted once however often a step was repeated."""

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from relax_hpc.telemetry.events import Event
from relax_hpc.telemetry.pace import RECENT


class Heldout(NamedTuple):
    """One evaluation of a held-out set, added up over all rollout ranks."""

    name: str
    """Name of the held-out set."""
    when: str
    """"before", "during" or "after"."""
    version: int
    """Oldest policy that sampled a token."""
    time: float
    correct: float
    num_samples: int

    @property
    def reward(self) -> float:
        return self.correct / self.num_samples


def steps(events: Sequence[Event]) -> list[Event]:
    """The newest `step` event of each step up to the present one, in order.

    Steps behind the one that training was resumed from count once they are trained again.
    """
    newest = {e["step"]: e for e in events if e["event"] == "step"}
    last = present_step(events)
    return [newest[step] for step in sorted(newest) if step <= last]


def present_step(events: Sequence[Event]) -> int:
    """The step that was trained last, or that the trainer has resumed from since; 0 before one."""
    last = next((e for e in reversed(events) if e["event"] in ("step", "resume")), None)
    return int(last["step"]) if last else 0


def heldout(events: Sequence[Event], *, every_set: bool = False) -> list[Heldout]:
    """Evaluations in order of the policy version; a rank's repetition replaces its first try.

    One of which a rank has not told its share yet is left out: other prompts have other scores.

    Args:
        every_set: or those of the job's first set only.
    """
    scored = [
        event
        for event in events
        if event["event"] == "eval" and event["correct"] is not None
        if every_set or event["headline"]
    ]
    points = []
    for (name, when, _), by_rank in shares_of(scored).items():
        if untold(by_rank):
            continue
        if count := sum(e["num_samples"] for e in by_rank.values()):
            correct = sum(e["correct"] for e in by_rank.values())
            newest = max(e["time"] for e in by_rank.values())
            version = min((v for e in by_rank.values() if (v := e["version"]) >= 0), default=0)
            points.append(Heldout(name, when, version, newest, correct, count))
    return sorted(points, key=lambda point: (point.version, point.time))


def shares_of(events: Sequence[Event]) -> dict[tuple[str, str, int], dict[int, Event]]:
    """The newest `eval` event of each task by set, `when` and number.

    What was told of one when there were more or fewer tasks is left out: they had other shares.
    """
    shares = defaultdict[tuple[str, str, int], dict[int, Event]](dict)
    for event in (each for each in events if each["event"] == "eval"):
        by_rank = shares[event["name"], event["when"], event["number"]]
        if any(each.get("tasks", 1) != event.get("tasks", 1) for each in by_rank.values()):
            by_rank.clear()
        by_rank[event["rank"]] = event
    return shares


def untold(by_rank: Mapping[int, Event]) -> int:
    """Tasks that have not told their share of an evaluation, by the `eval` events of the others."""
    tasks: int = max(event.get("tasks", 1) for event in by_rank.values())
    return max(tasks - len(by_rank), 0)


def heldout_losses(events: Sequence[Event]) -> list[Event]:
    """The newest `heldout` event of each step, in order."""
    newest = {e["step"]: e for e in events if e["event"] == "heldout"}
    return [newest[step] for step in sorted(newest)]


def loads(events: Sequence[Event]) -> list[Event]:
    """Returns the loads of the engines, in order of time."""
    return [e for e in events if e["event"] == "load"]


def newest(events: Sequence[Event], event: str) -> Event | None:
    return next((e for e in reversed(events) if e["event"] == event), None)


def numbers(event: Event) -> dict[str, float]:
    """The fields that can be plotted; those that were not finite, too."""
    skip = {"time", "rank", "pid", "step"}
    odd = {key: float(said) for key, said in event.get("not_finite", {}).items()}
    known = {k: float(v) for k, v in event.items() if k not in skip and _is_number(v)}
    return known | {k: v for k, v in odd.items() if event[k] is None}


def seconds_per_step(done: Sequence[Event]) -> float | None:
    """Mean seconds of the newest steps, whatever was between them; None after one step.

    The first of each start is not like the others, and does not count.
    """
    recent = _recent(done)
    return statistics.fmean(e["time/step"] for e in recent) if recent else None


def tokens_per_s(done: Sequence[Event]) -> float | None:
    """Tokens of the newest steps by the seconds of these; of the first step if it is the only one.

    A mean of the steps' rates would count the tokens of a short step for more.
    """
    recent = [e for e in _recent(done) or done[-1:] if "num_tokens" in e and e.get("time/step")]
    seconds = sum(e["time/step"] for e in recent)
    return sum(e["num_tokens"] for e in recent) / seconds if recent else None


def _recent(done: Sequence[Event]) -> list[Event]:
    return [e for e in done if e.get("eta_s") is not None][-RECENT:]


def _is_number(value: Any) -> bool:  # noqa: ANN401
    return isinstance(value, int | float) and not isinstance(value, bool)


def longest_save_s(events: Sequence[Event]) -> float | None:
    """Seconds of the longest save of a run; None if there was none."""
    times = [
        each["wait_s"] + each["background_s"] for each in events if each["event"] == "checkpoint"
    ]
    return max(times, default=None)
