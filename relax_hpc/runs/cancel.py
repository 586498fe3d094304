"""Ends everything that a run started, and nothing else."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from relax_hpc.errors import LaunchError
from relax_hpc.launch import local, record, slurm, states
from relax_hpc.roles.table import joining
from relax_hpc.runs import status, verdict
from relax_hpc.runs.status import Launch
from relax_hpc.runtime.files import permissions
from relax_hpc.runtime.files.records import write_json
from relax_hpc.runtime.paths import RunPaths

_TRIES = 3
"""A requeue may happen between a cancel and the next look."""


def cancel(run_dir: Path, say: Callable[[str], None] = lambda _: None) -> None:
    """Ends every job that `submit` and `resume` started for a run.

    Args:
        say: gets a line for each job, newest first: its state, and what was done.

    Raises:
        ConfigError: not a run directory, or nothing was started in it.
        LaunchError: some may still run: Slurm refused or did not answer, a local process had to be
            killed, or the run is just being started. The others were ended.
    """
    newest, paths = record.read(run_dir), RunPaths(run_dir)
    found = status.launches(newest)
    failures, ended = [], []
    for launch in found:
        job = f"job {' and '.join(launch.record.leaders)}"
        try:
            say(f"{job}: {_end(paths, launch)}")
            ended.append(launch)
        except LaunchError as error:
            failures.append(f"{job} may still run: {error}")
    if claim := record.find_unrecorded(paths, newest):
        failures.append(f"it is being started, see {claim}: cancel it again")
    if any(states.is_alive(launch.state) for launch in ended):
        verdict.give(run_dir, newest.leader, "cancelled", "cancelled by relax-hpc cancel")
    if failures:
        raise LaunchError(f"{run_dir}: {'; '.join(failures)}")


def _end(paths: RunPaths, launch: Launch) -> str:
    """Ends one launch and describes its state."""
    record, was = launch.record, launch.state
    if record.is_elsewhere and states.is_alive(was):
        raise LaunchError(f"{launch.silence}; cancel it there")
    if states.is_alive(was):
        _say_so(paths, record.leaders)
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


def _say_so(paths: RunPaths, leaders: Sequence[str]) -> None:
    """Tells the tasks, which may outlive scancel for a while, not to requeue."""
    # A full disk is a reason to cancel a run, and must not be in the way.
    with suppress(OSError), permissions.set_umask(permissions.umask_of(paths.root)):
        for leader in leaders:
            write_json(paths.cancellation(leader), {"time": time.time()})


def _cancel(leaders: Sequence[str]) -> None:
    """Ends all jobs of a launch, again if one is requeued meanwhile.

    Raises:
        LaunchError: one may still run.
    """
    for _ in range(_TRIES):
        _scancel(leaders)
        answer = states.in_queue(leaders)
        if answer.silence:
            raise LaunchError(f"nobody says so after scancel ({answer.silence}); cancel it again")
        found = {each.job_id: each.state for each in answer.known.values()}
        back = [name for name, state in found.items() if _goes_on(state)]
        if not back:
            return
    raise LaunchError(f"{back[0]} is {found[back[0]]} again after scancel; cancel it again")


def _goes_on(state: str) -> bool:
    return state == "RUNNING" or states.is_waiting(state)


def _scancel(leaders: Sequence[str]) -> None:
    """Cancels several jobs, even if one of them fails."""
    failures = []
    for leader in leaders:
        try:
            slurm.cancel(leader)
        except LaunchError as error:
            failures.append(str(error))
    if failures:
        raise LaunchError("; ".join(failures))
