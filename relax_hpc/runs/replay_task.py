"""Runs a task of a replay: `python -m relax_hpc.runs.replay_task RUN_DIR replay ...`.

Takes the arguments of `entry`; the run directory is the replay's.
"""

from pathlib import Path

from relax_hpc.launch import entry
from relax_hpc.roles.context import TaskContext


def _run(run_dir: Path, context: TaskContext, bootstrap: str) -> None:
    from relax_hpc.roles import task
    from relax_hpc.roles.actor.role import REPLAY

    task.run(run_dir, context, bootstrap, REPLAY)


if __name__ == "__main__":
    entry.main(_run)
