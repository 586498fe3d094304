"""Ends everything that a run started, and nothing else."""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from relax_hpc.errors import LaunchError
from relax_hpc.launch import local, record, requeue, slurm, states
from relax_hpc.roles.table import joining
from relax_hpc.runs import status, verdict
from relax_hpc.runs.status import Launch
from relax_hpc.runtime.files import permissions
from relax_hpc.runtime.files.records import read_json, retract, write_json, write_json_once
from relax_hpc.runtime.files.storage import names
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.runtime.text import argument

_POLL_S = 0.5
_TRIES = 3
"""A requeue may happen between a cancel and the next look."""


def save(run_dir: Path, within_s: float, say: Callable[[str], None] = lambda _: None) -> bool:
    """Lets a run save as before an announced end, but without a requeue: trainer and critic the
    step under way, rollout its responses. They then wait, to be cancelled.

    Args:
        within_s: longest wait; if it passes, the run goes on.
        say: gets a line about what was saved, or why nothing was.

    Returns:
        Whether all is saved, or there was nothing to save.

    Raises:
        ConfigError: not a run directory, or nothing was started in it.
    """
    paths, found = RunPaths(run_dir), status.decisive(status.of_run(run_dir))
    attempts = _attempts(paths, found.record.leaders) if states.is_alive(found.state) else []
    trained = [each for each in attempts if read_json(paths.saves(each)) is not None]
    if not trained:
        say("no trainer is at work: nothing to save")
        return True
    with permissions.set_umask(permissions.umask_of(paths.root)):
        for attempt in attempts:
            _announce(paths.ending(attempt))
        deadline = time.monotonic() + within_s
        while late := [each for each in attempts if requeue.is_unsaved(_saves(paths, each))]:
            if time.monotonic() >= deadline:
                break
            time.sleep(_POLL_S)
        step = max((read_json(paths.saves(each)) or {}).get("step") or 0 for each in trained)
        name = f"step_{step:08d}"
        if not late and (step == 0 or name in names(paths.checkpoints)):
            say(f"saved: {paths.checkpoints / name}" if step else "no step is done yet")
            return True
        why = f"was not saved within {within_s:g} s" if late else f"step {step} could not be saved"
        for attempt in attempts:
            _take_back(paths.ending(attempt), f"relax-hpc cancel --save: {why}")
    say(f"{why}: nothing is cancelled, the run goes on; see relax-hpc logs {argument(run_dir)}")
    return False


def _attempts(paths: RunPaths, leaders: Sequence[str]) -> list[str]:
    """Returns the newest attempt of each job whose tasks have said that they will save."""
    newest = dict[str, int]()
    for name in names(paths.control):
        if found := re.fullmatch(r"(?:saves|keeps)-(?:critic-)?(.+)\.(\d+)(?:-\d+)?\.json", name):
            newest[found[1]] = max(newest.get(found[1], 0), int(found[2]))
    return [f"{each}.{newest[each]}" for each in leaders if each in newest]


def _saves(paths: RunPaths, attempt: str) -> list[Path]:
    return [paths.saves(attempt), paths.critic_saves(attempt), *paths.all_keeps(attempt)]


def _announce(ending: Path) -> None:
    """Announces the end of an attempt, unless Slurm did already."""
    if "refused" in (read_json(ending) or {}):
        retract(ending)
    write_json_once(ending, {"time": time.time(), "cancel": True})


def _take_back(ending: Path, why: str) -> None:
    said: Mapping[str, object] = read_json(ending) or {}
    if "cancel" in said:  # else it is Slurm's by now
        write_json(ending, {**said, "refused": why})


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
