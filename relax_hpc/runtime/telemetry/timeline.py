"""Computes from the events what trainer, reference and engines did over time, starts included, and
draws it: who worked, who waited, and the engines' tokens per second."""

import itertools
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from relax_hpc.errors import ConfigError
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.runtime.telemetry import history, picture
from relax_hpc.runtime.telemetry.events import Event, read_events
from relax_hpc.runtime.telemetry.progress import duration, short
from relax_hpc.runtime.telemetry.timers import Phase

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WAITS = ("wait", "read", "publish", "lease")
"""Phases of a step before its computation."""
_MOST_ENGINES = 4
"""Beyond this many, a table shows only the engine that was healthy last."""
_REST, _SHORTEST_S = "other", 0.05
"""Name of the trainer's unnoted time, and the least that is shown."""


class Start(NamedTuple):
    """The work of each part before the first step; times in seconds since the epoch."""

    trainer: str
    begin: float
    """When the first task began."""
    end: float
    """When the first step began to compute: until then it waits for a batch."""
    phases: dict[str, list[Phase]]
    """Phases by process, the trainer's first."""
    engines: dict[str, list[Phase]]
    """By engine: process starts, each until healthy, and weight updates."""

    @property
    def seconds(self) -> float:
        return self.end - self.begin


class TimelineEntry(NamedTuple):
    """A line of the table of a start."""

    who: str
    what: str
    after_s: float
    """Seconds after the start of the tasks."""
    seconds: float


def before(
    step: Event,
    events: Sequence[Event],
    phases: Mapping[str, list[Phase]],
    pauses: Mapping[str, list[Phase]],
) -> Start | None:
    """Returns the start that led to a step; None if the trainer has trained another step since.

    Args:
        events: of the run, in order of time.
        phases: by process, of the whole run.
        pauses: weight updates by engine, of the whole run.
    """
    steps = [e["time"] for e in events if e["event"] == "step" and e["time"] < step["time"]]
    earlier = max(steps, default=0.0)
    tasks = [e for e in events if e["event"] == "start" and earlier < e["time"] < step["time"]]
    trainers = [e for e in tasks if (e["role"], e["rank"]) == (step["role"], step["rank"])]
    if not trainers:
        return None
    own = [e for e in tasks if e.get("attempt") == trainers[-1].get("attempt")]
    begin, end = own[0]["time"], _first_work(step, phases.get(step["role"], ()))
    noted = {name: [*_clip(begin, end, each)] for name, each in phases.items()}
    for name, found in [*_imports(own, events), *_first_publication(step, events)]:
        noted[name] = [*_clip(begin, end, [found]), *noted.get(name, ())]
    engines = {
        e["id"]: [*_clip(begin, end, [_life(e), *pauses.get(e["id"], ())])]
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


def parts(start: Start) -> list[TimelineEntry]:
    """Builds the table of a start: what each process did, and the last engines to be healthy."""
    found = [
        TimelineEntry(name, each.name, each.start - start.begin, each.seconds)
        for name, phases in start.phases.items()
        for each in _merge(phases)
    ]
    own = [part for part in found if part.who == start.trainer]
    rest = start.seconds - sum(part.seconds for part in own)
    if rest >= _SHORTEST_S:
        found.insert(len(own), TimelineEntry(start.trainer, _REST, 0.0, rest))
    shown = list(start.engines)
    if len(shown) > _MOST_ENGINES:
        shown = [max(shown, key=lambda id: _healthy_at(start.engines[id]))]
    of = f" (last of {len(start.engines)})" * (len(start.engines) > len(shown))
    found += [
        TimelineEntry(f"engine {id}{of}", each.name, each.start - start.begin, each.seconds)
        for id in shown
        for each in _merge(start.engines[id])
    ]
    return found


def start_text(seconds: float, found: Sequence[TimelineEntry]) -> list[str]:
    """Formats a table of parts."""
    width = max((len(part.who) for part in found), default=0)
    return [
        f"seconds from the start of the tasks to the first step: {seconds:.1f}; of them",
        f"  {'part':<{width}}  {'phase':<12}{'after':>8}{'s':>8}",
        *(
            f"  {part.who:<{width}}  {part.what:<12}{_after(part):>8}{part.seconds:>8.1f}"
            for part in found
        ),
    ]


def _after(part: TimelineEntry) -> str:
    return "" if part.what == _REST else f"{part.after_s:.1f}"


def _first_work(step: Event, phases: Sequence[Phase]) -> float:
    """Returns when a step began to compute, or, if unknown, when it began."""
    begin: float = step["time"] - step["time/step"]
    work = [p.start for p in phases if p.name not in _WAITS and begin <= p.start < step["time"]]
    return min(work, default=begin)


def _imports(starts: Sequence[Event], events: Sequence[Event]) -> Iterator[tuple[str, Phase]]:
    """Yields the import time of tasks: from their start to their first noted phase."""
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
    """Publications before the first step belong to none of its phases."""
    begin = step["time"] - step["time/step"]
    for event in events:
        if event["event"] == "publish" and event["time"] <= begin and event.get("phases"):
            noted = [Phase(*phase) for phase in event["phases"]]
            first = min(phase.start for phase in noted)
            last = max(phase.start + phase.seconds for phase in noted)
            yield step["role"], Phase("publish", first, last - first)


def process_of(event: Event) -> str:
    """Names the process of an event: its role, and the rank unless it is 0."""
    return event["role"] if event["rank"] == 0 else f"{event['role']} {event['rank']}"


def _life(event: Event) -> Phase:
    return Phase("start", event["time"] - event["start_s"], event["start_s"])


def _clip(begin: float, end: float, phases: Sequence[Phase]) -> Iterator[Phase]:
    """Clips phases to an interval."""
    for phase in phases:
        first, last = max(phase.start, begin), min(phase.start + phase.seconds, end)
        if first < last:
            yield Phase(phase.name, first, last - first)


def _merge(phases: Sequence[Phase]) -> list[Phase]:
    found: dict[str, Phase] = {}
    for phase in phases:
        first = found.get(phase.name, phase._replace(seconds=0.0))
        found[phase.name] = first._replace(seconds=first.seconds + phase.seconds)
    return list(found.values())


def _slowest_rollout(phases: dict[str, list[Phase]]) -> dict[str, list[Phase]]:
    """Keeps only the rollout task that was ready last: they all do the same."""
    tasks = [name for name in phases if name.split()[0] == "rollout"]
    last = max(tasks, key=lambda name: _end_of(phases[name]), default=None)
    return {name: found for name, found in phases.items() if name not in tasks or name == last}


def _start_of(phase: Phase) -> float:
    return phase.start


def _end_of(phases: Sequence[Phase]) -> float:
    return max(phase.start + phase.seconds for phase in phases)


def _healthy_at(phases: Sequence[Phase]) -> float:
    return max((p.start + p.seconds for p in phases if p.name == "start"), default=0.0)


HELD_OUT = "held-out"
"""Name of the row of evaluations."""


class SetCost(NamedTuple):
    """The mean cost of an evaluation of a held-out set."""

    evaluations: int
    seconds: float
    num_tokens: float


_STANDSTILL = ("pause", "prepare", "wire", "load", "resume")
"""Parts of a publication in which engines do not sample."""


class Rate(NamedTuple):
    """An engine's work during an interval."""

    start: float
    seconds: float
    num_tokens: float
    in_flight: float
    """Requests at the end of the interval."""


class Timeline(NamedTuple):
    """Steps of a run, and concurrent work; times in seconds since the epoch."""

    name: str
    begin: float
    end: float
    steps: list[Event]
    phases: dict[str, list[Phase]]
    """Phases by process, first the one whose steps they are."""
    engines: dict[str, list[Rate]]
    """Rates by engine, summed over all rollout tasks."""
    pauses: dict[str, list[Phase]]
    """Weight updates by engine."""
    waits: list[Event]
    """Events of these steps that say why rollout waited."""
    start: Start | None = None
    """The start before the first of these steps, if any."""
    clocks: Mapping[str, float] = MappingProxyType({})
    """Tasks whose clocks differ -> seconds that these are behind; their times are corrected."""
    evaluations: Mapping[str, SetCost] = MappingProxyType({})
    """By held-out set; those that are a phase of `HELD_OUT`."""

    @property
    def seconds(self) -> float:
        return self.end - self.begin


class Summary(NamedTuple):
    first_step: int
    last_step: int
    seconds_per_step: float
    phases: dict[str, float]
    """Mean seconds per step, by phase of the actor; they add up to the step."""
    between_s: float
    """Seconds between the first step's begin and the last one's end outside all steps: starts,
    pauses, and lost training."""
    engines: int
    tokens_per_s: float
    """Tokens per second of all engines over the whole time."""
    in_flight: float
    """Mean number of requests of all engines."""
    updates: int
    paused_s: float
    """Median seconds of an update."""
    paused_share: float
    """Share of the time that the engine with the longest pauses was paused."""
    rollout: dict[str, float]
    """Mean seconds per step of a rollout task, by what it did or waited for."""
    start_s: float | None = None
    """Seconds from the start of the tasks to the first step, if a start precedes it."""
    start: Sequence[TimelineEntry] = ()
    clocks: Mapping[str, float] = MappingProxyType({})
    """Tasks whose clocks differ -> seconds that these are behind."""
    evaluations: Mapping[str, SetCost] = MappingProxyType({})

    def to_json(self) -> dict[str, object]:
        return self._asdict() | {
            "start": [part._asdict() for part in self.start],
            "clocks": dict(self.clocks),
            "evaluations": {name: cost._asdict() for name, cost in self.evaluations.items()},
        }


def parse_steps(text: str) -> tuple[int | None, int | None]:
    """Parses "FIRST:LAST", "FIRST:", ":LAST" or ":".

    Raises:
        ConfigError: it is none of these.
    """
    first, colon, last = text.partition(":")
    if not colon or any(part and not part.isdecimal() for part in (first, last)):
        raise ConfigError(f"--steps {text}: use FIRST:LAST, e.g. 10:20, 10: or :20")
    return (int(first) if first else None, int(last) if last else None)


def read(run_dir: Path, *, first: int | None = None, last: int | None = None) -> Timeline:
    """Reads the timeline from the beginning of step `first` to the end of step `last`.

    Args:
        first: default is the first step there is.
        last: default is the newest.

    Raises:
        ConfigError: nothing was trained yet, or not these steps.
    """
    folder = RunPaths(run_dir).events_folder
    differ = history.find_late_clocks(folder)
    events = history.align_clocks(read_events(folder), differ)
    done = history.steps(events)
    steps = [e for e in done if (first or 0) <= e["step"] and (last is None or e["step"] <= last)]
    if not steps:
        there = f"steps {done[0]['step']} to {done[-1]['step']} are" if done else "no step is"
        raise ConfigError(
            f"{run_dir.name}: no steps from {first or 1} to {last or 'the newest'}; {there} done"
        )
    begin, end = steps[0]["time"] - steps[0]["time/step"], steps[-1]["time"]
    phases, pauses = _phases(events), _pauses(events)
    start = before(steps[0], events, phases, pauses)
    work = {process_of(e) for e in events if e["event"] == "phases" and e.get("step") != 0}
    phases = {name: noted for name, noted in phases.items() if name in work}
    evaluated = [e for e in _evaluations(events) if e[1].start < end and _end_of([e[1]]) > begin]
    if evaluated:
        phases[HELD_OUT] = [phase for _, phase, _ in evaluated]
    for by_name in (phases, pauses):
        for name, noted in by_name.items():
            by_name[name] = [p for p in noted if p.start < end and p.start + p.seconds > begin]
    loads = history.loads(events)
    rates = _rates([e for e in loads if begin < e["time"] and e["time"] - e["seconds"] < end])
    numbers = {e["step"] for e in steps}
    waits = [e for e in events if e["event"] == "waits" and e["step"] in numbers]
    return Timeline(
        run_dir.name, begin, end, steps, phases, rates, pauses, waits, start, differ,
        _costs(evaluated),
    )  # fmt: skip


def summary(timeline: Timeline) -> Summary:
    every = dict.fromkeys(key for e in timeline.steps for key in e if key.startswith("time/"))
    names = sorted(every, key="time/other".__eq__)  # the last one, whatever came later
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
        _of_rollout(timeline.waits, len(timeline.steps)),
        timeline.start.seconds if timeline.start else None,
        parts(timeline.start) if timeline.start else (),
        timeline.clocks,
        timeline.evaluations,
    )


def _evaluations(events: Sequence[Event]) -> list[tuple[str, Phase, int]]:
    """Returns each evaluation over all tasks: its set, its time, and its sampled tokens."""
    timed = [e for e in events if e["event"] == "eval" and "seconds" in e]
    found = []
    for (name, _, _), tasks in history.shares_of(timed).items():
        start = min(e["time"] - e["seconds"] for e in tasks.values())
        end = max(e["time"] for e in tasks.values())
        tokens = sum(e["num_tokens"] for e in tasks.values())
        found.append((name, Phase(name, start, end - start), tokens))
    return found


def _costs(evaluated: Sequence[tuple[str, Phase, int]]) -> dict[str, SetCost]:
    costs = {}
    for name in dict.fromkeys(name for name, _, _ in evaluated):
        own = [(phase.seconds, tokens) for each, phase, tokens in evaluated if each == name]
        seconds, tokens = (statistics.fmean(values) for values in zip(*own, strict=True))
        costs[name] = SetCost(len(own), seconds, tokens)
    return costs


def _of_rollout(waits: Sequence[Event], num_steps: int) -> dict[str, float]:
    newest = {(e["rank"], e["step"]): e for e in waits}
    tasks, spent = len({rank for rank, _ in newest}), defaultdict[str, float](float)
    for event in newest.values():
        for name in (key for key in event if key.startswith("time/")):
            spent[name.removeprefix("time/")] += event[name] / tasks / num_steps
    return dict(spent)


def _within(timeline: Timeline, spent: Rate | Phase) -> float:
    """Seconds of an interval within the steps; an engine's report may reach beyond them."""
    end = min(spent.start + spent.seconds, timeline.end)
    return max(end - max(spent.start, timeline.begin), 0.0)


def text(found: Summary) -> str:
    """Formats tables of the start and of the phases, and a line on the engines."""
    whole = found.seconds_per_step
    lines = [] if found.start_s is None else start_text(found.start_s, found.start)
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
    if found.rollout:
        spent = ", ".join(f"{name} {seconds:.2f}" for name, seconds in found.rollout.items())
        lines.append(f"rollout, s/step: {spent}")
    lines += [
        f"held-out {name}: {cost.evaluations} evaluation{'s' * (cost.evaluations > 1)}, "
        f"{cost.seconds:.1f} s and {short(cost.num_tokens)} tokens each"
        for name, cost in found.evaluations.items()
    ]
    if found.engines:
        lines.append(
            f"engines: {found.engines}, {found.tokens_per_s:,.0f} tokens/s sampled, "
            f"{found.in_flight:.0f} requests in flight"
        )
    if found.updates:
        lines.append(
            f"updates of weights: {found.updates}, engines paused {1e3 * found.paused_s:.0f} ms "
            f"each, {found.paused_share:.2%} of the time"
        )
    if found.clocks:
        lines.append(
            f"clocks: {history.describe_clocks(found.clocks)}; what it noted is moved by as much"
        )
    return "\n".join(lines)


def _phases(events: Sequence[Event]) -> dict[str, list[Phase]]:
    """Collects the noted phases of processes; the newest for a step that was trained again."""
    newest: dict[str, dict[object, list[Phase]]] = defaultdict(dict)
    for number, event in enumerate(events):
        if event["event"] == "phases":
            name = process_of(event)
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
    """Returns the phase from the first pause call to the last resume reply; None if none."""
    noted = event.get("phases")
    assert isinstance(noted, list | None)
    parts = [phase for phase in (Phase(*p) for p in noted or ()) if phase.name in _STANDSTILL]
    if not parts:
        return None
    start = min(phase.start for phase in parts)
    return Phase("update", start, max(p.start + p.seconds for p in parts) - start)


COLORS = {
    "import": "#f7e7b0",
    "start": "#f2d16b",
    "model": "#c9a227",
    "load": "#8a6a08",
    "warm_up": "#e39b4f",
    "engines": "#b9c9bd",
    "wait": "#d9d9d9",
    "read": "#8c8c8c",
    "reference": "#4c9f70",
    "score": "#9bd1ae",
    "train": "#1f5fa8",
    "lease": "#7b5ea7",
    "publish": "#d9660f",
    "save": "#8a5a2b",
    "write": "#c4a182",
    "update": "#c0182b",
}
"""Each name has its own, since the legend tells them apart."""
_OTHERS = ("#b0487a", "#2a9db0", "#5b6b2f", "#e58fb8", "#3b3b6d", "#a6d854", "#6d1f2f", "#00605a")
"""Colours of further names, in order of appearance."""
ENGINE, PAUSE = "#7fb3d9", COLORS["update"]
_ENGINES = 16
"""More engines than this are drawn as one."""
_THINNEST = 1 / 800
"""Fraction of the width, so that an update of milliseconds stays visible."""


def plot(
    timelines: Sequence[Timeline],
    path: Path,
    save: "Callable[[Figure, Path], Path]" = picture.save,
) -> Path:
    """Draws timelines as a PNG, one above the other on the same time scale.

    Each has a row per process, and one per engine with its tokens per second. A start is beside the
    steps, on a scale of its own.
    """
    engines = [_choose_shown(timeline) for timeline in timelines]
    rows = [len(_processes(t)) + len(e) for t, e in zip(timelines, engines, strict=True)]
    figure = picture.figure(12, sum(1.6 + 0.55 * count for count in rows))
    widths = [1, 2] if any(timeline.start for timeline in timelines) else [1]
    places = figure.subplots(
        len(timelines),
        len(widths),
        squeeze=False,
        gridspec_kw={"height_ratios": [1.6 + count for count in rows], "width_ratios": widths},
    )
    drawn = [t._replace(begin=max(t.begin, t.start.end)) if t.start else t for t in timelines]
    longest = max(timeline.seconds for timeline in drawn)
    for place, timeline, shown in zip(places, drawn, engines, strict=True):
        colours = _colours(timeline)
        labels = _draw(place[-1], timeline, shown, colours)
        place[-1].set_xlim(0, longest)
        if timeline.start:
            _draw_start(place[0], timeline.start, _processes(timeline), list(shown), colours)
            place[0].set_yticks(range(len(labels)), labels)
            place[-1].set_yticks([])
            place[-1].set_xlabel("seconds since the first batch was there")
        elif len(place) > 1:
            place[0].set_axis_off()
    return save(figure, path)


def _processes(timeline: Timeline) -> list[str]:
    return list(timeline.phases | (timeline.start.phases if timeline.start else {}))


def _colours(timeline: Timeline) -> dict[str, str]:
    every = [*timeline.phases.values()]
    if timeline.start:
        every += [*timeline.start.phases.values(), *timeline.start.engines.values()]
    names = dict.fromkeys(phase.name for phases in every for phase in phases)
    more = itertools.cycle(_OTHERS)
    return {name: COLORS.get(name) or next(more) for name in names}


def _choose_shown(timeline: Timeline) -> dict[str, list[Rate]]:
    """Rates of engines that have a row; many engines are merged."""
    started = timeline.start.engines if timeline.start else {}
    engines = {id: timeline.engines.get(id, []) for id in sorted({*timeline.engines, *started})}
    if len(engines) <= _ENGINES:
        return engines
    return {f"{len(engines)} engines": [r for rates in engines.values() for r in rates]}


def _draw(
    axes: "Axes", timeline: Timeline, engines: dict[str, list[Rate]], colours: dict[str, str]
) -> list[str]:
    """Draws the steps; returns the labels of the rows."""
    labels = _processes(timeline)
    rows = len(labels) + len(engines)
    for row, name in enumerate(labels):
        _draw_phases(axes, row, timeline.phases.get(name, []), timeline.begin, colours)
    curves = {name: _curve(rates, timeline) for name, rates in engines.items()}
    most = max((rate for _, rates in curves.values() for rate in rates), default=0.0) or 1.0
    for row, (name, curve) in enumerate(curves.items(), len(labels)):
        _draw_rates(axes, row, curve, most)
        _draw_pauses(axes, row, timeline.pauses.get(name, _all_pauses(timeline, engines)), timeline)
        labels.append(f"{name}\nto {most:,.0f} tok/s")
    _draw_steps(axes, timeline, rows)
    axes.set_title(timeline.name)
    axes.set_yticks(range(rows), labels)
    axes.set_ylim(rows - 0.4, -0.75)
    axes.set_xlabel("seconds")
    axes.spines[["top", "right"]].set_visible(False)
    _draw_legend(axes, timeline, rows, colours)
    return labels


def _draw_start(
    axes: "Axes",
    start: Start,
    processes: list[str],
    engines: list[str],
    colours: dict[str, str],
) -> None:
    """Draws each part's work before the steps, in the same rows."""
    for row, name in enumerate(processes):
        _draw_phases(axes, row, start.phases.get(name, []), start.begin, colours)
    every = [phase for phases in start.engines.values() for phase in phases]
    is_one_row = len(engines) < len(start.engines)
    for row, name in enumerate(engines, len(processes)):
        phases = every if is_one_row else start.engines.get(name, [])
        _draw_phases(axes, row, phases, start.begin, colours)
    rows = len(processes) + len(engines)
    axes.set_title("start")
    axes.set_ylim(rows - 0.4, -0.75)
    axes.set_xlim(0, start.seconds)
    axes.set_xlabel("seconds since the tasks began")
    axes.spines[["top", "right"]].set_visible(False)


def _draw_phases(
    axes: "Axes", row: int, phases: list[Phase], begin: float, colours: dict[str, str]
) -> None:
    for name in dict.fromkeys(phase.name for phase in phases):
        bars = [(p.start - begin, p.seconds) for p in phases if p.name == name]
        axes.broken_barh(bars, (row - 0.35, 0.7), facecolors=colours[name], linewidth=0)


def _curve(rates: list[Rate], timeline: Timeline) -> tuple[list[float], list[float]]:
    """Tokens per second as steps: (times of change, rate from there on), over all tasks."""
    changes: dict[float, float] = {}
    for rate in rates:
        speed, start = rate.num_tokens / rate.seconds, rate.start - timeline.begin
        end = min(start + rate.seconds, timeline.seconds)
        changes[start] = changes.get(start, 0.0) + speed
        changes[end] = changes.get(end, 0.0) - speed
    times, height, heights = sorted(changes), 0.0, []
    for time in times:
        height += changes[time]
        heights.append(max(height, 0.0))
    return times, heights


def _draw_rates(
    axes: "Axes", row: int, curve: tuple[list[float], list[float]], most: float
) -> None:
    times, rates = curve
    bottom = row + 0.35
    tops = [bottom - 0.7 * rate / most for rate in rates]
    axes.fill_between(times, bottom, tops, step="post", color=ENGINE, linewidth=0)
    axes.axhline(bottom, color="#bbbbbb", linewidth=0.5)


def _all_pauses(timeline: Timeline, drawn: dict[str, list[Rate]]) -> list[Phase]:
    if drawn.keys() == timeline.engines.keys():
        return []
    return list({pause for pauses in timeline.pauses.values() for pause in pauses})


def _draw_pauses(axes: "Axes", row: int, pauses: list[Phase], timeline: Timeline) -> None:
    thinnest = timeline.seconds * _THINNEST
    bars = [(p.start - timeline.begin, max(p.seconds, thinnest)) for p in pauses]
    axes.broken_barh(bars, (row - 0.35, 0.7), facecolors=PAUSE, linewidth=0)


def _draw_steps(axes: "Axes", timeline: Timeline, rows: int) -> None:
    every, named = -(-len(timeline.steps) // 20), False
    for event in timeline.steps:
        at = event["time"] - timeline.begin
        axes.plot([at, at], [-0.45, rows - 0.5], color="#000000", linewidth=0.4, alpha=0.5)
        if event["step"] % every == 0:
            label = f"{'' if named else 'step '}{event['step']}"
            named = True
            axes.text(at, -0.5, label, ha="center", va="bottom", fontsize=8)


def _draw_legend(axes: "Axes", timeline: Timeline, rows: int, colours: dict[str, str]) -> None:
    from matplotlib.patches import Patch

    seen = dict.fromkeys(p.name for phases in timeline.phases.values() for p in phases)
    if timeline.start:
        every = [*timeline.start.phases.values(), *timeline.start.engines.values()]
        seen |= dict.fromkeys(p.name for phases in every for p in phases if p.name != "update")
    patches = [Patch(color=colours[name], label=name) for name in seen]
    if timeline.engines:
        patches.append(Patch(color=ENGINE, label="tokens/s sampled"))
    if timeline.pauses:
        patches.append(Patch(color=PAUSE, label="update of weights"))
    if timeline.start and (figure := axes.get_figure(root=True)):
        place = {"loc": "outside lower center", "ncols": -(-len(patches) // 2)}
        figure.legend(handles=patches, frameon=False, fontsize=8, **place)
        return
    below = (0.5, -0.5 / (0.5 + 0.55 * rows))
    axes.legend(
        handles=patches, loc="upper center", bbox_to_anchor=below, ncols=len(patches),
        frameon=False, fontsize=8,
    )  # fmt: skip
