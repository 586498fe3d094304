"""Submits a job many times: a grid of settings, and some seeds of each."""

import itertools
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from relax_hpc.config.run import JobConfig
from relax_hpc.errors import ConfigError
from relax_hpc.launch import record
from relax_hpc.launch import submit as launching
from relax_hpc.launch.preflight import with_free_name
from relax_hpc.runs import overview
from relax_hpc.runs.status import Watch

_MOST_CHARACTERS = 120
_POLL_S = 1.0
_OPEN, _CLOSE = "[{(", "]})"


class SweptRun(NamedTuple):
    """One run of a sweep."""

    name: str
    overrides: tuple[str, ...]


def plan(name: str, first_seed: int, overrides: Sequence[str], seeds: int) -> list[SweptRun]:
    """Returns the runs of every combination of values, and so many seeds of each.

    Args:
        overrides: section.key=value[,value...]; a comma in brackets or quotes is part of a value.

    Raises:
        ConfigError: two runs would have one name, or one is too long.
    """
    axes = [_values(each) for each in overrides]
    points = []
    for chosen in itertools.product(*axes):
        varied = [each for each, axis in zip(chosen, axes, strict=True) if len(axis) > 1]
        for seed in range(first_seed, first_seed + seeds):
            words = [name, *map(_word, varied), *([f"s{seed}"] if seeds > 1 else [])]
            points.append(SweptRun("-".join(words), (*chosen, f"seed={seed}")))
    names = [point.name for point in points]
    if twice := next((each for each in names if names.count(each) > 1), None):
        raise ConfigError(f"sweep: two runs would be called {twice}; give each value once")
    if long := next((each for each in names if len(each) > _MOST_CHARACTERS), None):
        raise ConfigError(f"sweep: {long}: is too long a name for a run; use fewer keys, or --name")
    return points


def _values(override: str) -> list[str]:
    """Returns an override for each of its values."""
    key, is_set, said = override.partition("=")
    if not is_set:
        return [override]  # the job's reader refuses it
    values, depth, quote = [""], 0, ""
    for each in said:
        if quote:
            quote = "" if each == quote else quote
        elif each in "'\"":
            quote = each
        else:
            depth += (each in _OPEN) - (each in _CLOSE)
        if each == "," and not depth and not quote:
            values.append("")
        else:
            values[-1] += each
    return [f"{key}={value.strip()}" for value in values]


def _word(override: str) -> str:
    key, _, value = override.partition("=")
    plain = re.sub(r"[^A-Za-z0-9.+-]+", "_", value.strip("'\"")).replace("+", "").strip("_")
    return f"{key.rpartition('.')[2].strip()}_{plain}"


def check(jobs: Sequence[JobConfig], *, local: bool, say: Callable[[str], None]) -> list[JobConfig]:
    """Returns the jobs with names that are free.

    Raises:
        ConfigError: one cannot work.
    """
    jobs = [with_free_name(job, say) for job in jobs]
    for number, job in enumerate(jobs):
        launching.submit(job, local=local, dry_run=True, say=say if number == 0 else lambda _: None)
    return jobs


def submit(
    jobs: Sequence[JobConfig],
    *,
    at_once: int,
    tag: str,
    local: bool,
    say: Callable[[str], None] = lambda _: None,
) -> Iterator[Path]:
    """Submits jobs, all checked before the first; yields each run's directory.

    Args:
        at_once: most of them that run at once. Slurm begins each further one after the end, of
            whichever kind, of the one so many places before it; without Slurm this waits.
        tag: for `ls` and `compare`.

    Raises:
        ConfigError: one of them cannot work; nothing was submitted.
        LaunchError: Slurm refused one; those before it are submitted.
    """
    is_local = launching.mode_of(local=local) == "local"
    jobs = check(jobs, local=local, say=say)
    found = list[Path]()
    for number, job in enumerate(jobs):
        before = found[number - at_once] if number >= at_once else None
        if before is not None and is_local:
            _wait(found, at_once)
        elif before is not None:
            job = _after(job, record.read(before).leaders)
        run_dir = launching.submit(job, local=local).run_dir
        overview.set_tags(run_dir, [tag])
        found.append(run_dir)
        yield run_dir


def _after(job: JobConfig, leaders: Sequence[str]) -> JobConfig:
    own = job.resources.dependency
    dependency = ",".join([*filter(None, [own]), f"afterany:{':'.join(leaders)}"])
    resources = job.resources.model_copy(update={"dependency": dependency})
    return job.model_copy(update={"resources": resources})


def _wait(run_dirs: Sequence[Path], at_once: int) -> None:
    watches = [Watch(run_dir) for run_dir in run_dirs]
    while sum(not watch.is_over() for watch in watches) >= at_once:
        time.sleep(_POLL_S)
