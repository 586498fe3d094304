"""The work of each part of a run over time, from its events: trainer, reference and engines."""

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from relax_hpc.errors import ConfigError
from relax_hpc.paths import RunPaths
from relax_hpc.telemetry import history, starts
from relax_hpc.telemetry.events import Event, read_events
from relax_hpc.telemetry.progress import duration
from relax_hpc.telemetry.timers import Phase

_STANDSTILL = ("pause", "prepare", "wire", "load", "resume")
"""Parts of a publication in which engines do not sample."""


class Rate(NamedTuple):
    """An engine's work for a while."""

    start: float
    seconds: float
    num_tokens: float
    in_flight: float
    """Requests at the end of it."""


class Timeline(NamedTuple):
    """Steps of a run, and what happened meanwhile; times in seconds since the epoch."""

    name: str
    begin: float
    end: float
    steps: list[Event]
    """The `step` events, in order."""
    phases: dict[str, list[Phase]]
    """Phases by process, first the one whose steps they are."""
    engines: dict[str, list[Rate]]
    """Rates by engine: what all rollout tasks had of it."""
    pauses: dict[str, list[Phase]]
    """Updates of the weights, by engine."""
    start: starts.Start | None = None
    """The start before the first of these steps, if they follow one."""

    @property
    def seconds(self) -> float:
        return self.end - self.begin


class Summary(NamedTuple):
    """A timeline in numbers."""

    first_step: int
    last_step: int
    seconds_per_step: float
    """Mean seconds of a step."""
    phases: dict[str, float]
    """Mean seconds of a step, by phase of the actor; together they are the step."""
    between_s: float
    """Seconds from the first step's begin to the last one's end that are in none of the steps:
    starts, pauses, and what was trained and lost."""
    engines: int
    tokens_per_s: float
    """Tokens per second of all engines, over the whole time."""
    in_flight: float
    """Requests of all engines, on average."""
    updates: int
    paused_s: float
    """Median of an update."""
    paused_share: float
    """Fraction of the time that the engine that stood still for longest did so."""
    start_s: float | None = None
    """Seconds from the start of the tasks to the first step, if that is the first of a start."""
    start: Sequence[starts.Part] = ()

    def to_json(self) -> dict[str, object]:
        return self._asdict() | {"start": [part._asdict() for part in self.start]}


def parse_steps(text: str) -> tuple[int | None, int | None]:
    """First and last step of "FIRST:LAST", "FIRST:", ":LAST" or ":".

    Raises:
        ConfigError: it is none of these.
    """
    first, colon, last = text.partition(":")
    if not colon or any(part and not part.isdecimal() for part in (first, last)):
        raise ConfigError(f"--steps {text}: use FIRST:LAST, e.g. 10:20, 10: or :20")
    return (int(first) if first else None, int(last) if last else None)


def read(run_dir: Path, *, first: int | None = None, last: int | None = None) -> Timeline:
    """The timeline from the beginning of step `first` to the end of step `last`.

    Args:
        first: unset is the first step there is.
        last: unset is the newest.

    Raises:
        ConfigError: nothing was trained yet, or not these steps.
    """
    events = read_events(RunPaths(run_dir).events_folder)
    done = history.steps(events)
    steps = [e for e in done if (first or 0) <= e["step"] and (last is None or e["step"] <= last)]
    if not steps:
        there = f"steps {done[0]['step']} to {done[-1]['step']} are" if done else "no step is"
        raise ConfigError(
            f"{run_dir.name}: no steps from {first or 1} to {last or 'the newest'}; {there} done"
        )
    begin, end = steps[0]["time"] - steps[0]["time/step"], steps[-1]["time"]
    phases, pauses = _phases(events), _pauses(events)
    start = starts.before(steps[0], events, phases, pauses)
    work = {starts.process_of(e) for e in events if e["event"] == "phases" and e.get("step") != 0}
    phases = {name: noted for name, noted in phases.items() if name in work}
    for by_name in (phases, pauses):
        for name, noted in by_name.items():
            by_name[name] = [p for p in noted if p.start < end and p.start + p.seconds > begin]
    loads = history.loads(events)
    rates = _rates([e for e in loads if begin < e["time"] and e["time"] - e["seconds"] < end])
    return Timeline(run_dir.name, begin, end, steps, phases, rates, pauses, start)


def summary(timeline: Timeline) -> Summary:
    names = dict.fromkeys(key for e in timeline.steps for key in e if key.startswith("time/"))
    spent = {
        name.removeprefix("time/"): statistics.fmean(e.get(name, 0.0) for e in timeline.steps)
        for name in names
    }
    rates = [rate for engine in timeline.engines.values() for rate in engine]
    within = [_within(timeline, rate) for rate in rates]
    pauses = {id: sum(_within(timeline, p) for p in each) for id, each in timeline.pauses.items()}
    updates = {(p.start, p.seconds) for noted in timeline.pauses.values() for p in noted}
    return Summary(
        timeline.steps[0]["step"],
        timeline.steps[-1]["step"],
        whole := spent.pop("step"),
        spent,
        max(timeline.seconds - whole * len(timeline.steps), 0.0),
        len(timeline.engines),
        sum(r.num_tokens / r.seconds * s for r, s in zip(rates, within, strict=True) if s)
        / timeline.seconds,
        sum(r.in_flight * s for r, s in zip(rates, within, strict=True)) / timeline.seconds,
        len(updates),
        statistics.median(seconds for _, seconds in updates) if updates else 0.0,
        max(pauses.values(), default=0.0) / timeline.seconds,
        timeline.start.seconds if timeline.start else None,
        starts.parts(timeline.start) if timeline.start else (),
    )


def _within(timeline: Timeline, spent: Rate | Phase) -> float:
    """Seconds of a while that are in the time of the steps; an engine's word may reach beyond."""
    end = min(spent.start + spent.seconds, timeline.end)
    return max(end - max(spent.start, timeline.begin), 0.0)


def text(found: Summary) -> str:
    """Tables of the start and of the phases, and a line on the engines."""
    whole = found.seconds_per_step
    lines = [] if found.start_s is None else starts.text(found.start_s, found.start)
    lines += [
        f"steps {found.first_step} to {found.last_step}: {whole:.2f} s each (means)",
        f"  {'phase':<18}{'s/step':>8}{'share':>8}",
    ]
    lines += [
        f"  {name:<18}{seconds:>8.2f}{seconds / whole:>8.1%}"
        for name, seconds in found.phases.items()
    ]
    if found.between_s >= 1:
        lines.append(
            f"between steps: {duration(found.between_s)} of starts, pauses, and what was lost"
        )
    if found.engines:
        lines.append(
            f"engines: {found.engines}, {found.tokens_per_s:,.0f} tokens/s, "
            f"{found.in_flight:.0f} requests in flight"
        )
    if found.updates:
        lines.append(
            f"updates of weights: {found.updates}, engines paused {1e3 * found.paused_s:.0f} ms "
            f"each, {found.paused_share:.2%} of the time"
        )
    return "\n".join(lines)


def _phases(events: Sequence[Event]) -> dict[str, list[Phase]]:
    """Collects what processes noted of themselves; of a step that was trained again, the newest."""
    newest: dict[str, dict[object, list[Phase]]] = defaultdict(dict)
    for number, event in enumerate(events):
        if event["event"] == "phases":
            name = starts.process_of(event)
            newest[name][event.get("step") or -number] = [Phase(*p) for p in event["phases"]]
    first = {event["role"] for event in events if event["event"] == "step"}
    order = sorted(newest, key=lambda name: (name not in first, name))
    return {name: [p for noted in newest[name].values() for p in noted] for name in order}


def _rates(loads: Sequence[Event]) -> dict[str, list[Rate]]:
    found: dict[str, list[Rate]] = defaultdict(list)
    for load in loads:
        start = load["time"] - load["seconds"]
        rate = Rate(start, load["seconds"], load["num_tokens"], load["in_flight"])
        found[load["id"]].append(rate)
    return {name: found[name] for name in sorted(found)}


def _pauses(events: Sequence[Event]) -> dict[str, list[Phase]]:
    found: dict[str, list[Phase]] = defaultdict(list)
    for event in events:
        if event["event"] not in ("publish", "loaded") or not (pause := _pause(event)):
            continue
        for member in event["members"]:
            found[member].append(pause)
    return found


def _pause(event: Mapping[str, object]) -> Phase | None:
    """Returns the phase from the first call to pause to the last reply to resume; None if there
    is none."""
    noted = event.get("phases")
    assert isinstance(noted, list | None)
    parts = [phase for phase in (Phase(*p) for p in noted or ()) if phase.name in _STANDSTILL]
    if not parts:
        return None
    start = min(phase.start for phase in parts)
    return Phase("update", start, max(p.start + p.seconds for p in parts) - start)
