"""Submits heterogeneous Slurm jobs through submitit: one batch script, a step per component.

The executor fills in submitit's hooks (text of the script, command, job id), and its jobs are
submitit's: state, cancel, paths, wait, result. submitit (1.5.4) supports one component. The
differences, all here and in `script`:

* Inside every step SLURM_JOB_ID is the leader's id, so each component has its own folder of files.
* squeue, sacct and scancel call component k "<leader>+<k>"; files are named by "<leader>". A job of
  one component is an ordinary job, called "<leader>".
* SLURM_JOB_NUM_NODES is the leader's, or missing; SLURM_NNODES is the step's.
* Only the leader may be requeued, see `requeue`.
* A command names what a task runs, and files report its end: nothing is pickled.
"""

import os
import re
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any, ClassVar

from submitit import JobEnvironment, SlurmExecutor, SlurmJob

from relax_hpc.errors import LaunchError, RelaxError
from relax_hpc.launch import script, states
from relax_hpc.launch.placement import Component, groups
from relax_hpc.launch.states import StartedJob, is_silent, output_of, words_of
from relax_hpc.launch.supervision import SHELL_OPTIONS
from relax_hpc.runtime.paths import ComponentPaths
from relax_hpc.runtime.process import is_of_a_rank

# sbatch itself tries again for minutes where slurmctld is busy.
_SBATCH_S = 600
# Which Slurm; and a setting of srun's that the script leaves as it is.
_KEPT = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_PMIX_FENCE")
_OF_ANOTHER = ("SLURM_", "SBATCH_", "SRUN_", *SHELL_OPTIONS)
# The id, or "id;cluster", below whatever a site has sbatch print.
_QUEUED = re.compile(r"^(\d+)(?:;.*)?$", re.MULTILINE)
# sbatch found no controller to ask.
_NEVER_LEFT = re.compile("Could not establish a configuration|Unable to contact|cannot be run")
# Looks for a job whose sbatch was interrupted, and seconds between them.
_LOOKS, _LOOK_EVERY_S = 3, 1.0
_SHOWN_LINES = 20


class MaybeQueuedError(LaunchError):
    """A job may have been queued without confirmation, or is queued and cannot be cancelled."""


class _Watcher(type(SlurmJob.watcher)):  # type: ignore[misc]
    """Asks Slurm as the commands do: for all jobs at once, with or without accounting."""

    def update(self) -> None:
        self._num_calls += 1
        leaders = {each.partition("+")[0] for each in self._registered - self._finished}
        found = states.query(sorted(leaders)).known
        self._info_dict |= {
            name: {"JobID": name, "State": known.state, "NodeList": known.nodes}
            for name, known in found.items()
        }
        self._last_status_check = time.time()
        self._finished |= {each for each in self._registered if self.is_done(each, mode="cache")}


class ComponentJob(SlurmJob[str]):
    """One component of a run, a task of submitit's for each of its tasks.

    The result of a task is its component's state; one that has not come to its end has failed.
    """

    watcher = _Watcher(delay_s=10)

    def __init__(self, folder: Path | str, job_id: str, tasks: Sequence[int] = (0,)) -> None:
        super().__init__(folder, job_id, tasks)
        self._paths.job_id = job_id.partition("+")[0]  # which names the files

    def cancel(self, check: bool = True) -> None:
        """Ends the whole run: a component alone would be started again."""
        cancel(self.job_id.partition("+")[0])
        while check and not self.done(force_check=True):
            time.sleep(_LOOK_EVERY_S)

    def done(self, force_check: bool = False) -> bool:
        mode = "force" if force_check else "standard"
        return bool(self.watcher.is_done(self.job_id, mode=mode))

    def _get_outcome_and_result(self) -> tuple[str, str]:
        rank, state = self._tasks[0], self.state
        if ComponentPaths(self.paths.folder, str(self.paths.job_id)).done(rank).exists():
            return "success", state
        said = (self.stderr() or self.stdout() or "").splitlines()[-_SHOWN_LINES:]
        return "error", "\n".join([f"state: {state}", *said])


class RunJob(ComponentJob):
    """A run; its tasks are its components."""

    def __init__(self, components: Sequence[ComponentJob]) -> None:
        first = components[0]
        super().__init__(first.paths.folder, first.job_id.partition("+")[0])
        self._sub_jobs = components

    @property
    def state(self) -> str:
        """Returns that of the components, or the worst if they differ."""
        found = {each.state for each in self._sub_jobs}
        return next(iter(sorted(found - {"COMPLETED"})), "COMPLETED")

    def done(self, force_check: bool = False) -> bool:
        return all(each.done(force_check) for each in self._sub_jobs)

    def results(self) -> list[str]:
        """Returns each component's state, once the run is over.

        Raises:
            submitit.core.utils.FailedJobError: a task did not come to its end.
        """
        self.wait()
        return [each.results()[0] for each in self._sub_jobs]


class HetSlurmExecutor(SlurmExecutor):
    """Adds `submit_het` for heterogeneous jobs, and `submit(relax_hpc.submit, job)`.

    `submit` of any other function stays submitit's.
    """

    _asked: tuple[script.Job, Sequence[Component]] | None = None

    def submit_het(self, job: script.Job, components: Sequence[Component]) -> StartedJob:
        """Queues a job.

        Raises:
            LaunchError: sbatch refused it; quotes its message.
            MaybeQueuedError: Slurm does not say whether it has queued it.
        """
        script.make_folders(job, components)
        draft = job.folder / f"{uuid.uuid4().hex}.sh"
        self._asked = job, components
        draft.write_bytes(os.fsencode(self._make_submission_file_text("", draft.stem)))
        leader = self._queue(draft)
        with cancelling([_job(leader)]):
            draft.rename(job.folder / f"{leader}_submission.sh")
            # Slurm numbers the components only where there are several.
            numbers = groups(components)
            ids = (f"{leader}+{number}" if max(numbers) else leader for number in numbers)
            return _job(leader, *ids)

    def _internal_process_submissions(self, delayed_submissions: list[Any]) -> list[Any]:
        if not all(getattr(each.function, "starts_run", False) for each in delayed_submissions):
            return list(super()._internal_process_submissions(delayed_submissions))
        return [each.function(*each.args, **each.kwargs).job() for each in delayed_submissions]

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        if self._asked is None:
            return str(super()._make_submission_file_text(command, uid))
        return script.slurm_script(*self._asked)

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        return ["sbatch", "--parsable", str(submission_file_path)]

    @staticmethod
    def _get_job_id_from_submission_command(string: bytes | str) -> str:
        text = string if isinstance(string, str) else string.decode()
        return str(_QUEUED.findall(text)[-1])

    def _queue(self, draft: Path) -> str:
        """Queues a script, and returns the job's id: submitit's own way loses a job whose sbatch
        was interrupted, or got no answer."""
        try:
            answer = sbatch(self._make_submission_command(draft)[1:], _SBATCH_S)
        except BaseException as error:  # Ctrl-C, say: by then it may have been queued
            for _ in range(_LOOKS):
                if leader := _find(draft, f"sbatch was interrupted ({type(error).__name__})"):
                    with cancelling([_job(leader)]):
                        raise
                time.sleep(_LOOK_EVERY_S)
            raise
        if not answer.returncode and _QUEUED.search(answer.stdout):
            return self._get_job_id_from_submission_command(answer.stdout)
        words = words_of(answer)
        if answer.returncode and not is_silent(answer):
            raise LaunchError(f"sbatch refused the job: {words}; change its resources")
        if not _NEVER_LEFT.search(answer.stderr) and (leader := _find(draft, words)):
            return leader
        raise LaunchError(f"{words}; submit where Slurm answers (sinfo shows it), or with --local")


def _job(leader: str, *ids: str) -> StartedJob:
    return StartedJob(leader, ids, partial(cancel, leader))


@contextmanager
def cancelling(jobs: Sequence[StartedJob]) -> Iterator[None]:
    """Cancels just-started jobs if the block fails.

    Raises:
        MaybeQueuedError: names a job that cannot be cancelled.
    """
    try:
        yield
    except BaseException as error:
        left = dict[str, str]()
        for job in jobs:
            try:
                job.cancel()
            except (RelaxError, OSError, ValueError, KeyboardInterrupt, SystemExit) as refused:
                left[job.job_id] = str(refused) or type(refused).__name__
        if left:
            why = str(error) or type(error).__name__
            raise MaybeQueuedError(
                f"{why}; job {', '.join(left)} was started before, and cannot be cancelled "
                f"({'; '.join(left.values())}): end it with scancel {' '.join(left)}"
            ) from error
        raise


class HetSlurmJobEnvironment(JobEnvironment):
    """Inside a task of a component; a plugin of submitit."""

    _env: ClassVar[dict[str, str]] = {
        "job_id": "SLURM_JOB_ID",
        "num_tasks": "SLURM_NTASKS",
        "num_nodes": "SLURM_NNODES",
        "node": "SLURM_NODEID",
        "global_rank": "SLURM_PROCID",
        "local_rank": "SLURM_LOCALID",
    }


def sbatch(arguments: Sequence[str], timeout_s: float) -> CompletedProcess[str]:
    """Runs sbatch without variables of an enclosing job or rank, and without those that override
    the script's options."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name in _KEPT or not (name.startswith(_OF_ANOTHER) or is_of_a_rank(name))
    }
    return output_of(["sbatch", *arguments], timeout_s, environment)


def _find(draft: Path, words: str) -> str | None:
    """Finds the job of an unconfirmed script, by its unique name."""
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
    """Ends every component of a job; an ended one is left alone.

    Raises:
        LaunchError: scancel failed.
    """
    answer = output_of(["scancel", leader])
    if answer.returncode and not re.search("Invalid job id|already complet", answer.stderr):
        is_anothers = "permission denied" in answer.stderr.lower()
        remedy = "ask who submitted it" if is_anothers else "try again where squeue answers"
        raise LaunchError(f"{words_of(answer)}; {remedy}")
