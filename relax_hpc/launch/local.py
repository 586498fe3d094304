"""Runs the same job without Slurm: bash runs the script, `local_step` starts the tasks."""

import os
import signal
import subprocess
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from relax_hpc.errors import LaunchError
from relax_hpc.launch import script
from relax_hpc.launch.placement import Component
from relax_hpc.launch.states import StartedJob
from relax_hpc.launch.supervision import SHELL_OPTIONS
from relax_hpc.runtime.files.records import read_json
from relax_hpc.runtime.paths import ComponentPaths
from relax_hpc.runtime.process import ProcessId

_POLL_S = 0.1


def start(job: script.Job, components: Sequence[Component]) -> StartedJob:
    """Starts a job, which outlives this process."""
    script.make_folders(job, components)
    job_id = f"local-{uuid.uuid4().hex[:12]}"
    path = job.folder / f"{job_id}_submission.sh"
    path.write_bytes(os.fsencode(script.local_script(job, components)))
    with script.batch_log(job.folder, job_id).open("ab") as log:
        bash = subprocess.Popen(
            ["bash", str(path), job_id],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={name: value for name, value in os.environ.items() if name not in SHELL_OPTIONS},
            start_new_session=True,
        )
    try:
        controller = ProcessId.of(bash.pid)
    except BaseException:  # nobody would know of it
        os.killpg(bash.pid, signal.SIGTERM)
        raise
    folders = [job.component_folder(component) for component in components]
    ids = (job_id,) * len(components)
    return StartedJob(job_id, ids, lambda: cancel(controller, folders, job_id), controller)


def processes(folder: Path, job_id: str) -> list[ProcessId]:
    """Returns the newest step of a component: its launcher first, then its tasks."""
    record = read_json(ComponentPaths(folder, job_id).processes) or {"processes": []}
    return [ProcessId.read(entry) for entry in record["processes"]]


def end_step(step: Sequence[ProcessId]) -> None:
    """Asks a step's launcher to end its tasks; it kills them after a grace period."""
    if step and (launcher := step[0].find()):
        launcher.send_signal(signal.SIGTERM)


def cancel(
    controller: ProcessId, folders: Sequence[Path], job_id: str, timeout_s: float = 30
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
