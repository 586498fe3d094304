"""The picture of a run: does the reward rise, or the loss fall, on held-out data too?"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from relax_hpc.paths import RunPaths
from relax_hpc.telemetry import history, picture
from relax_hpc.telemetry.events import FREQUENT, Event, read_events

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLUE, ORANGE, GREY = "#1f5fa8", "#d9660f", "#555555"


_FIELDS = {
    "resume": ("step",),
    "step": ("step", "reward/mean", "loss", "staleness/mean", "staleness/max"),
    "heldout": ("step", "loss"),
    "eval": (
        "name", "when", "number", "tasks", "rank", "headline", "version", "correct", "num_samples",
    ),
}  # fmt: skip
"""Fields that are drawn, by kind of event."""


def drawn_of(events: Iterable[Event]) -> list[Event]:
    """The fields of some events that are drawn: a few of few of them."""
    return [
        {key: event[key] for key in ("event", "time", *_FIELDS[event["event"]]) if key in event}
        for event in events
        if event["event"] in _FIELDS
    ]


def plot(run_dir: Path, events: Sequence[Event] | None = None) -> Path:
    """Draws reward.png: reward per step, smoothed, held-out rewards; below, the staleness.

    Args:
        run_dir: of the run.
        events: `drawn_of` them, in order, by who has read them already.
    """
    paths = RunPaths(run_dir)
    events = _read(paths) if events is None else events
    done = history.steps(events)
    figure = picture.figure(8, 5.5)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[4, 1])
    figure.suptitle(run_dir.name)
    _draw_rewards(upper, done, history.heldout(events))
    _draw_staleness(lower, done)
    return picture.save(figure, paths.reward_curve)


def plot_loss(run_dir: Path, events: Sequence[Event] | None = None) -> Path:
    """Draws loss.png of a supervised fine-tuning: loss per step, smoothed, held-out losses.

    Args:
        run_dir: of the run.
        events: as of `plot`.
    """
    paths = RunPaths(run_dir)
    events = _read(paths) if events is None else events
    figure = picture.figure(8, 4.5)
    axes = figure.subplots()
    figure.suptitle(run_dir.name)
    done = [e for e in history.steps(events) if e.get("loss") is not None]
    steps, losses = [e["step"] for e in done], [e["loss"] for e in done]
    axes.plot(steps, losses, color=BLUE, alpha=0.3, linewidth=1, label="training, per step")
    axes.plot(steps, smooth(losses, keep=0.85), color=BLUE, linewidth=2, label="training, smoothed")
    measured = [e for e in history.heldout_losses(events) if e["loss"] is not None]
    axes.plot(
        [e["step"] for e in measured], [e["loss"] for e in measured], "o--",
        color=ORANGE, markersize=6, linewidth=1, label="held-out",
    )  # fmt: skip
    axes.set_xlabel("step")
    axes.set_ylabel("loss per token, nats")
    axes.grid(alpha=0.25)
    _legend(axes)
    return picture.save(figure, paths.loss_curve)


def _read(paths: RunPaths) -> list[Event]:
    return drawn_of(read_events(paths.events_folder, but=FREQUENT))


def smooth(values: Sequence[float], *, keep: float) -> list[float]:
    """Exponential average over the past, debiased, so that it starts at the first value."""
    averages, total, weight = [], 0.0, 0.0
    for value in values:
        total, weight = keep * total + (1 - keep) * value, keep * weight + (1 - keep)
        averages.append(total / weight)
    return averages


def _legend(axes: "Axes") -> None:
    """Draws it above the axes, where no curve can be, whether it rises or falls."""
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0.2, frameon=False, ncols=3)


def _draw_rewards(axes: "Axes", done: Sequence[Event], heldout: Sequence[history.Heldout]) -> None:
    rewarded = [e for e in done if e.get("reward/mean") is not None]
    steps, rewards = [e["step"] for e in rewarded], [e["reward/mean"] for e in rewarded]
    axes.plot(steps, rewards, color=BLUE, alpha=0.3, linewidth=1, label="training, per step")
    axes.plot(steps, smooth(rewards, keep=0.85), color=BLUE, linewidth=2,
              label="training, smoothed")  # fmt: skip
    axes.plot(
        [p.version for p in heldout], [p.reward for p in heldout], "o--",
        color=ORANGE, markersize=6, linewidth=1, label="held-out",
    )  # fmt: skip
    for point in heldout:
        axes.annotate(
            f"{point.reward:.2f}", (point.version, point.reward), (0, 8),
            textcoords="offset points", ha="center", color=ORANGE, fontsize=9,
        )  # fmt: skip
    axes.set_ylabel("mean reward")
    axes.margins(y=0.15)
    axes.grid(alpha=0.25)
    _legend(axes)


def _draw_staleness(axes: "Axes", done: Sequence[Event]) -> None:
    aged = [e for e in done if "staleness/mean" in e and "staleness/max" in e]
    steps = [e["step"] for e in aged]
    axes.plot(steps, [e["staleness/mean"] for e in aged], color=GREY, linewidth=1.5, label="mean")
    axes.plot(steps, [e["staleness/max"] for e in aged],
              color=GREY, linewidth=1, linestyle=":", label="largest")  # fmt: skip
    axes.set_ylabel("staleness")
    axes.set_xlabel("step")
    axes.set_ylim(bottom=-0.1)
    axes.grid(alpha=0.25)
    _legend(axes)
