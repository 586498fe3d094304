"""Completes names in a shell: runs, jobs, profiles, presets, keys and their values."""

import re
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


def names_of_keys(incomplete: str) -> list[str]:
    """Keys and tables of a job with this prefix."""
    from relax_hpc.cli.keys import all_keys, prefixes

    return complete((name for key in all_keys() for name in prefixes(key.name)), incomplete)


def settings(incomplete: str) -> list[str]:
    """Completes `--set`: "section.key=", and after the "=" the values, if they are few."""
    from relax_hpc.cli.keys import all_keys

    types = {_chosen(key.name): key.type for key in all_keys()}
    name, is_set, _ = incomplete.partition("=")
    if not is_set:
        return complete((f"{key}=" for key in types if "<" not in key), incomplete)
    if name == "algorithm.preset":
        values = names_of_presets("")
    elif types.get(name) == "boolean":
        values = ["true", "false"]
    else:
        values = re.findall('"([^"]*)"', types.get(name, ""))
    return complete((f"{name}={value}" for value in values), incomplete)


def _chosen(key: str) -> str:
    """Replaces user-defined names in a key by names that every job has."""
    return key.replace("engines.<name>", "engines.rollout").replace("<component>", "actor")


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
