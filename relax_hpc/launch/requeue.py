"""A job that reaches its time limit, or is preempted, asks Slurm to start it again later.

Slurm announces both to every task. One of them acts: task 0 of the first component, since only the
first may be requeued, once, and that ends them all. What a run needs to go on is in the run
directory already, so the others work until Slurm ends them.
"""

import logging
import os
import signal
import sys
from pathlib import Path
from types import FrameType

from relax_hpc.launch.jobs import output_of, words_of

log = logging.getLogger(__name__)

SIGNAL, SIGNAL_AHEAD_S = signal.SIGUSR2, 90
"""The signal that Slurm sends, and how long before the time limit; NCCL may take SIGUSR1."""
MAX_REQUEUES = 1000
"""Each needs a step of progress, so it is not endless."""


def install(job_id: str, run_dir: Path, *, asks: bool) -> None:
    """Makes this process outlive Slurm's announcements, and act on them if it is the one.

    SIGTERM and SIGCONT come with a preemption, too; what is to end a task insists with SIGKILL.
    """

    def requeue(_number: int, _frame: FrameType | None) -> None:
        ask(job_id, run_dir)

    signal.signal(signal.SIGTERM, _go_on)
    signal.signal(signal.SIGCONT, _go_on)
    signal.signal(SIGNAL, requeue if asks else _go_on)


def ask(job_id: str, run_dir: Path) -> None:
    """Has Slurm requeue a job; one that is not requeued ends all the same, and can be resumed."""
    restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    if restarts >= MAX_REQUEUES:
        log.error("the job is not requeued: it has been, %d times", restarts)
        _tell(job_id, run_dir, "refused", f"the job is not requeued: it has been, {restarts} times")
        return
    answer = output_of(["scontrol", "requeue", job_id])
    if answer.returncode:
        log.error(
            "the job is not requeued (%s): once it has ended, relax-hpc resume %s",
            words_of(answer), run_dir,
        )  # fmt: skip
        said = f"out of time or preempted, and not requeued ({words_of(answer)})"
        _tell(job_id, run_dir, "refused", said)
    else:
        log.warning("requeued for the time number %d", restarts + 1)
        said = f"out of time or preempted: requeued, for the time number {restarts + 1}"
        _tell(job_id, run_dir, "requeued", said)


def _tell(job_id: str, run_dir: Path, what: str, words: str) -> None:
    """Leaves the verdict; a handler may not take the locks of this process, so another does it."""
    module = [sys.executable, "-m", "relax_hpc.runs.verdict", str(run_dir)]
    answer = output_of([*module, "--job-id", job_id, "--what", what, "--words", words])
    if answer.returncode:
        log.error("the verdict could not be written: %s", words_of(answer))


def _go_on(_number: int, _frame: FrameType | None) -> None:
    """A handler, and not SIG_IGN, which children would inherit."""
