"""Runs a job in one mode after the other, on this machine.

A run is ended once the steps that are measured are done. What is done is written down at once, so
that the same command goes on where it was broken off.
"""

import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from relax_hpc.bench import local_run
from relax_hpc.bench.modes import figures, jobs
from relax_hpc.bench.modes.figures import Figures
from relax_hpc.bench.modes.jobs import Mode, Work
from relax_hpc.config.run import RunConfig
from relax_hpc.errors import RelaxError, first_line
from relax_hpc.launch import states, submit
from relax_hpc.paths import RunPaths
from relax_hpc.records import read_json, write_json
from relax_hpc.runs import status
from relax_hpc.telemetry import history, picture, timeline, timeline_plot
from relax_hpc.telemetry.events import read_events

_LOOK_S = 0.5


def measure(
    wanted: Iterable[Mode],
    work: Work,
    job: Path,
    folder: Path,
    *,
    overrides: Sequence[str] = (),
    limit_s: float,
    say: Callable[[str], None] = lambda _: None,
) -> list[Figures]:
    """Runs what was not run before.

    Args:
        wanted: in this order.
        work: the same in all of them.
        job: file of the job.
        folder: of the results, and of the runs; of one that is done only its events stay.
        overrides: further settings of all jobs; results do not know of them: use another folder.
        limit_s: a run that takes longer is ended, and has failed.
        say: is told what begins, how far it is, and what came of it.
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
            result = Figures(**known)
        say(f"{mode.name}: {result.failure or f'{result.step_s:.2f} s a step'}")
        results.append(result)
    return results


def plot(results: Iterable[Figures], work: Work, folder: Path, path: Path) -> Path:
    """Draws the steps that were measured, mode above mode on the same scale."""
    picture.check(path)
    names = [each.mode for each in results if not each.failure]
    first, last = work.warm_up + 1, work.last
    seen = [timeline.read(folder / name, first=first, last=last) for name in names]
    return timeline_plot.plot([each._replace(start=None) for each in seen], path)


def _run(
    mode: Mode,
    work: Work,
    job: Path,
    folder: Path,
    overrides: Sequence[str],
    limit_s: float,
    say: Callable[[str], None],
) -> Figures:
    run_dir = folder.absolute() / mode.name
    local_run.clear(run_dir)
    try:
        config = jobs.job(mode, work, job, folder, overrides)
        submit.submit(config, local=True)
        if failure := _failure(work, run_dir, limit_s, lambda text: say(f"{mode.name}: {text}")):
            return Figures(mode.name, failure=failure)
        return _kept(mode, work, config, run_dir)
    except RelaxError as error:
        return Figures(mode.name, failure=first_line(error))


def _failure(work: Work, run_dir: Path, limit_s: float, say: Callable[[str], None]) -> str:
    """Waits until the steps are done, and ends the run. Says why they are not; or nothing."""
    start, told = time.monotonic(), 0
    with local_run.followed(run_dir):
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


def _kept(mode: Mode, work: Work, config: RunConfig, run_dir: Path) -> Figures:
    """Keeps the figures and the events of a run, and nothing else of it."""
    found = figures.read(mode, work, config.schedule.prompts_per_step, run_dir)
    events = RunPaths(run_dir).events_folder
    for each in run_dir.iterdir():
        if each.is_dir() and each != events:
            shutil.rmtree(each)
        elif each != events:
            each.unlink()
    return found
