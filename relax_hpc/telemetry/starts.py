"""The start of a run, or of one that goes on: from its tasks' beginning to its first step."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from relax_hpc.telemetry.events import Event
from relax_hpc.telemetry.timers import Phase

_WAITS = ("wait", "read", "publish", "lease")
"""Phases of a step in which nothing of it is computed yet."""
_MOST_ENGINES = 4
"""If there are more, a table has only the one that was healthy last."""
_REST, _SHORTEST_S = "other", 0.05
"""Name of what the trainer has not noted; if it is shorter it is not told."""


class Start(NamedTuple):
    """The work of each part before the first step; times in seconds since the epoch."""

    trainer: str
    begin: float
    """The first of the tasks began."""
    end: float
    """The first step began to compute: until then it waits for a batch."""
    phases: dict[str, list[Phase]]
    """Phases by process, the trainer's first."""
    engines: dict[str, list[Phase]]
    """By engine: starts of its process, each until it was healthy, and updates of its weights."""

    @property
    def seconds(self) -> float:
        return self.end - self.begin


class Part(NamedTuple):
    """A line of the table of a start."""

    who: str
    what: str
    after_s: float
    """Seconds from the beginning of the tasks to its own."""
    seconds: float


def before(
    step: Event,
    events: Sequence[Event],
    phases: Mapping[str, list[Phase]],
    pauses: Mapping[str, list[Phase]],
) -> Start | None:
    """Returns the start that led to a step; None if the trainer had trained another one since.

    Args:
        step: of the trainer.
        events: of the run, in order of time.
        phases: by process, of the whole run.
        pauses: updates of weights by engine, likewise.
    """
    steps = [e["time"] for e in events if e["event"] == "step" and e["time"] < step["time"]]
    earlier = max(steps, default=0.0)
    tasks = [e for e in events if e["event"] == "start" and earlier < e["time"] < step["time"]]
    trainers = [e for e in tasks if (e["role"], e["rank"]) == (step["role"], step["rank"])]
    if not trainers:
        return None
    own = [e for e in tasks if e.get("attempt") == trainers[-1].get("attempt")]
    begin, end = own[0]["time"], _first_work(step, phases.get(step["role"], ()))
    noted = {name: [*_within(begin, end, each)] for name, each in phases.items()}
    for name, found in [*_imports(own, events), *_first_publication(step, events)]:
        noted[name] = [*_within(begin, end, [found]), *noted.get(name, ())]
    engines = {
        e["id"]: [*_within(begin, end, [_life(e), *pauses.get(e["id"], ())])]
        for e in events
        if e["event"] == "engine"
    }
    return Start(
        step["role"],
        begin,
        end,
        _slowest_rollout({name: sorted(p, key=_start_of) for name, p in noted.items() if p}),
        {id: found for id, found in sorted(engines.items()) if found},
    )


def parts(start: Start) -> list[Part]:
    """The table of a start: what each process did, and the engines that were healthy last."""
    found = [
        Part(name, each.name, each.start - start.begin, each.seconds)
        for name, phases in start.phases.items()
        for each in _merged(phases)
    ]
    own = [part for part in found if part.who == start.trainer]
    rest = start.seconds - sum(part.seconds for part in own)
    if rest >= _SHORTEST_S:
        found.insert(len(own), Part(start.trainer, _REST, 0.0, rest))
    shown = list(start.engines)
    if len(shown) > _MOST_ENGINES:
        shown = [max(shown, key=lambda id: _healthy_at(start.engines[id]))]
    of = f" (last of {len(start.engines)})" * (len(start.engines) > len(shown))
    found += [
        Part(f"engine {id}{of}", each.name, each.start - start.begin, each.seconds)
        for id in shown
        for each in _merged(start.engines[id])
    ]
    return found


def text(seconds: float, found: Sequence[Part]) -> list[str]:
    """Lines of a table of parts, which go on beside each other."""
    width = max((len(part.who) for part in found), default=0)
    return [
        f"seconds from the start of the tasks to the first step: {seconds:.1f}; of them",
        f"  {'part':<{width}}  {'phase':<12}{'after':>8}{'s':>8}",
        *(
            f"  {part.who:<{width}}  {part.what:<12}{_after(part):>8}{part.seconds:>8.1f}"
            for part in found
        ),
    ]


def _after(part: Part) -> str:
    return "" if part.what == _REST else f"{part.after_s:.1f}"


def _first_work(step: Event, phases: Sequence[Phase]) -> float:
    """Returns when a step began to compute, or, if it has not noted that, when it began."""
    begin: float = step["time"] - step["time/step"]
    work = [p.start for p in phases if p.name not in _WAITS and begin <= p.start < step["time"]]
    return min(work, default=begin)


def _imports(starts: Sequence[Event], events: Sequence[Event]) -> Iterator[tuple[str, Phase]]:
    """Yields, of tasks that noted their start, the time before the first thing in it."""
    for start in starts:
        who = (start["role"], start["rank"])
        noted = (
            Phase(*phase)
            for e in events
            if e["event"] == "phases" and e.get("step") == 0 and (e["role"], e["rank"]) == who
            for phase in e["phases"]
        )
        if first := next((phase for phase in noted if phase.start >= start["time"]), None):
            yield process_of(start), Phase("import", start["time"], first.start - start["time"])


def _first_publication(step: Event, events: Sequence[Event]) -> Iterator[tuple[str, Phase]]:
    """Publications before the first step are in none of its phases."""
    begin = step["time"] - step["time/step"]
    for event in events:
        if event["event"] == "publish" and event["time"] <= begin and event.get("phases"):
            noted = [Phase(*phase) for phase in event["phases"]]
            first = min(phase.start for phase in noted)
            last = max(phase.start + phase.seconds for phase in noted)
            yield step["role"], Phase("publish", first, last - first)


def process_of(event: Event) -> str:
    """Names the process of an event: its role, and the rank if it is another than 0."""
    return event["role"] if event["rank"] == 0 else f"{event['role']} {event['rank']}"


def _life(event: Event) -> Phase:
    return Phase("start", event["time"] - event["start_s"], event["start_s"])


def _within(begin: float, end: float, phases: Sequence[Phase]) -> Iterator[Phase]:
    """The parts of phases that are between two times."""
    for phase in phases:
        first, last = max(phase.start, begin), min(phase.start + phase.seconds, end)
        if first < last:
            yield Phase(phase.name, first, last - first)


def _merged(phases: Sequence[Phase]) -> list[Phase]:
    """One phase per name, with the seconds of all."""
    found: dict[str, Phase] = {}
    for phase in phases:
        first = found.get(phase.name, phase._replace(seconds=0.0))
        found[phase.name] = first._replace(seconds=first.seconds + phase.seconds)
    return list(found.values())


def _slowest_rollout(phases: dict[str, list[Phase]]) -> dict[str, list[Phase]]:
    """Leaves out all rollout tasks but the one that was ready last: they all do the same."""
    tasks = [name for name in phases if name.split()[0] == "rollout"]
    last = max(tasks, key=lambda name: _end_of(phases[name]), default=None)
    return {name: found for name, found in phases.items() if name not in tasks or name == last}


def _start_of(phase: Phase) -> float:
    return phase.start


def _end_of(phases: Sequence[Phase]) -> float:
    return max(phase.start + phase.seconds for phase in phases)


def _healthy_at(phases: Sequence[Phase]) -> float:
    return max((p.start + p.seconds for p in phases if p.name == "start"), default=0.0)
