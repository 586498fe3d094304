"""Runs a job in several modes on this machine: with some lag, or colocated.

Colocated engines and trainer take turns on all GPUs; otherwise each side has its own. A run is
ended after the measured steps. Each result is saved at once, so a repeated command continues.
"""

import re
import shutil
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from relax_hpc.cli.bench.long_tail import LengthDistribution
from relax_hpc.config import job_file
from relax_hpc.config.engines import OWN_UNDER_LEASE
from relax_hpc.config.run import RunConfig
from relax_hpc.errors import ConfigError, RelaxError, first_line
from relax_hpc.inference.sglang.launch import size_of
from relax_hpc.launch import states, submit
from relax_hpc.runs import cancel, status
from relax_hpc.runtime.files.records import read_json, write_json
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.runtime.telemetry import history, picture, timeline
from relax_hpc.runtime.telemetry.events import Event, read_events

COLOCATE = "colocate"
MODES = (COLOCATE, "staleness-0", "staleness-1", "staleness-2")
_LOOK_S = 0.5
Span = tuple[float, float]


class Mode(NamedTuple):
    """A way to share GPUs between sampling and training."""

    name: str

    @property
    def is_colocated(self) -> bool:
        return self.name == COLOCATE

    @property
    def lag(self) -> int:
        return 0 if self.is_colocated else int(self.name.partition("-")[2])


class ModeWork(NamedTuple):
    """The same work in every mode."""

    lengths: LengthDistribution
    """Response lengths."""
    warm_up: int
    """Steps before the measured ones."""
    steps: int
    """Measured steps: a multiple of lag + 1, the number of batches that are sampled together and
    finish at about the same time."""

    @property
    def last(self) -> int:
        return self.warm_up + self.steps


def modes_of(names: Sequence[str]) -> list[Mode]:
    """Returns the modes of these names; by default all of `MODES`.

    Raises:
        ConfigError: there is no such mode.
    """
    for name in names:
        if name != COLOCATE and not re.fullmatch(r"staleness-\d+", name):
            raise ConfigError(f"--mode {name}: there is none; use {COLOCATE} or staleness-N")
    return [Mode(name) for name in names or MODES]


def job_of(
    mode: Mode, work: ModeWork, path: Path, folder: Path, overrides: Sequence[str]
) -> RunConfig:
    """Builds the job of a mode.

    Args:
        path: of a job with separate GPUs for engines and trainer.
        folder: for its run directory, and the file of its environment.
        overrides: further settings for all modes.

    Raises:
        ConfigError: it is another job, or cannot be run in this mode.
    """
    if work.steps % (mode.lag + 1):
        raise ConfigError(
            f"--steps {work.steps}: in {mode.name} {mode.lag + 1} batches are ready at a time, "
            "and a part of these would look faster or slower than it is; use a multiple, e.g. "
            f"{6 if mode.lag < 3 else 2 * (mode.lag + 1)}"
        )
    base = job_file.load(path, overrides)
    if not isinstance(base, RunConfig):
        raise ConfigError(f"{path}: a job with [sft] samples nothing; name one of another kind")
    if base.rollout_pool.placement != "own":
        raise ConfigError(
            f"{path}: engines.rollout.placement = {base.rollout_pool.placement!r}; use 'own', the "
            f"mode {COLOCATE} is made of it"
        )
    tree = base.model_dump(mode="json")
    tree |= {"name": mode.name, "run_root": str(folder.absolute()), "eval": {}}
    tree["rollout"] |= {
        "environment": work.lengths.write(folder),
        "max_new_tokens": work.lengths.p99,
        "advanced": tree["rollout"]["advanced"] | {"over_sampling": 0.0},
    }
    # Sampling goes on beside the last step that is measured, as it does beside all before.
    num_steps = work.last + mode.lag + 1
    steps = {"num_steps": num_steps, "max_staleness": mode.lag, "over_age": "wait"}
    tree["schedule"] |= steps
    tree["algorithm"] |= {"groups": {"name": "as_sampled", "truncated": "keep"}}
    tree["actor"] |= {"save_every": num_steps}
    tree["launch"] |= {"max_restarts": 0}
    tree["prompts"] |= {"retire_after": 0}
    if mode.is_colocated:
        _share(base, tree, path)
    made = job_file.validate(tree, source=f"{path} as {mode.name}")
    assert isinstance(made, RunConfig)
    return made


def _share(base: RunConfig, tree: dict[str, Any], path: Path) -> None:
    """Gives the GPUs of both sides to both: more engines, and more replicas of the trainer."""
    pool, layout = base.rollout_pool, base.actor.layout
    size = size_of(pool.args).gpus if pool.kind == "sglang" else 1
    total = size * pool.count + layout.world_size
    count, rest = divmod(total, size)
    replicas, left = divmod(total * layout.data_parallel, layout.world_size)
    if rest or left:
        raise ConfigError(
            f"{path}: its {size * pool.count} ranks of engines and {layout.world_size} of the "
            f"actor are {total}; in mode {COLOCATE} engines of {size} and replicas of "
            f"{layout.world_size // layout.data_parallel} have to fill them; use other numbers"
        )
    asked = pool.resources.model_dump(mode="json", exclude_unset=True)
    tree["engines"]["rollout"] |= {
        "placement": "actor",
        "count": count,
        "engines_per_task": count,
        "resources": {key: asked[key] for key in OWN_UNDER_LEASE if key in asked},
    }
    tree["actor"]["layout"]["data_parallel"] = replicas
    on_gpus = base.actor.resources.gpus_per_node > 0
    tree["actor"]["resources"] |= {"nodes": 1, "gpus_per_node": total if on_gpus else 0}


@dataclass(frozen=True)
class ModeFigures:
    """One mode; seconds per step, the mean unless noted."""

    mode: str
    steps: int = 0
    """Measured steps."""
    num_tokens: int = 0
    """Trained tokens in them, prompts included."""
    median_s: float = 0.0
    """From the end of one step to that of the next; the median."""
    step_s: float = 0.0
    """The same, the mean: the time of the same work in every mode."""
    trained_per_s: float = 0.0
    """Tokens per second."""
    sampled_per_s: float = 0.0
    """Tokens per second, of the trained responses."""
    wait_data_s: float = 0.0
    """The trainer waits for a batch."""
    wait_update_s: float = 0.0
    """The trainer waits for engines to have the weights."""
    wait_lease_s: float = 0.0
    """The trainer waits for the GPUs."""
    engines_idle_s: float = 0.0
    """Engines wait for the next policy: all allowed samples are done, or they sleep."""
    engines_paused_s: float = 0.0
    """Sampling engines are paused for new weights."""
    first_step_s: float = 0.0
    """From the first sign of a task to the end of step 1."""
    failure: str = ""
    """Why there are no figures; empty otherwise."""


def read(mode: Mode, work: ModeWork, prompts_per_step: int, run_dir: Path) -> ModeFigures:
    """Reads the figures of a run that has done all measured steps."""
    events = read_events(RunPaths(run_dir).events_folder)
    ends = {event["step"]: event["time"] for event in history.steps(events)}
    steps = [e for e in history.steps(events) if work.warm_up < e["step"] <= work.last]
    begin, end = ends[work.warm_up], ends[work.last]
    seconds, count = end - begin, work.steps
    gaps = [ends[event["step"]] - ends[event["step"] - 1] for event in steps]

    def mean(name: str) -> float:
        spent: list[float] = [event.get(f"time/{name}", 0.0) for event in steps]
        return sum(spent) / count

    seen = timeline.read(run_dir, first=work.warm_up + 1, last=work.last)
    sampled = sum(event["response/mean"] * event["num_trajectories"] for event in steps)
    idle = list(_idle(events, mode.lag, prompts_per_step, end))
    pauses = [[(p.start, p.start + p.seconds) for p in each] for each in seen.pauses.values()]
    paused = sum(_overlap(pause, (begin, end)) - _overlaps(pause, idle)
                 for each in pauses for pause in each)  # fmt: skip
    num_tokens = sum(event["num_tokens"] for event in steps)
    return ModeFigures(
        mode.name,
        steps=count,
        num_tokens=num_tokens,
        median_s=statistics.median(gaps),
        step_s=seconds / count,
        trained_per_s=num_tokens / seconds,
        sampled_per_s=sampled / seconds,
        wait_data_s=mean("wait"),
        wait_update_s=mean("publish"),
        wait_lease_s=mean("lease"),
        engines_idle_s=_overlaps((begin, end), idle) / count,
        engines_paused_s=max(paused, 0.0) / max(len(pauses), 1) / count,
        first_step_s=ends[1] - events[0]["time"],
    )


def _idle(events: Sequence[Event], lag: int, prompts_per_step: int, end: float) -> Iterator[Span]:
    """Yields times in which every allowed group is committed, up to `end`.

    The batch of step b may be sampled once there is version b - 1 - lag.
    """
    committed, version, since = 0, 0, None
    for event in events:
        if event["time"] > end:
            break
        if event["event"] == "shard":
            committed += event["num_groups"]
        elif event["event"] == "publish":
            version = max(version, event["version"])
        else:
            continue
        is_idle = committed >= prompts_per_step * (version + 1 + lag)
        if is_idle and since is None:
            since = event["time"]
        elif not is_idle and since is not None:
            yield since, event["time"]
            since = None
    if since is not None:
        yield since, end


def _overlap(one: Span, other: Span) -> float:
    return max(0.0, min(one[1], other[1]) - max(one[0], other[0]))


def _overlaps(one: Span, others: Sequence[Span]) -> float:
    """The overlap with disjoint spans."""
    return sum(_overlap(one, other) for other in others)


def speedup(figures: ModeFigures, results: Sequence[ModeFigures]) -> float | None:
    """Returns the speedup over colocated; None if unknown."""
    base = next((each for each in results if each.mode == COLOCATE and not each.failure), None)
    same = base is not None and base.num_tokens == figures.num_tokens
    return base.step_s / figures.step_s if base and same and not figures.failure else None


def markdown(results: Sequence[ModeFigures]) -> str:
    """Formats a table of the results, including failures."""
    lines = [
        "| mode | s/step, median | mean | x colocate | tokens/s trained | sampled "
        "| trainer waits for data [s] | update | lease | engines wait for the trainer [s] | update "
        "| first step [s] | |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    work = next((each.num_tokens for each in results if not each.failure), 0)
    for each in results:
        if each.failure:
            cells = [""] * 11 + [f"failed: {each.failure.replace('|', '/')}"]
        else:
            factor = speedup(each, results)
            cells = [
                f"{each.median_s:.2f}", f"{each.step_s:.2f}",
                "" if factor is None else f"{factor:.2f}",
                f"{each.trained_per_s:,.0f}", f"{each.sampled_per_s:,.0f}",
                f"{each.wait_data_s:.2f}", f"{each.wait_update_s:.2f}", f"{each.wait_lease_s:.2f}",
                f"{each.engines_idle_s:.2f}", f"{each.engines_paused_s:.2f}",
                f"{each.first_step_s:.0f}",
                "" if each.num_tokens == work else f"other work: {each.num_tokens:,} tokens",
            ]  # fmt: skip
        lines.append(f"| {each.mode} | {' | '.join(cells)} |")
    return "\n".join(lines)


def save(path: Path, results: Sequence[ModeFigures], work: ModeWork, machine: str) -> None:
    """Writes `{"machine", "work", "modes"}`, ratios included."""
    shown: dict[str, Any] = {
        "machine": machine,
        "work": work._asdict() | {"lengths": work.lengths._asdict()},
        "modes": [asdict(each) | {"times_colocate": speedup(each, results)} for each in results],
    }
    write_json(path, shown)


def measure(
    wanted: Iterable[Mode],
    work: ModeWork,
    job: Path,
    folder: Path,
    *,
    overrides: Sequence[str] = (),
    limit_s: float,
    say: Callable[[str], None] = lambda _: None,
) -> list[ModeFigures]:
    """Runs the modes without results.

    Args:
        wanted: in this order.
        folder: of results and runs; finished ones keep only their events.
        overrides: further settings of all jobs; results do not record them, so use another folder.
        limit_s: longer runs are ended, and have failed.
        say: gets progress messages.
    """
    results = []
    for mode in wanted:
        path = folder / f"{mode.name}.json"
        known: dict[str, Any] | None = read_json(path)
        if known is None:
            say(f"{mode.name}: begins")
            result = _run(mode, work, job, folder, overrides, limit_s, say)
            if not result.failure:
                write_json(path, asdict(result))
        else:
            result = ModeFigures(**known)
        say(f"{mode.name}: {result.failure or f'{result.step_s:.2f} s a step'}")
        results.append(result)
    return results


def plot(results: Iterable[ModeFigures], work: ModeWork, folder: Path, path: Path) -> Path:
    """Draws the measured steps, one mode above the other on the same scale."""
    picture.check(path)
    names = [each.mode for each in results if not each.failure]
    first, last = work.warm_up + 1, work.last
    seen = [timeline.read(folder / name, first=first, last=last) for name in names]
    return timeline.plot([each._replace(start=None) for each in seen], path)


def _run(
    mode: Mode,
    work: ModeWork,
    job: Path,
    folder: Path,
    overrides: Sequence[str],
    limit_s: float,
    say: Callable[[str], None],
) -> ModeFigures:
    run_dir = folder.absolute() / mode.name
    clear(run_dir)
    try:
        config = job_of(mode, work, job, folder, overrides)
        submit.submit(config, local=True)
        if failure := _failure(work, run_dir, limit_s, lambda text: say(f"{mode.name}: {text}")):
            return ModeFigures(mode.name, failure=failure)
        return _keep_results(mode, work, config, run_dir)
    except RelaxError as error:
        return ModeFigures(mode.name, failure=first_line(error))


def _failure(work: ModeWork, run_dir: Path, limit_s: float, say: Callable[[str], None]) -> str:
    """Waits until the steps are done, and ends the run. Returns the reason for a failure, or ""."""
    start, told = time.monotonic(), 0
    with follow(run_dir):
        while True:
            is_over = states.is_over(status.job_state(run_dir))
            events = read_events(RunPaths(run_dir).events_folder)
            done = history.present_step(events)
            if done > told:
                say(f"step {done} of {work.last} after {time.monotonic() - start:.0f} s")
                told = done
            if done >= work.last:
                return ""
            if is_over:
                found = status.collect(run_dir)
                return " ".join(found.reason.split()) or found.state
            if time.monotonic() - start > limit_s:
                minutes = f"{limit_s / 60:g} min"
                return f"step {work.last} was not done within {minutes}, {done} were"
            time.sleep(_LOOK_S)


def _keep_results(mode: Mode, work: ModeWork, config: RunConfig, run_dir: Path) -> ModeFigures:
    """Keeps only the figures and the events of a run."""
    found = read(mode, work, config.schedule.prompts_per_step, run_dir)
    events = RunPaths(run_dir).events_folder
    for each in run_dir.iterdir():
        if each.is_dir() and each != events:
            shutil.rmtree(each)
        elif each != events:
            each.unlink()
    return found


def clear(run_dir: Path) -> None:
    """Ends and removes the run of an interrupted command."""
    if run_dir.exists():
        with suppress(ConfigError):
            cancel.cancel(run_dir)
        shutil.rmtree(run_dir)


@contextmanager
def follow(run_dir: Path) -> Iterator[None]:
    """Ends the run after the block, unless it is over."""
    try:
        yield
    finally:
        if not states.is_over(status.job_state(run_dir)):
            cancel.cancel(run_dir)
