"""The picture of a timeline: who worked, who waited, and what engines sampled meanwhile."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from relax_hpc.telemetry import picture
from relax_hpc.telemetry.timeline import Rate, Timeline
from relax_hpc.telemetry.timers import Phase

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = {
    "wait": "#d9d9d9",
    "read": "#8c8c8c",
    "reference": "#4c9f70",
    "score": "#4c9f70",
    "train": "#1f5fa8",
    "lease": "#7b5ea7",
    "publish": "#d9660f",
    "save": "#8a5a2b",
    "write": "#8a5a2b",
}
OTHER, ENGINE, PAUSE = "#b0487a", "#7fb3d9", "#c0182b"
_ENGINES = 16
"""More than these are drawn as one."""
_THINNEST = 1 / 800
"""Fraction of the width, so that an update of milliseconds can be seen."""


def plot(timelines: Sequence[Timeline], path: Path) -> Path:
    """Draws them as a PNG, one above the other on the same scale of time.

    Each has a row per process, and one per engine with its tokens per second.
    """
    engines = [_shown(timeline.engines) for timeline in timelines]
    rows = [len(t.phases) + len(e) for t, e in zip(timelines, engines, strict=True)]
    figure = picture.figure(12, sum(1.6 + 0.55 * count for count in rows))
    places = figure.subplots(
        len(timelines),
        squeeze=False,
        gridspec_kw={"height_ratios": [1.6 + count for count in rows]},
    )
    longest = max(timeline.seconds for timeline in timelines)
    for axes, timeline, shown in zip(places[:, 0], timelines, engines, strict=True):
        _draw(axes, timeline, shown)
        axes.set_xlim(0, longest)
    return picture.save(figure, path)


def _shown(engines: dict[str, list[Rate]]) -> dict[str, list[Rate]]:
    if len(engines) <= _ENGINES:
        return engines
    return {f"{len(engines)} engines": [r for rates in engines.values() for r in rates]}


def _draw(axes: "Axes", timeline: Timeline, engines: dict[str, list[Rate]]) -> None:
    rows, labels = len(timeline.phases) + len(engines), []
    for row, (name, phases) in enumerate(timeline.phases.items()):
        _draw_phases(axes, row, phases, timeline)
        labels.append(name)
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


def _draw_phases(axes: "Axes", row: int, phases: list[Phase], timeline: Timeline) -> None:
    for name in dict.fromkeys(phase.name for phase in phases):
        bars = [(p.start - timeline.begin, p.seconds) for p in phases if p.name == name]
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
    patches = [Patch(color=COLORS.get(name, OTHER), label=name) for name in seen]
    if timeline.engines:
        patches.append(Patch(color=ENGINE, label="tokens/s"))
    if timeline.pauses:
        patches.append(Patch(color=PAUSE, label="update of weights"))
    below = (0.5, -0.5 / (0.5 + 0.55 * rows))
    axes.legend(
        handles=patches, loc="upper center", bbox_to_anchor=below, ncols=len(patches),
        frameon=False, fontsize=8,
    )  # fmt: skip
