"""submitit for Slurm's heterogeneous jobs: one batch script, a step for every component.

submitit (1.5.4) knows jobs of one component. What has to differ, all of it here and in `script`:

* Inside every step SLURM_JOB_ID is the leader's id, so components would share files: each has a
  folder of its own.
* squeue, sacct and scancel call component k "<leader>+<k>", files are named by "<leader>". A job of
  one component is an ordinary job, and called "<leader>".
* SLURM_JOB_NUM_NODES is the leader's, or missing; SLURM_NNODES is the step's.
* Only the leader may be requeued, see `requeue`.
* What a task runs is named by its command, and how it ended by a file: nothing is pickled.
"""

import os
import re
import uuid
from collections.abc import Sequence
from pathlib import Path
from subprocess import CompletedProcess
from typing import ClassVar

from submitit import JobEnvironment, SlurmExecutor

from relax_hpc.errors import LaunchError
from relax_hpc.launch import script
from relax_hpc.launch.jobs import StartedJob, is_silent, output_of, words_of
from relax_hpc.launch.placement import Component, groups

# sbatch itself tries again for minutes where slurmctld is busy.
_SBATCH_S = 600
# Which Slurm; and a setting of srun's that the script leaves as it is.
_KEPT = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_PMIX_FENCE")
# The id, or "id;cluster", below whatever a site has sbatch print.
_QUEUED = re.compile(r"^(\d+)(?:;.*)?$", re.MULTILINE)
# sbatch found no controller to ask.
_NEVER_LEFT = re.compile("Could not establish a configuration|Unable to contact|cannot be run")


class MaybeQueuedError(LaunchError):
    """A job was sent to Slurm, and nobody says whether it came there."""


class HetSlurmExecutor(SlurmExecutor):
    """`submit` stays submitit's; `submit_het` makes one heterogeneous job."""

    def submit_het(self, job: script.Job, components: Sequence[Component]) -> StartedJob:
        """Queues a job.

        Raises:
            LaunchError: sbatch refused it; its own words are in the message.
            MaybeQueuedError: Slurm does not say whether it has queued it.
        """
        script.make_folders(job, components)
        draft = job.folder / f"{uuid.uuid4().hex}.sh"
        draft.write_text(script.slurm_script(job, components))
        leader = _submit(draft)
        draft.rename(job.folder / f"{leader}_submission.sh")
        # Slurm numbers the components only where there are several.
        numbers = groups(components)
        ids = tuple(f"{leader}+{number}" if max(numbers) else leader for number in numbers)
        return StartedJob(leader, ids, lambda: cancel(leader))


class HetSlurmJobEnvironment(JobEnvironment):
    """Inside a task of a component. submitit asks a plug-in for this table."""

    _env: ClassVar[dict[str, str]] = {
        "job_id": "SLURM_JOB_ID",
        "num_tasks": "SLURM_NTASKS",
        "num_nodes": "SLURM_NNODES",
        "node": "SLURM_NODEID",
        "global_rank": "SLURM_PROCID",
        "local_rank": "SLURM_LOCALID",
    }


def sbatch(arguments: Sequence[str], timeout_s: float) -> CompletedProcess[str]:
    """Runs sbatch without the variables of the job that it is called in, which would become those
    of the new one, and without those that are over the options of its script."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name in _KEPT or not name.startswith(("SLURM_", "SBATCH_", "SRUN_"))
    }
    return output_of(["sbatch", *arguments], timeout_s, environment)


def _submit(draft: Path) -> str:
    """The id of the job that a script has become."""
    answer = sbatch(["--parsable", str(draft)], _SBATCH_S)
    if not answer.returncode and (queued := _QUEUED.findall(answer.stdout)):
        return str(queued[-1])
    words = words_of(answer)
    if answer.returncode and not is_silent(answer):
        raise LaunchError(f"sbatch refused the job: {words}; change its resources")
    if not _NEVER_LEFT.search(answer.stderr) and (leader := _find(draft, words)):
        return leader
    raise LaunchError(f"{words}; submit where Slurm answers (sinfo shows it), or with --local")


def _find(draft: Path, words: str) -> str | None:
    """The job of a script that was sent to Slurm without an answer; its name is its own."""
    queue = output_of(["squeue", "--me", "-h", "-o", "%i|%o"])
    if queue.returncode:
        raise MaybeQueuedError(
            f"{words}; nor does squeue say whether the job was queued: once Slurm answers, look at "
            "squeue --me, and scancel what is there for this run"
        )
    for line in queue.stdout.splitlines():
        job_id, _, command = line.partition("|")
        if command.strip() == str(draft):
            return job_id.split("+")[0]
    return None


def cancel(leader: str) -> None:
    """Ends every component of a job; one that has ended already is left alone.

    Raises:
        LaunchError: scancel failed.
    """
    answer = output_of(["scancel", leader])
    if answer.returncode and not re.search("Invalid job id|already complet", answer.stderr):
        is_anothers = "permission denied" in answer.stderr.lower()
        remedy = "ask who submitted it" if is_anothers else "try again where squeue answers"
        raise LaunchError(f"{words_of(answer)}; {remedy}")
