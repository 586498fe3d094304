"""Announced ends of a job: how long each took, and what of its last minutes was of no use."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from relax_hpc.telemetry.events import Event

WINDOW_S = 600.0
"""The last seconds of an attempt, of which waste is a share."""


class End(NamedTuple):
    """An attempt whose end was announced, and that asked for its requeue."""

    attempt: str
    drained_s: float
    """Seconds from the announcement to that request: all was saved, or there was no more time."""
    window_s: float
    """Seconds that are looked at: the last 10 minutes of the attempt, or all of it."""
    wasted_s: float
    """Seconds of these that came to nothing: those of draining, in which nothing is sampled, and
    those of steps that were trained again."""


def share_wasted(ends: Sequence[End]) -> float:
    """Returns the wasted part of the last minutes before all of these ends; 0 of none."""
    window_s = sum(each.window_s for each in ends)
    return sum(each.wasted_s for each in ends) / window_s if window_s else 0.0


def announced(records: Mapping[str, Mapping[str, Any]], events: Sequence[Event]) -> list[End]:
    """Sums up the announced ends of a run, in order; those that were refused are left out.

    Args:
        records: attempt -> what was said of its end.
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
        lost_s = drained_s + _trained_again_s(events, end - window_s, record["time"], end)
        ends.append(End(name, drained_s, window_s, min(lost_s, window_s)))
    return ends


def _trained_again_s(events: Sequence[Event], begin: float, until: float, end: float) -> float:
    """Seconds from `begin` to `until` of steps up to the end that were trained again after it."""
    steps = [event for event in events if event["event"] == "step"]
    again = {event["step"] for event in steps if event["time"] > end}
    lost = (event for event in steps if event["time"] <= end and event["step"] in again)
    spans = ((max(e["time"] - e.get("time/step", 0.0), begin), min(e["time"], until)) for e in lost)
    return float(sum(max(last - first, 0.0) for first, last in spans))
