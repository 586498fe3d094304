"""The same job without Slurm: bash runs the script here, `local_step` starts the tasks."""

import os
import signal
import subprocess
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from submitit.core.core import Job as SubmititJob
from submitit.core.core import R

from relax_hpc.comm.process_id import ProcessId
from relax_hpc.errors import LaunchError
from relax_hpc.launch import script
from relax_hpc.launch.jobs import Call, HetJob, dump, name_pickles
from relax_hpc.records import read_json

_POLL_S = 0.1


class HetLocalJob(SubmititJob[R]):
    """One component of a job on this machine; over when its controller is."""

    _results_timeout_s = 2  # the file system is this machine's
    controller: ProcessId

    def _register_in_watcher(self) -> None:
        pass

    def done(self, force_check: bool = False) -> bool:
        if self._sub_jobs:
            return all(task.done() for task in self._sub_jobs)
        return self.paths.result_pickle.exists() or self.controller.find() is None

    @property
    def state(self) -> str:
        return "RUNNING" if self.controller.find() else "ENDED"

    def cancel(self, check: bool = True) -> None:
        end_step(processes(self.paths.folder, self.job_id))


class HetLocalExecutor:
    """Runs one heterogeneous job on this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()

    def submit_het(self, calls: Sequence[Call], job: script.Job) -> HetJob[HetLocalJob[Any]]:
        """Starts a job, which outlives this process."""
        job_id = f"local-{uuid.uuid4().hex[:12]}"
        name_pickles(dump(calls, job), job_id)
        path = job.folder / f"{job_id}_submission.sh"
        path.write_text(script.local_script(job, [call.component for call in calls]))
        with script.batch_log(job.folder, job_id).open("ab") as log:
            bash = subprocess.Popen(
                ["bash", str(path), job_id],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        controller = ProcessId.of(bash.pid)
        components = [
            _component_job(job.component_folder(index), job_id, call.component.tasks, controller)
            for index, call in enumerate(calls)
        ]
        folders = [job.component_folder(index) for index in range(len(calls))]
        return LocalHetJob(
            job_id, components, lambda: cancel(controller, folders, job_id), controller, bash
        )


class LocalHetJob(HetJob[HetLocalJob[Any]]):
    """A job on this machine, and the process that runs its script."""

    def __init__(
        self,
        job_id: str,
        components: Sequence[HetLocalJob[Any]],
        end: Any,  # noqa: ANN401
        controller: ProcessId,
        bash: "subprocess.Popen[bytes]",
    ) -> None:
        super().__init__(job_id, components, end)
        self.controller = controller
        self._bash = bash

    def exit_code(self, timeout_s: float) -> int:
        """Waits for the script to end; raises subprocess.TimeoutExpired."""
        return self._bash.wait(timeout_s)


def _component_job(
    folder: Path, job_id: str, tasks: int, controller: ProcessId
) -> HetLocalJob[Any]:
    job: HetLocalJob[Any] = HetLocalJob(folder, job_id, range(tasks))
    for task in (job, *job._sub_jobs):
        task.controller = controller  # type: ignore[attr-defined]
    return job


def processes(folder: Path, job_id: str) -> list[ProcessId]:
    """The step that ran last in a component's folder: its launcher first, then its tasks."""
    record = read_json(folder / f"{job_id}_processes.json") or {"processes": []}
    return [ProcessId(entry["pid"], entry["start_time"]) for entry in record["processes"]]


def end_step(step: Sequence[ProcessId]) -> None:
    """Asks the launcher of a step to end its tasks; it insists after a grace period."""
    if step and (launcher := step[0].find()):
        launcher.send_signal(signal.SIGTERM)


def cancel(
    controller: ProcessId, folders: Sequence[Path], job_id: str, timeout_s: float = 20
) -> None:
    """Ends a job: its controller, the launchers of its steps, their tasks. Nothing else.

    Raises:
        LaunchError: something is still alive after `timeout_s`.
    """
    if process := controller.find():
        process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + timeout_s
    while True:
        steps = [task for folder in folders for task in processes(folder, job_id)]
        alive = [each for each in (controller, *steps) if each.find()]
        if not alive:
            return
        if time.monotonic() > deadline:
            break
        time.sleep(_POLL_S)
    for each in alive:
        _kill(each)
    raise LaunchError(
        f"{job_id}: processes {', '.join(str(each.pid) for each in alive)} did not end in "
        f"{timeout_s:.0f} s and were killed"
    )


def _kill(target: ProcessId) -> None:
    process = target.find()
    if process is None:
        return
    # Controller and tasks lead groups of their own; a launcher is in its controller's.
    if os.getpgid(target.pid) == target.pid:
        os.killpg(target.pid, signal.SIGKILL)
    else:
        process.kill()
