"""Ends a run: everything it started, and nothing else."""

from pathlib import Path

from relax_hpc.launch import local, record, slurm


def cancel(run_dir: Path) -> None:
    """Ends the job of a run; a run that has ended is left as it is.

    Raises:
        ConfigError: not a run directory, or nothing was started in it.
        LaunchError: Slurm refused, or a local process had to be killed.
    """
    launched = record.read(run_dir)
    if launched.controller is None:
        slurm.cancel(launched.leader)
        return
    folders = [component.folder for component in launched.components]
    folders += sorted((launched.folder / "extra").glob("extra-*"))
    local.cancel(launched.controller, folders, launched.leader)
