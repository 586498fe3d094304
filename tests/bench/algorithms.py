"""Every preset on the same small task, at several lags: does it learn, and how far does it go?

    python tests/bench/algorithms.py --plot docs/images/algorithms.png > table.md

Each has a run of its own, one after the other on this machine. Each result is written down at once,
so that the same command goes on where it was broken off.
"""

import argparse
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from relax_hpc.algorithms import presets as known
from relax_hpc.algorithms.algorithm import algorithm_of
from relax_hpc.algorithms.distill import COLUMN
from relax_hpc.cli.bench import modes
from relax_hpc.cli.bench.report import machine
from relax_hpc.config import job_file
from relax_hpc.config.run import JobConfig
from relax_hpc.errors import ConfigError, RelaxError, first_line, none_of
from relax_hpc.launch import states, submit
from relax_hpc.runs import status
from relax_hpc.runtime.files.records import read_json, write_json
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.runtime.telemetry import history, picture
from relax_hpc.runtime.telemetry.events import Event, read_events

PRESETS = tuple(
    name for name in known.PRESETS if COLUMN not in algorithm_of(preset=name).needs.columns
)
"""Presets that learn from rewards; a task has no teacher."""
AIM = 0.9
"""Held-out reward that a preset should reach in 100 steps at lag 1."""
_COLORS = ("#1f5fa8", "#d9660f", "#555555", "#2f8f4e")
_CRITICS, _CRITIC = ("ppo",), {"lr": 1e-3, "warmup_steps": 3}
"""Presets that need a critic, and the one that they are given, as in jobs/tiny."""
_LOOK_S = 1.0
_SHARES = ("loss/clip_fraction", "loss/masked_fraction", "loss/importance_rejected")
_EFFECTIVE = "loss/effective_sample"


@dataclass(frozen=True)
class Trial:
    """One preset at one lag."""

    preset: str
    lag: int
    steps: int
    """Steps that were asked for."""

    @property
    def name(self) -> str:
        return f"{self.preset.replace('_', '-')}-lag{self.lag}-steps{self.steps}"


@dataclass(frozen=True)
class Result:
    """Figures of a trial; None where there is nothing to say."""

    preset: str
    lag: int
    steps: int
    before: float | None = None
    """Held-out reward of the initial policy."""
    after: float | None = None
    """Held-out reward of the last policy."""
    reached: int | None = None
    """Policy of the first evaluation at which the held-out reward was at least `AIM`."""
    bounded: float | None = None
    """Share of trained tokens that the loss clips or leaves out, or the correction rejects."""
    staleness: float | None = None
    """Mean over the steps."""
    effective: float | None = None
    """Effective sample size of a token, mean over the steps; see `ratios.settle`."""
    minutes: float | None = None
    failure: str = ""
    """Why there is no result; empty if there is one."""


def trials(presets: Sequence[str], lags: Sequence[int], steps: int) -> list[Trial]:
    """All combinations; all presets if none is named."""
    if unknown := [name for name in presets if name not in PRESETS]:
        raise ConfigError(f"--preset {unknown[0]}: {none_of(unknown[0], PRESETS)}")
    return [Trial(preset, lag, steps) for lag in lags for preset in presets or PRESETS]


def measure(
    wanted: Iterable[Trial],
    job: Path,
    folder: Path,
    *,
    overrides: Sequence[str] = (),
    limit_s: float,
    say: Callable[[str], None] = lambda _: None,
) -> list[Result]:
    """Runs what was not run before.

    Args:
        job: file of the task; presets are taken as they are, whatever its [algorithm] says.
        folder: of the results and, meanwhile, of the runs; those that fail stay there.
        overrides: further settings of all jobs; results do not know of them: use another folder.
        limit_s: a run that takes longer is ended, and has failed.
        say: is told what begins and what came of it.
    """
    results = []
    for trial in wanted:
        path = folder / f"{trial.name}.json"
        known: dict[str, Any] | None = read_json(path)
        if known is None:
            say(f"{trial.name}: begins")
            result = _run(trial, job, folder, overrides, limit_s)
            write_json(path, asdict(result))
        else:
            result = Result(**known)
        say(f"{trial.name}: {result.failure or f'held-out reward {_figure(result.after)}'}")
        results.append(result)
    return results


def task(trial: Trial, job: Path, folder: Path, overrides: Sequence[str] = ()) -> JobConfig:
    """The job of a trial: the task with the preset as it is, and a critic if that needs one."""
    tree = job_file.read_toml(job) | {"algorithm": {"preset": trial.preset}}
    if trial.preset in _CRITICS:
        tree.setdefault("critic", dict(_CRITIC))
    settings = [
        *overrides,
        f"name={trial.name}",
        f"run_root={folder.absolute()}",
        f"schedule.max_staleness={trial.lag}",
        f"schedule.num_steps={trial.steps}",
    ]
    return job_file.with_overrides(tree, settings, source=str(job))


def _run(trial: Trial, job: Path, folder: Path, overrides: Sequence[str], limit_s: float) -> Result:
    run_dir = folder.absolute() / trial.name
    modes.clear(run_dir)
    try:
        submit.submit(task(trial, job, folder, overrides), local=True)
        return _followed(trial, run_dir, limit_s)
    except RelaxError as error:
        return Result(**asdict(trial), failure=first_line(error))


def _followed(trial: Trial, run_dir: Path, limit_s: float) -> Result:
    """Waits until a run is over; one that is not when we have to go is ended."""
    start = time.monotonic()
    with modes.follow(run_dir):
        while not states.is_over(status.job_state(run_dir)):
            if time.monotonic() - start > limit_s:
                return Result(**asdict(trial), failure=f"did not end within {limit_s / 60:g} min")
            time.sleep(_LOOK_S)
    found = status.collect(run_dir)
    if found.state != "COMPLETED":
        said = " ".join(found.reason.split()) or found.state
        return Result(**asdict(trial), failure=said, minutes=(time.monotonic() - start) / 60)
    result = _result(trial, read_events(RunPaths(run_dir).events_folder), found.progress)
    shutil.rmtree(run_dir)
    return result


def _result(trial: Trial, events: Sequence[Event], progress: dict[str, Any]) -> Result:
    done, points = history.steps(events), history.heldout(events)
    times = [event["time"] for event in events]
    shares = [sum(event.get(name) or 0.0 for name in _SHARES) for event in done]
    return Result(
        **asdict(trial),
        before=progress["heldout_before"],
        after=progress["heldout_after"],
        reached=next((point.version for point in points if point.reward >= AIM), None),
        bounded=_mean(shares),
        staleness=_mean([event.get("staleness/mean") or 0.0 for event in done]),
        effective=_mean([event[_EFFECTIVE] for event in done if event.get(_EFFECTIVE)]),
        minutes=(max(times) - min(times)) / 60 if times else None,
    )


def markdown(results: Sequence[Result]) -> str:
    """A table of the results, a failure being a row as well."""
    lines = [
        f"| preset | lag | held-out before | after | {AIM:g} at step | bounded tokens "
        "| effective sample | staleness | minutes | |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for each in results:
        verdict = f"failed: {each.failure.replace('|', '/')}" if each.failure else ""
        cells = (
            f"`{each.preset}`", str(each.lag), _figure(each.before), _figure(each.after),
            "" if each.reached is None else str(each.reached),
            "" if each.bounded is None else f"{100 * each.bounded:.1f} %",
            _figure(each.effective), _figure(each.staleness), _figure(each.minutes, 1), verdict,
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(results: Sequence[Result], path: Path, title: str) -> Path:
    """A point for each lag in the row of its preset; a cross at 0 is a run that failed."""
    presets = list(dict.fromkeys(each.preset for each in results))
    lags = sorted({each.lag for each in results})
    figure = picture.figure(8, 1.2 + 0.26 * len(presets))
    axes = figure.subplots()
    for number, lag in enumerate(lags):
        color = _COLORS[number % len(_COLORS)]
        shift = 0.12 * (2 * number - len(lags) + 1)
        there = [each for each in results if each.lag == lag]
        for failed in (False, True):
            shown = [each for each in there if (each.after is None) == failed]
            axes.plot(
                [each.after or 0.0 for each in shown],
                [presets.index(each.preset) + shift for each in shown],
                "x" if failed else "o", color=color, label="" if failed else f"lag {lag}",
            )  # fmt: skip
    before = [each.before for each in results if each.before is not None]
    if before:
        axes.axvline(sum(before) / len(before), color="grey", linestyle=":", label="before")
    axes.axvline(AIM, color="black", linewidth=0.8, label=f"{AIM:g}")
    axes.set_yticks(range(len(presets)), presets)
    axes.invert_yaxis()
    axes.set_xlim(-0.02, 1.02)
    axes.set_xlabel("held-out reward of the last policy")
    axes.set_title(title, fontsize=9)
    axes.grid(axis="x", alpha=0.25)
    axes.legend(loc="lower left", fontsize=8)
    return picture.save(figure, path)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _figure(value: float | None, digits: int = 3) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--preset", action="append", default=[], help="repeatable; else all")
    parser.add_argument(
        "--lag",
        type=int,
        action="append",
        help="of schedule.max_staleness; repeatable; else 1 and 4",
    )
    parser.add_argument("--steps", type=int, default=100, help="of every run")
    parser.add_argument("--job", type=Path, default=Path("jobs/demo.toml"), help="the task")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("runs/bench-algorithms"),
        help="results; what is done there is not done again",
    )
    parser.add_argument("--limit", type=float, default=30.0, help="minutes of a run")
    parser.add_argument("--set", action="append", default=[], help="section.key=value; repeatable")
    parser.add_argument("--plot", type=Path, help="also draw the rewards to this PNG")
    args = parser.parse_args()
    try:
        results = measure(
            trials(args.preset, args.lag or [1, 4], args.steps), args.job, args.folder,
            overrides=args.set, limit_s=60 * args.limit,
            say=lambda text: print(text, file=sys.stderr),
        )  # fmt: skip
    except RelaxError as error:
        sys.exit(str(error))
    print(markdown(results))
    if args.plot is not None:
        plot(results, args.plot, f"{args.job.name}, {args.steps} steps; {machine()}")


if __name__ == "__main__":
    main()
