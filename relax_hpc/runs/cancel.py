"""Ends a run: everything it started, and nothing else."""

from collections.abc import Callable, Sequence
from pathlib import Path

from relax_hpc.errors import LaunchError
from relax_hpc.launch import local, record, slurm, states
from relax_hpc.paths import RunPaths
from relax_hpc.roles.table import joining
from relax_hpc.runs import status, verdict
from relax_hpc.runs.status import Launch


def cancel(run_dir: Path, say: Callable[[str], None] = lambda _: None) -> None:
    """Ends every job that `submit` and `resume` started for a run.

    Args:
        run_dir: of the run.
        say: is given a line for each job, newest first: what it was doing, what has become of it.

    Raises:
        ConfigError: not a run directory, or nothing was started in it.
        LaunchError: some may still run: Slurm refused or did not answer, a local process had to be
            killed, or the run is being started at this moment. The others were ended.
    """
    newest = record.read(run_dir)
    found = status.launches(newest)
    failures = []
    for launch in found:
        job = f"job {' and '.join(launch.record.leaders)}"
        try:
            say(f"{job}: {_end(launch)}")
        except LaunchError as error:
            failures.append(f"{job} may still run: {error}")
    if claim := record.unrecorded(RunPaths(run_dir), newest):
        failures.append(f"it is being started, see {claim}: cancel it again")
    if any(states.is_alive(launch.state) for launch in found):
        verdict.give(run_dir, newest.leader, "cancelled", "cancelled by relax-hpc cancel")
    if failures:
        raise LaunchError(f"{run_dir}: {'; '.join(failures)}")


def _end(launch: Launch) -> str:
    """Ends one launch and says what it was found to be."""
    record, was = launch.record, launch.state
    if record.is_elsewhere and states.is_alive(was):
        raise LaunchError(f"{launch.silence}; cancel it there")
    if record.controller is not None and not record.is_elsewhere:
        folders = [component.folder for component in record.components]
        for name in joining():
            folders += sorted((record.folder / name).glob(f"{name}-*"))
        local.cancel(record.controller, folders, record.leader)  # also what its script left
    elif states.is_alive(was):
        _cancel(record.leaders)
    if was == "COMPLETED":
        return "is complete, nothing is cancelled"
    if was == states.UNKNOWN:
        return "Slurm does not know it any more"
    return f"cancelled, was {was}" if states.is_alive(was) else f"had ended before, {was}"


def _cancel(leaders: Sequence[str]) -> None:
    """Ends all jobs of a launch, also if one of them cannot be."""
    failures = []
    for leader in leaders:
        try:
            slurm.cancel(leader)
        except LaunchError as error:
            failures.append(str(error))
    if failures:
        raise LaunchError("; ".join(failures))
