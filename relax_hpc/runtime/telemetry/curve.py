"""Draws the picture of a run: reward or loss per step, with held-out sets."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from relax_hpc.errors import ends_of
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.runtime.telemetry import history, picture
from relax_hpc.runtime.telemetry.events import FREQUENT, Event, read_events

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLUE, GREY = "#1f5fa8", "#555555"
HELDOUT = ("#d9660f", "#4c9f70", "#7b5ea7", "#c0182b", "#8a5a2b", "#2a9db0", "#b0487a", "#c9a227")
"""Colours of held-out sets; further sets repeat them with another marker."""
_MARKERS = "osD^v"
_KEEP, _REACH = 0.85, 40
"""Smoothing: the weight of a neighbour per step of distance, and the farthest one."""
_MOST_NUMBERS = 12
"""Most points of a held-out set that are all labelled; those of several sets lie close."""
_LEGEND_CHARACTERS = 105
"""Characters per line of a legend."""

_FIELDS = {
    "resume": ("step",),
    "step": (
        "step", "reward/mean", "loss", "response/truncated", "staleness/mean", "staleness/max",
    ),
    "heldout": ("step", "loss"),
    "eval": (
        "name", "when", "number", "tasks", "rank", "headline", "version", "version_max", "correct",
        "num_samples", "num_masked", "num_truncated",
    ),
}  # fmt: skip
"""Fields that are drawn, by kind of event."""


def drawn_of(events: Iterable[Event]) -> list[Event]:
    """Keeps the drawn fields of the drawn events, which are few."""
    return [
        {key: event[key] for key in ("event", "time", *_FIELDS[event["event"]]) if key in event}
        for event in events
        if event["event"] in _FIELDS
    ]


def plot(run_dir: Path, events: Sequence[Event] | None = None) -> Path:
    """Draws reward.png: reward per step, smoothed, and every held-out set, with a bar over the
    policies of an evaluation; below, which part was cut off, and the staleness.

    Args:
        events: from `drawn_of`, in order, if already read.
    """
    paths = RunPaths(run_dir)
    events = _read(paths) if events is None else events
    done = history.steps(events)
    figure = picture.figure(8, 6.3)
    upper, middle, lower = figure.subplots(3, 1, sharex=True, height_ratios=[4, 1, 1])
    figure.suptitle(run_dir.name)
    heldout = history.heldout(events, every_set=True)
    _draw_rewards(upper, done, heldout)
    _draw_truncated(middle, done, heldout)
    _draw_staleness(lower, done)
    return picture.save(figure, paths.reward_curve)


def plot_loss(run_dir: Path, events: Sequence[Event] | None = None) -> Path:
    """Draws loss.png of a supervised fine-tuning: loss per step, smoothed, and held-out losses.

    Args:
        events: as in `plot`.
    """
    paths = RunPaths(run_dir)
    events = _read(paths) if events is None else events
    figure = picture.figure(8, 4.5)
    axes = figure.subplots()
    figure.suptitle(run_dir.name)
    done = [e for e in history.steps(events) if e.get("loss") is not None]
    steps, losses = [e["step"] for e in done], [e["loss"] for e in done]
    _draw_training(axes, steps, losses)
    measured = [e for e in history.heldout_losses(events) if e["loss"] is not None]
    if measured:
        points = [(e["step"], e["loss"]) for e in measured]
        numbered = points if len(points) <= _MOST_NUMBERS else points[-1:]
        _draw_heldout(axes, 0, "held-out", points, numbered=numbered)
    axes.set_xlabel("step")
    axes.set_ylabel("loss per token, nats")
    axes.grid(alpha=0.25)
    _legend(axes)
    return picture.save(figure, paths.loss_curve)


def _read(paths: RunPaths) -> list[Event]:
    return drawn_of(read_events(paths.events_folder, but=FREQUENT))


def smooth(values: Sequence[float]) -> list[float]:
    """Smooths a curve with a bilateral filter, which follows falls and jumps.

    A neighbour's weight falls with its distance and its difference. The noise scale comes from the
    second differences, whose standard deviation is sqrt(6) times the noise's.
    """
    import numpy as np

    given = np.array(values, np.float64)
    if len(given) < 3:
        return list(values)
    noise = np.abs(np.diff(given, 2)).mean() / math.sqrt(6 * 2 / math.pi)
    total, weight = given.copy(), np.ones_like(given)
    for apart in range(1, min(_REACH, len(given) - 1) + 1):
        odds = (given[apart:] - given[:-apart]) / max(3 * noise, 1e-9)
        counts = _KEEP**apart * np.exp(-(odds**2) / 2)
        total[apart:] += counts * given[:-apart]
        total[:-apart] += counts * given[apart:]
        weight[apart:] += counts
        weight[:-apart] += counts
    smoothed: list[float] = (total / weight).tolist()
    return smoothed


def _legend(axes: "Axes") -> None:
    """Draws the legend above the axes, where no curve can be; many names make it higher."""
    _, names = axes.get_legend_handles_labels()
    if not names:
        return
    columns = min(3, max(1, _LEGEND_CHARACTERS // (max(map(len, names)) + 8)))
    axes.legend(
        loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0.2, frameon=False,
        ncols=columns,
    )  # fmt: skip
    if figure := axes.get_figure(root=True):
        width, height = figure.get_size_inches()
        more = max(0, -(-len(names) // columns) - 2)
        figure.set_size_inches(width, height + 0.22 * more)


def _draw_rewards(axes: "Axes", done: Sequence[Event], heldout: Sequence[history.Heldout]) -> None:
    rewarded = [e for e in done if e.get("reward/mean") is not None]
    steps, rewards = [e["step"] for e in rewarded], [e["reward/mean"] for e in rewarded]
    _draw_training(axes, steps, rewards)
    sets = dict.fromkeys(point.name for point in heldout)
    for number, name in enumerate(sets):
        points = [(p.version, p.reward) for p in heldout if p.name == name]
        few = len(sets) * len(points) <= _MOST_NUMBERS
        label = f"held-out: {ends_of(name, _LEGEND_CHARACTERS - 20)}"
        _draw_heldout(axes, number, label, points, numbered=points if few else points[-1:])
        for p in heldout:
            if p.name == name and p.version_max > p.version:
                colour = HELDOUT[number % len(HELDOUT)]
                axes.hlines(p.reward, p.version, p.version_max, color=colour, linewidth=3)
    axes.set_ylabel("mean reward")
    axes.margins(y=0.15)
    axes.grid(alpha=0.25)
    _legend(axes)


def _draw_truncated(
    axes: "Axes", done: Sequence[Event], heldout: Sequence[history.Heldout]
) -> None:
    known = [e for e in done if e.get("response/truncated") is not None]
    steps, parts = [e["step"] for e in known], [e["response/truncated"] for e in known]
    axes.plot(steps, parts, color=BLUE, linewidth=1.5)
    for number, name in enumerate(dict.fromkeys(point.name for point in heldout)):
        points = [(p.version, p.truncated) for p in heldout if p.name == name]
        of_set = [(version, part) for version, part in points if part is not None]
        if of_set:
            _draw_heldout(axes, number, "_", of_set, numbered=())
    axes.set_ylabel("cut off")
    axes.set_ylim(bottom=-0.01)
    axes.grid(alpha=0.25)


def _draw_training(axes: "Axes", steps: Sequence[int], values: Sequence[float]) -> None:
    if not steps:
        return
    axes.plot(steps, values, color=BLUE, alpha=0.3, linewidth=1, label="training, per step")
    axes.plot(steps, smooth(values), color=BLUE, linewidth=2, label="training, smoothed")


def _draw_heldout(
    axes: "Axes",
    number: int,
    label: str,
    points: Sequence[tuple[int, float]],
    *,
    numbered: Sequence[tuple[int, float]],
) -> None:
    """Draws the points of a held-out set, and labels those of `numbered`."""
    round_, place = divmod(number, len(HELDOUT))
    colour, marker = HELDOUT[place], _MARKERS[round_ % len(_MARKERS)]
    axes.plot(
        *zip(*points, strict=True), linestyle="--", marker=marker,
        color=colour, markersize=6, linewidth=1, label=label,
    )  # fmt: skip
    for step, value in numbered:
        axes.annotate(
            f"{value:.2f}", (step, value), (0, 8),
            textcoords="offset points", ha="center", color=colour, fontsize=9,
        )  # fmt: skip


def _draw_staleness(axes: "Axes", done: Sequence[Event]) -> None:
    aged = [e for e in done if "staleness/mean" in e and "staleness/max" in e]
    steps = [e["step"] for e in aged]
    if aged:
        axes.plot(steps, [e["staleness/mean"] for e in aged], color=GREY, linewidth=1.5,
                  label="mean")  # fmt: skip
        axes.plot(steps, [e["staleness/max"] for e in aged],
                  color=GREY, linewidth=1, linestyle=":", label="largest")  # fmt: skip
    axes.set_ylabel("staleness")
    axes.set_xlabel("step")
    axes.set_ylim(bottom=-0.1)
    axes.grid(alpha=0.25)
    _legend(axes)
