"""Entry of a task: `python -m relax_hpc.launch.entry FOLDER --start N --last-start M`.

What `submitit.core._submit` is for submitit, plus what a restart in place has to know.
"""

import argparse
import logging
import os
import pickletools
import sys
from pathlib import Path

from submitit import JobEnvironment
from submitit.core.submission import process_job
from submitit.core.utils import JobPaths

from relax_hpc import permissions
from relax_hpc.errors import LaunchError, RelaxError
from relax_hpc.launch import component
from relax_hpc.paths import RunPaths

log = logging.getLogger(__name__)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="submitit folder of the component")
    parser.add_argument("--start", type=int, required=True, help="starts of the step, from 1")
    parser.add_argument("--last-start", type=int, required=True, help="start that is not repeated")
    parser.add_argument("--first-rank", type=int, help="where several components are one step")
    parser.add_argument("--tasks", type=int, help="likewise: those of this component")
    args = parser.parse_args()
    try:
        check_folder(args.folder)
        call = JobPaths(args.folder, JobEnvironment().job_id).submitted_pickle
        permissions.check_own(call)
    except LaunchError as error:
        sys.exit(str(error))
    permissions.adopt(args.folder)
    if args.tasks is not None:
        within_component(args.folder, args.first_rank, args.tasks)
    component.start_count.set(args.start)
    component.last_start.set(args.last_start)
    run(args.folder)


def check_folder(folder: Path) -> None:
    """Refuses to run what somebody else may have put there: the folder, or one on the way to it.

    Raises:
        LaunchError: names it, and what to do.
    """
    job_folder = folder.absolute().parent
    paths = RunPaths(job_folder.parent)
    of_run = [paths.root] if paths.submission == job_folder else []  # toys have no run
    permissions.check_own(*of_run, job_folder, folder)


def within_component(folder: Path, first_rank: int, tasks: int) -> None:
    """Tells submitit of this component what Slurm says of a step over several components.

    Slurm names logs by ranks of the step, too: what is printed from here on goes to those that are
    named by ranks of the component, where everybody looks. The job's script is told which step it
    is, since it looks after that.
    """
    step_rank, job_id = int(os.environ["SLURM_PROCID"]), os.environ["SLURM_JOB_ID"]
    if step_rank == 0:
        step = f"{job_id}.{os.environ['SLURM_STEP_ID']} {os.getpid()}\n"
        (folder / f"{job_id}_step").write_text(step)
    rank = step_rank - first_rank
    os.environ["SLURM_PROCID"], os.environ["SLURM_NTASKS"] = str(rank), str(tasks)
    for stream, kind in ((sys.stdout, "out"), (sys.stderr, "err")):
        log_path = folder / f"{job_id}_{rank}_log.{kind}"
        with log_path.open("ab") as file:
            os.dup2(file.fileno(), stream.fileno())


def run(folder: Path) -> None:
    """Runs this task's share of the pickled call, unless its component has finished already."""
    os.environ["SUBMITIT_FOLDER"] = str(folder)
    environment = JobEnvironment()
    tasks = range(environment.num_tasks)
    results = [JobPaths(folder, environment.job_id, task).result_pickle for task in tasks]
    # All ranks or none: one that had finished must take part again when its peers start over. They
    # agree on which, since nobody removes a result unless one is missing.
    if all(map(succeeded, results)):
        log.info("finished before the job was requeued: nothing to do")
        return
    own = results[environment.global_rank]
    own.unlink(missing_ok=True)
    own.with_suffix(own.suffix + ".save_tmp").unlink(missing_ok=True)  # submitit refuses it
    try:
        process_job(folder)
    except RelaxError as error:
        if error.is_final:  # the job's script looks for it
            (folder / f"{environment.job_id}_{environment.global_rank}_final").touch()
        raise


def succeeded(result: Path) -> bool:
    """Whether a task left a result that is not an error.

    It is a pickle of (outcome, value), and may be somebody else's: its first text is the outcome,
    and nothing of it is executed.
    """
    try:
        parts = [argument for _, argument, _ in pickletools.genops(result.read_bytes())]
    except (FileNotFoundError, ValueError):  # none, or half of one
        return False
    return next((part for part in parts if isinstance(part, str)), "") == "success"


if __name__ == "__main__":
    main()
