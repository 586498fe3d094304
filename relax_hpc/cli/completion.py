"""Completes names in a shell: runs, jobs, profiles, presets, keys and their values."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any


def names_of_runs(incomplete: str) -> list[str]:
    from relax_hpc.launch import known_runs

    return complete((run.name for run in known_runs.everywhere()), incomplete)


def names_of_jobs(incomplete: str) -> list[str]:
    """Names of included jobs."""
    from relax_hpc.config import job_file

    return complete(job_file.list_jobs(), incomplete)


def names_of_profiles(incomplete: str) -> list[str]:
    """Names of included profiles."""
    from relax_hpc.launch.profiles import PROFILES

    return complete((path.stem for path in PROFILES.glob("*.toml")), incomplete)


def names_of_presets(incomplete: str) -> list[str]:
    from relax_hpc.algorithms.presets import PRESETS

    return complete(PRESETS, incomplete)


def names_of_components(ctx: Any, args: list[str], incomplete: str) -> list[str]:  # noqa: ANN401
    """Components of the run on the command line."""
    from relax_hpc.errors import RelaxError
    from relax_hpc.launch import record

    try:
        found = record.read(_run_dir(ctx, "run")).components
    except (RelaxError, OSError):
        return []
    return complete([*(each.name for each in found), "job"], incomplete)


def names_of_sets(ctx: Any, args: list[str], incomplete: str) -> list[str]:  # noqa: ANN401
    """Held-out sets of the run on the command line."""
    from relax_hpc.errors import RelaxError
    from relax_hpc.runtime.files.records import read_json
    from relax_hpc.runtime.paths import RunPaths

    try:
        job = read_json(RunPaths(_run_dir(ctx, "subject")).config) or {}
    except (RelaxError, OSError, ValueError):
        return []
    return complete(job.get("eval", {}), incomplete)


def _run_dir(ctx: Any, argument: str) -> Path:  # noqa: ANN401
    from relax_hpc.launch import known_runs

    # Who is in the middle of an option has the arguments before it left over.
    name = str(ctx.params.get(argument) or next(iter(ctx.args), ""))
    places = [Path(name), known_runs.RUNS / name, *known_runs.find_runs(name)]
    return next(filter(known_runs.is_run, places), Path(name))


def complete(names: Iterable[str], incomplete: str) -> list[str]:
    """Returns the names with a prefix, sorted."""
    return sorted({name for name in names if name.startswith(incomplete)})
