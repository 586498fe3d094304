"""Starts a run again that ended before its last step."""

from pathlib import Path

from relax_hpc import permissions
from relax_hpc.config.run import JobConfig
from relax_hpc.errors import ConfigError, LaunchError, RelaxError
from relax_hpc.job_file import read_resolved
from relax_hpc.launch import record, submit
from relax_hpc.launch.placement import place
from relax_hpc.launch.slurm import MaybeQueuedError
from relax_hpc.paths import RunPaths
from relax_hpc.run_secret import RunSecret
from relax_hpc.runs import status


def resume(run_dir: Path, *, local: bool = False, ended: bool = False) -> submit.Submission:
    """Starts a run again that ended before its last step: cancelled, out of time, or given up.

    It goes on from its newest checkpoint and from what stands on its bus, with the job it was
    submitted with.

    Args:
        run_dir: of the run.
        local: run here even though there is a Slurm.
        ended: the caller knows that a job has ended of which Slurm says nothing.

    Raises:
        ConfigError: not a run directory, complete, or it may still be running.
        LaunchError: Slurm refused it.
    """

    paths = RunPaths(run_dir.absolute())
    config = read_resolved(paths.config)
    permissions.check_own(paths.root, paths.submission)
    newest = record.read(paths.root)
    found = status.launches(newest)
    if alive := status.alive(run_dir, found, sure=ended):
        raise ConfigError(
            f"{run_dir}: is {alive.state.lower()} as job {alive.record.leader}; "
            f"cancel it first: relax-hpc cancel {run_dir}"
        )
    if any(each.state == "COMPLETED" for each in found):
        raise ConfigError(f"{run_dir}: is complete; submit a run of another name")
    number = record.claim(paths, newest.number + 1, sure=ended)
    planned = submit.plan(submit.mode_of(local=local), config, place(config), number)
    try:
        _make_private(config, paths)
        with permissions.masked(permissions.UMASKS[config.launch.share]):
            return submit.start(planned, config, paths, newest)
    except MaybeQueuedError:
        raise  # the claim stays: there may be a job
    except (OSError, RelaxError) as error:
        paths.launch_claim(number).unlink()
        if isinstance(error, RelaxError):
            raise
        raise LaunchError(
            f"{run_dir}: cannot be written to: {error.strerror}; nothing was started. "
            "Free space or quota and resume it again"
        ) from error


def _make_private(config: JobConfig, paths: RunPaths) -> None:
    """Gives a run of an older version, which everybody may read, what newer ones are made with."""
    if not paths.secret.exists():
        paths.root.chmod(0o777 & ~permissions.UMASKS[config.launch.share])
        RunSecret.create(paths.secret)
