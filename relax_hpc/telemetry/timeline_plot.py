"""The picture of a timeline: who worked, who waited, and what engines sampled meanwhile."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from relax_hpc.telemetry import picture
from relax_hpc.telemetry.starts import Start
from relax_hpc.telemetry.timeline import Rate, Timeline
from relax_hpc.telemetry.timers import Phase

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = {
    "import": "#f2d16b",
    "start": "#f2d16b",
    "model": "#c9a227",
    "load": "#a9851a",
    "warm_up": "#e39b4f",
    "engines": "#d9d9d9",
    "wait": "#d9d9d9",
    "read": "#8c8c8c",
    "reference": "#4c9f70",
    "score": "#4c9f70",
    "train": "#1f5fa8",
    "lease": "#7b5ea7",
    "publish": "#d9660f",
    "save": "#8a5a2b",
    "write": "#8a5a2b",
    "update": "#c0182b",
}
OTHER, ENGINE, PAUSE = "#b0487a", "#7fb3d9", COLORS["update"]
_ENGINES = 16
"""More than these are drawn as one."""
_THINNEST = 1 / 800
"""Fraction of the width, so that an update of milliseconds can be seen."""


def plot(timelines: Sequence[Timeline], path: Path) -> Path:
    """Draws them as a PNG, one above the other on the same scale of time.

    Each has a row per process, and one per engine with its tokens per second. A start is beside
    the steps, on a scale of its own.
    """
    engines = [_shown(timeline) for timeline in timelines]
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
        labels = _draw(place[-1], timeline, shown)
        place[-1].set_xlim(0, longest)
        if timeline.start:
            _draw_start(place[0], timeline.start, _processes(timeline), list(shown))
            place[0].set_yticks(range(len(labels)), labels)
            place[-1].set_yticks([])
            place[-1].set_xlabel("seconds since the first batch was there")
        elif len(place) > 1:
            place[0].set_axis_off()
    return picture.save(figure, path)


def _processes(timeline: Timeline) -> list[str]:
    """Processes that have a row."""
    return list(timeline.phases | (timeline.start.phases if timeline.start else {}))


def _shown(timeline: Timeline) -> dict[str, list[Rate]]:
    """Rates of engines that have a row; of many together."""
    started = timeline.start.engines if timeline.start else {}
    engines = {id: timeline.engines.get(id, []) for id in sorted({*timeline.engines, *started})}
    if len(engines) <= _ENGINES:
        return engines
    return {f"{len(engines)} engines": [r for rates in engines.values() for r in rates]}


def _draw(axes: "Axes", timeline: Timeline, engines: dict[str, list[Rate]]) -> list[str]:
    """Draws its steps; returns the labels of the rows."""
    labels = _processes(timeline)
    rows = len(labels) + len(engines)
    for row, name in enumerate(labels):
        _draw_phases(axes, row, timeline.phases.get(name, []), timeline.begin)
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
    _draw_legend(axes, timeline, rows)
    return labels


def _draw_start(axes: "Axes", start: Start, processes: list[str], engines: list[str]) -> None:
    """Draws what each part did before the steps, in the rows that these have."""
    for row, name in enumerate(processes):
        _draw_phases(axes, row, start.phases.get(name, []), start.begin)
    every = [phase for phases in start.engines.values() for phase in phases]
    is_one_row = len(engines) < len(start.engines)
    for row, name in enumerate(engines, len(processes)):
        phases = every if is_one_row else start.engines.get(name, [])
        _draw_phases(axes, row, phases, start.begin)
    rows = len(processes) + len(engines)
    axes.set_title("start")
    axes.set_ylim(rows - 0.4, -0.75)
    axes.set_xlim(0, start.seconds)
    axes.set_xlabel("seconds since the tasks began")
    axes.spines[["top", "right"]].set_visible(False)


def _draw_phases(axes: "Axes", row: int, phases: list[Phase], begin: float) -> None:
    for name in dict.fromkeys(phase.name for phase in phases):
        bars = [(p.start - begin, p.seconds) for p in phases if p.name == name]
        axes.broken_barh(bars, (row - 0.35, 0.7), facecolors=COLORS.get(name, OTHER), linewidth=0)


def _curve(rates: list[Rate], timeline: Timeline) -> tuple[list[float], list[float]]:
    """Tokens per second as steps: (times of change, rate from there on), of all tasks together."""
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
    every = -(-len(timeline.steps) // 20)
    for event in timeline.steps:
        at = event["time"] - timeline.begin
        axes.plot([at, at], [-0.45, rows - 0.5], color="#000000", linewidth=0.4, alpha=0.5)
        if event["step"] % every == 0:
            axes.text(at, -0.5, f"{event['step']}", ha="center", va="bottom", fontsize=8)


def _draw_legend(axes: "Axes", timeline: Timeline, rows: int) -> None:
    from matplotlib.patches import Patch

    seen = dict.fromkeys(p.name for phases in timeline.phases.values() for p in phases)
    if timeline.start:
        every = [*timeline.start.phases.values(), *timeline.start.engines.values()]
        seen |= dict.fromkeys(p.name for phases in every for p in phases if p.name != "update")
    patches = [Patch(color=COLORS.get(name, OTHER), label=name) for name in seen]
    if timeline.engines:
        patches.append(Patch(color=ENGINE, label="tokens/s"))
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
