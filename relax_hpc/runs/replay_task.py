"""Entry of a task of a replay: `python -m relax_hpc.runs.replay_task RUN_DIR replay ...`.

It takes what `entry` takes; the run directory is that of the replay.
"""

from pathlib import Path

from relax_hpc.launch import entry
from relax_hpc.roles.context import TaskContext


def _run(run_dir: Path, context: TaskContext, bootstrap: str) -> None:
    from relax_hpc.roles import task
    from relax_hpc.roles.replay.role import REPLAY

    task.run(run_dir, context, bootstrap, REPLAY)


if __name__ == "__main__":
    entry.main(_run)
