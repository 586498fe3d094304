"""Compares runs: the settings that differ, held-out curves with a band over seeds, and what a
score cost.

Runs whose jobs are equal but for name and seed are one group. A table in CSV counts as a run, so
curves of other programs, or an earlier comparison's, stand beside ours.
"""

import csv
import io
import json
import math
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from relax_hpc.config.job_file import read_resolved
from relax_hpc.errors import ConfigError, ends_of, none_of
from relax_hpc.roles.table import count_gpus
from relax_hpc.runs import changes
from relax_hpc.runtime.files.records import read_json
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.runtime.telemetry import curve, history, picture
from relax_hpc.runtime.telemetry.events import FREQUENT, read_events
from relax_hpc.runtime.text import align_lines

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NOT_SETTINGS = re.compile(r"name|run_root|seed|(.+\.)?resources\.dependency")
_COLUMNS = ("run", "group", "step", "minutes", "score", "truncated", "tokens", "gpu_hours")
_NEEDED = ("run", "step", "minutes", "score")
_VALUE_CHARACTERS = 24


class ScoredStep(NamedTuple):
    """A held-out score, and what it had cost by then; None is unknown."""

    step: int
    minutes: float
    """Minutes of its attempts; waits in the queue do not count."""
    score: float
    truncated: float | None
    """Part of the responses that a limit cut off."""
    tokens: int | None
    """Trained on."""
    gpu_hours: float | None
    """Hours of the GPUs that the job asks for."""


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """One run."""

    name: str
    points: Sequence[ScoredStep]
    rewards: Sequence[tuple[int, float]] = ()
    """(step, mean reward of its batch)."""
    settings: Mapping[str, Any] | None = None
    """By key; None for a table."""
    num_samples: int | None = None
    """Responses of an evaluation."""


@dataclass(frozen=True, slots=True)
class Group:
    """Runs that differ in nothing but name and seed."""

    members: Sequence[ComparedRun]

    @property
    def label(self) -> str:
        """The first one's name, and how many more there are."""
        more = len(self.members) - 1
        return f"{self.members[0].name}" + (f" and {more} more" if more else "")

    def curve(self, x: Callable[[ScoredStep], float]) -> list[tuple[float, float, float, float]]:
        """Returns (mean x, mean, lowest, highest score) of each step that all members evaluated."""
        by_step = [{point.step: point for point in each.points} for each in self.members]
        common = [step for step in by_step[0] if all(step in each for each in by_step)]
        found = []
        for step in sorted(common):
            points = [each[step] for each in by_step]
            scores = [point.score for point in points]
            mean = statistics.fmean(scores)
            found.append((statistics.fmean(map(x, points)), mean, min(scores), max(scores)))
        return found

    def error(self) -> float | None:
        """Returns the standard error of the last score: over the seeds, or of one run's responses,
        taken as right or wrong; None if unknown."""
        scores = [each.points[-1].score for each in self.members if each.points]
        if len(scores) > 1:
            return statistics.stdev(scores) / math.sqrt(len(scores))
        count, [score] = self.members[0].num_samples, scores or [-1.0]
        return math.sqrt(score * (1 - score) / count) if count and 0 <= score <= 1 else None

    def reached(self, score: float) -> list[ScoredStep | None]:
        """Returns each member's first point with that score; None if it did not get there."""
        return [next((p for p in m.points if p.score >= score), None) for m in self.members]


def collect(asked: Sequence[Path], *, heldout: str | None = None) -> list[Group]:
    """Reads runs, and tables in CSV, as groups in the order in which they are named.

    Args:
        heldout: the set to compare by; the job's first by default.

    Raises:
        ConfigError: one cannot be read, or has no such set.
    """
    members = [member for path in asked for member in _read(path, heldout)]
    alike = dict[str, list[ComparedRun]]()
    for each in members:
        key = each.name if each.settings is None else json.dumps(each.settings, default=str)
        alike.setdefault(key, []).append(each)
    return [Group(each) for each in alike.values()]


def differences(members: Sequence[ComparedRun]) -> dict[str, list[Any]]:
    """Returns the keys in which runs differ, with each run's value; None for a table."""
    known = [each.settings for each in members if each.settings is not None]
    keys = dict.fromkeys(key for each in known for key in each)
    return {
        key: [None if each.settings is None else each.settings.get(key) for each in members]
        for key in keys
        if len({json.dumps(each.get(key), default=str) for each in known}) > 1
    }


def _read(path: Path, heldout: str | None) -> list[ComparedRun]:
    return _read_table(path) if path.suffix == ".csv" else [_read_run(path, heldout)]


def _read_run(run_dir: Path, heldout: str | None) -> ComparedRun:
    paths = RunPaths(run_dir)
    config = read_resolved(paths.config)
    gpus = count_gpus(config)
    events = read_events(paths.events_folder, but=FREQUENT)
    scores = history.heldout(events, every_set=heldout is not None)
    if heldout is not None:
        sets = sorted({each.name for each in scores})
        scores = [each for each in scores if each.name == heldout]
        if not scores:
            raise ConfigError(f"--heldout {none_of(heldout, sets)}, in {run_dir.name}")
    done, spans = history.steps(events), history.attempts(events)
    points = dict[int, ScoredStep]()
    for each in scores:
        tokens = sum(step.get("num_tokens", 0) for step in done if step["step"] <= each.version)
        minutes = history.elapsed_s(spans, each.time) / 60
        points[each.version] = ScoredStep(
            each.version, minutes, each.reward, each.truncated, tokens, minutes * gpus / 60
        )
    # Copies of programs lie in the run; their folders are named after what they hold.
    job = json.dumps(read_json(paths.config) or {}).replace(f"{config.run_dir}/", "")
    flat = dict(changes.flat(json.loads(job)))
    return ComparedRun(
        run_dir.name,
        [points[step] for step in sorted(points)],
        [(e["step"], e["reward/mean"]) for e in done if e.get("reward/mean") is not None],
        {key: value for key, value in flat.items() if not _NOT_SETTINGS.fullmatch(key)},
        scores[-1].num_samples if scores else None,
    )


def _read_table(path: Path) -> list[ComparedRun]:
    """Reads a CSV with the columns of `to_csv`, of which `run`, `step`, `minutes` and `score` are
    needed."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        if lacking := [name for name in _NEEDED if not rows or name not in rows[0]]:
            raise ConfigError(
                f"{path}: lacks {', '.join(lacking)}; a table has {', '.join(_COLUMNS)}"
            )
        found = dict[str, list[ScoredStep]]()
        for row in rows:
            found.setdefault(row["run"], []).append(_point(row))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from None
    return [ComparedRun(name, sorted(points)) for name, points in found.items()]


def _point(row: Mapping[str, str]) -> ScoredStep:
    truncated, tokens, hours = (row.get(name) or None for name in _COLUMNS[5:])
    return ScoredStep(
        int(row["step"]),
        float(row["minutes"]),
        float(row["score"]),
        float(truncated) if truncated else None,
        int(tokens) if tokens else None,
        float(hours) if hours else None,
    )


def text(groups: Sequence[Group], *, score: float | None = None) -> str:
    """Formats a line per group, then the settings that differ.

    Args:
        score: also what it took to reach this one.
    """
    head = ["runs", "held-out", "by step", "best", "cut off", "minutes", "tokens", "GPU-hours"]
    lines = [tuple(head if score is None else [*head, f"to {score:g}"])]
    for group in groups:
        line = [group.label, *_cells(group)]
        lines.append(tuple(line if score is None else [*line, _cost(group.reached(score))]))
    said = align_lines(lines, left=1)
    if differing := differences([each.members[0] for each in groups]):
        rows = [("settings that differ", *(each.members[0].name for each in groups))]
        rows += [(key, *(_short(value) for value in values)) for key, values in differing.items()]
        said += ["", *align_lines(rows, left=1)]
    return "\n".join(said)


def _short(value: Any) -> str:  # noqa: ANN401
    return ends_of("-" if value is None else str(value), _VALUE_CHARACTERS)


def _cells(group: Group) -> Iterator[str]:
    drawn = group.curve(lambda point: point.step)
    lasts = [each.points[-1] for each in group.members if each.points]
    if not drawn or not lasts:
        yield from ("no held-out score", *"------")
        return
    error = group.error()
    yield f"{drawn[0][1]:.3f} → {drawn[-1][1]:.3f}" + (f" ± {error:.3f}" if error else "")
    yield f"{drawn[-1][0]:.0f}"
    yield f"{max(mean for _, mean, _, _ in drawn):.3f}"
    for values, form in (
        ([each.truncated for each in lasts], "{:.1%}"),
        ([each.minutes for each in lasts], "{:.1f}"),
        ([each.tokens for each in lasts], "{:,.0f}"),
        ([each.gpu_hours for each in lasts], "{:.2f}"),
    ):
        known = [value for value in values if value is not None]
        yield form.format(statistics.fmean(known)) if known else "-"


def _cost(points: Sequence[ScoredStep | None]) -> str:
    there = [each for each in points if each is not None]
    if not there:
        return "not reached"
    minutes = statistics.fmean(each.minutes for each in there)
    step = statistics.fmean(each.step for each in there)
    some = "" if len(there) == len(points) else f", {len(there)} of {len(points)}"
    return f"{minutes:.1f} min, step {step:.0f}{some}"


def _rows(groups: Sequence[Group]) -> Iterator[dict[str, Any]]:
    for group in groups:
        for member in group.members:
            for point in member.points:
                yield {"run": member.name, "group": group.label, **point._asdict()}


def to_json(groups: Sequence[Group]) -> str:
    said = {
        "settings": differences([each.members[0] for each in groups]),
        "groups": [asdict(group) | {"error": group.error()} for group in groups],
    }
    return json.dumps(said, default=str, indent=1)


def to_csv(groups: Sequence[Group]) -> str:
    """Returns every held-out score in a line, with the columns that `collect` reads."""
    out = io.StringIO()
    writer = csv.DictWriter(out, _COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(_rows(groups))
    return out.getvalue()


def plot(groups: Sequence[Group]) -> "Figure":
    """Draws held-out scores by step and by minutes, bands over seeds; below, rewards of batches."""
    has_rewards = any(member.rewards for group in groups for member in group.members)
    figure = picture.figure(10, 7 if has_rewards else 4)
    grid = figure.add_gridspec(2 if has_rewards else 1, 2)
    by_step, by_minute = figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[0, 1])
    _draw(by_step, groups, lambda point: point.step)
    _draw(by_minute, groups, lambda point: point.minutes)
    by_step.set(xlabel="step", ylabel="held-out score")
    by_minute.set(xlabel="minutes")
    if has_rewards:
        below = figure.add_subplot(grid[1, :])
        for number, group in enumerate(groups):
            for member in (each for each in group.members if each.rewards):
                steps, rewards = zip(*member.rewards, strict=True)
                colour = curve.HELDOUT[number % len(curve.HELDOUT)]
                below.plot(steps, curve.smooth(rewards), color=colour, linewidth=1.2)
        below.set(xlabel="step", ylabel="reward of the batch")
        below.grid(alpha=0.25)
    figure.legend(
        *by_step.get_legend_handles_labels(), loc="outside upper center", frameon=False,
        ncols=1 if max(len(each.label) for each in groups) > 45 else 3,
    )  # fmt: skip
    return figure


def _draw(axes: "Axes", groups: Sequence[Group], x: Callable[[ScoredStep], float]) -> None:
    for number, group in enumerate(groups):
        if drawn := group.curve(x):
            colour = curve.HELDOUT[number % len(curve.HELDOUT)]
            at, means, lows, highs = zip(*drawn, strict=True)
            axes.plot(at, means, color=colour, marker="o", markersize=4, label=group.label)
            if len(group.members) > 1:
                axes.fill_between(at, lows, highs, color=colour, alpha=0.2, linewidth=0)
    axes.grid(alpha=0.25)
