"""submitit for Slurm's heterogeneous jobs: one batch script, one pickled call per component.

submitit (1.5.4) knows jobs of one component. What has to differ, all of it here and in `script`:

* Inside every step SLURM_JOB_ID is the leader's id, so components would share pickles and results:
  each has a folder of its own.
* squeue, sacct and scancel call component k "<leader>+<k>", files are named by "<leader>". A job of
  one component is an ordinary job, and called "<leader>".
* sacct is asked by leader; the answer has the components' names.
* SLURM_JOB_NUM_NODES is the leader's, or missing; SLURM_NNODES is the step's.
* Only the leader may be requeued, once, and that ends every component; submitit would requeue from
  each of them. So component 0 waits for the others' checkpoints, then requeues for all.
"""

import logging
import re
import subprocess
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from submitit.core.core import R
from submitit.core.utils import JobPaths
from submitit.slurm.slurm import (
    SlurmExecutor,
    SlurmInfoWatcher,
    SlurmJob,
    SlurmJobEnvironment,
)

from relax_hpc.errors import LaunchError
from relax_hpc.launch import script, states
from relax_hpc.launch.jobs import (
    Call,
    HetJob,
    dump,
    is_silent,
    name_pickles,
    output_of,
    words_of,
)
from relax_hpc.launch.placement import groups

log = logging.getLogger(__name__)

_CHECKPOINT_WAIT_S = 20
# sbatch itself tries again for minutes where slurmctld is busy.
_SBATCH_S = 600
# sbatch found no controller to ask.
_NEVER_LEFT = re.compile("Could not establish a configuration|Unable to contact|cannot be run")
# From the requeue until Slurm ends us; leaving before would look like a failed step.
_END_WAIT_S = 60


class MaybeQueuedError(LaunchError):
    """A job was sent to Slurm, and nobody says whether it came there."""


class HetSlurmInfoWatcher(SlurmInfoWatcher):
    """Asks about all components of a job at once."""

    def _make_command(self) -> list[str] | None:
        leaders = {job_id.split("+")[0] for job_id in self._registered - self._finished}
        if not leaders:
            return None
        if states.has_accounting():
            return [*states.SACCT, "-j", ",".join(sorted(leaders))]
        return [*states.SQUEUE, "--me"]  # by id it is an error once slurmctld forgot one

    def read_info(self, string: bytes | str) -> dict[str, dict[str, str]]:
        text = string if isinstance(string, str) else string.decode()
        lines = text.splitlines()
        # squeue's header differs from sacct's; the columns are the same.
        info: dict[str, dict[str, str]] = super().read_info(
            "\n".join(["JobID|State|NodeList|JobIDRaw", *lines[1:]])
        )
        return info


class HetComponentJob(SlurmJob[R]):
    """One component; `job_id` is "<leader>[+<k>]", its files are named by the leader."""

    watcher = HetSlurmInfoWatcher(delay_s=15)

    def __init__(self, folder: Path | str, job_id: str, tasks: Sequence[int] = (0,)) -> None:
        super().__init__(folder, job_id, tasks)
        self._paths = JobPaths(folder, job_id=job_id.split("+")[0], task_id=self.task_id)

    @property
    def slurm_id(self) -> str:
        """The component's own id: a signal to "<leader>+<k>" would reach every component.

        Raises:
            LaunchError: Slurm does not know the job.
        """
        answer = output_of(["squeue", "-h", "--states=all", "-o", "%i %A", "-j", self.job_id])
        ids = dict(line.split() for line in answer.stdout.splitlines())
        if self.job_id not in ids:
            raise LaunchError(f"squeue does not know {self.job_id}: {words_of(answer)}")
        return str(ids[self.job_id])

    def signal(self, name: str) -> None:
        """Sends a signal to the tasks of this component only."""
        subprocess.check_call(["scancel", "--signal", name, self.slurm_id])


class HetSlurmExecutor(SlurmExecutor):
    """`submit` stays submitit's; `submit_het` makes one heterogeneous job."""

    job_class = HetComponentJob

    def submit_het(self, calls: Sequence[Call], job: script.Job) -> HetJob[HetComponentJob[Any]]:
        """Queues a job.

        Raises:
            LaunchError: sbatch refused it; its own words are in the message.
            MaybeQueuedError: Slurm does not say whether it has queued it.
        """
        pickles = dump(calls, job)
        draft = job.folder / f"{uuid.uuid4().hex}.sh"
        draft.write_text(script.slurm_script(job, [call.component for call in calls]))
        leader = _submit(draft)
        name_pickles(pickles, leader)
        draft.rename(job.folder / f"{leader}_submission.sh")
        # Slurm numbers the components only where there are several.
        its = groups([call.component for call in calls])
        ids = [f"{leader}+{group}" if max(its) else leader for group in its]
        components: list[HetComponentJob[Any]] = [
            HetComponentJob(job.component_folder(index), job_id, range(call.component.tasks))
            for index, (job_id, call) in enumerate(zip(ids, calls, strict=True))
        ]
        return HetJob(leader, components, lambda: cancel(leader))


def _submit(draft: Path) -> str:
    """The id of the job that a script has become."""
    answer = output_of(["sbatch", "--parsable", str(draft)], _SBATCH_S)
    if not answer.returncode:
        return answer.stdout.strip().split(";")[0]  # id, or id;cluster
    words = words_of(answer)
    if not is_silent(answer):
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
        raise LaunchError(f"{words_of(answer)}; try again where squeue answers")


class HetSlurmJobEnvironment(SlurmJobEnvironment):
    """Inside a task of a component."""

    _env: ClassVar[dict[str, str]] = {**SlurmJobEnvironment._env, "num_nodes": "SLURM_NNODES"}

    def _requeue(self, countdown: int) -> None:
        """Called in task 0 of every component, once its checkpoint is on disk."""
        folder = self.paths.folder
        marker = f"{self.job_id}_checkpointed"
        (folder / marker).touch()
        if folder.name == "c0":
            self._wait_for_components(folder.parent, marker)
            answer = output_of(["scontrol", "requeue", self.job_id])
            if answer.returncode:
                # Slurm ends the job all the same; what it has done is on disk.
                log.error(
                    "the job is not requeued (%s): once it has ended, relax-hpc resume %s",
                    words_of(answer), folder.parent.parent,
                )  # fmt: skip
            else:
                log.warning("requeued, %d time limits may still be reached", countdown)
        time.sleep(_END_WAIT_S)

    def _wait_for_components(self, base: Path, marker: str) -> None:
        """Gives the others their time; one that does not make it goes on from what it has."""
        deadline = time.monotonic() + _CHECKPOINT_WAIT_S
        folders = list(base.glob("c*"))
        while time.monotonic() < deadline:
            paths = [JobPaths(folder, self.job_id, 0) for folder in folders]
            if all((p.folder / marker).exists() or p.result_pickle.exists() for p in paths):
                break
            time.sleep(0.1)
        for folder in folders:
            (folder / marker).unlink(missing_ok=True)
            for draft in folder.glob(f"{self.job_id}_*.save_tmp"):
                draft.unlink()  # left by a checkpoint that was cut off; submitit refuses it
