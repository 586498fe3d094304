"""Steps of one engine, in nodes that rollout holds and does not use: through Slurm, or here."""

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from relax_hpc.comm.process_id import ProcessId
from relax_hpc.config.engines import ROLLOUT
from relax_hpc.config.run import RunConfig
from relax_hpc.errors import LaunchError
from relax_hpc.fleet.scaling import Extra
from relax_hpc.launch import interpreter
from relax_hpc.launch.jobs import output_of
from relax_hpc.launch.placement import Component, place
from relax_hpc.launch.script import set_up
from relax_hpc.paths import RunPaths
from relax_hpc.records import read_bytes
from relax_hpc.storage import exists, patiently

_SHOWN_CHARACTERS = 300
_SETUP_FAILED = 'setup_failed() { echo "setup ended with exit code $2: $3"; exit "$2"; }'


def folder(submission: Path, member: str) -> Path:
    """Returns the folder of output and records of an added engine's step."""
    return submission / member.rpartition("-")[0] / member


class _Steps:
    """The common part of both ways: the command of the task, its logs, how a step is ended."""

    nodes: list[str]

    def __init__(self, config: RunConfig, paths: RunPaths, attempt: str) -> None:
        self._paths, self._attempt = paths, attempt
        self._resources = config.rollout_pool.resources

    def end(self, extra: Extra) -> None:
        process = extra.process and extra.process.find()
        if process:
            process.send_signal(signal.SIGTERM)

    def last_words(self, extra: Extra) -> str:
        at = folder(self._paths.submission, extra.id)
        for name in ("step.log", "log.err"):
            path = at / name
            text = read_bytes(path) if exists(path) else b""
            lines = text.decode(errors="replace").split("\n")
            if words := [line for line in lines if line.strip()]:
                return f"its step ended: {words[-1][:_SHOWN_CHARACTERS]} (see {path})"
        return f"its step ended without a word (see {at})"

    def _run(
        self, extra: Extra, launcher: list[str], separator: list[str], told: Sequence[str] = ()
    ) -> ProcessId:
        at = folder(self._paths.submission, extra.id)
        patiently(at, partial(at.mkdir, parents=True, exist_ok=True), small=True)
        logs = [f"--output={at / 'log.out'}", f"--error={at / 'log.err'}"]
        task = [
            *interpreter.command(self._resources, self._paths.root.parent, sys.executable),
            *("-u", "-P", "-m", "relax_hpc.scale.extra_step", str(self._paths.root)),
            *("--number", str(extra.number), "--slot", str(extra.slot)),
            *("--attempt", self._attempt),
            *("--gpus", str(self._resources.gpus_per_node)),
            *(("--transport", extra.transport) if extra.transport else ()),
            *told,
        ]
        command = shlex.join([*launcher, *logs, *separator, *task])
        # As in the job script: what these lines export reaches the task.
        setup = set_up(extra.id, self._resources.setup)
        lines = "\n".join([_SETUP_FAILED, *setup, f"exec {command}"])
        path = at / "step.log"
        with patiently(path, partial(path.open, "ab"), small=True) as log:
            process: subprocess.Popen[Any] = subprocess.Popen(
                ["bash", "-c", lines],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a scaler that dies and is started again finds it running
            )
        try:
            return ProcessId.of(process.pid)
        except psutil.NoSuchProcess:
            raise LaunchError(self.last_words(extra)) from None


class SlurmSteps(_Steps):
    """`srun --overlap` into the job that this process is part of."""

    def __init__(self, config: RunConfig, paths: RunPaths, leader: str, attempt: str) -> None:
        super().__init__(config, paths, attempt)
        self._leader = leader
        pool = config.rollout_pool
        self._component = Component(ROLLOUT, pool.num_tasks, pool.resources)
        self._engines_on_node = pool.count // pool.resources.nodes
        # Rollout is component 0, and where there is rollout there are several.
        held = os.environ["SLURM_JOB_NODELIST_HET_GROUP_0"]
        answer = output_of(["scontrol", "show", "hostnames", held])
        if answer.returncode:
            raise LaunchError(f"scontrol show hostnames {held}: {answer.stderr.strip()}")
        self.nodes = answer.stdout.split()[self._resources.nodes :]

    def start(self, extra: Extra) -> ProcessId:
        """Starts a step of one task on the node of `extra`.

        It sees all of the node: of a part of the CPUs Slurm would give each the same ones.
        """
        asked, tasks = self._resources, self._component.tasks_per_node
        cpus = self._component.cpus_to_take * tasks // self._engines_on_node
        own = ("--on-node", str(self._engines_on_node), "--cpus", str(cpus)) if cpus else ()
        launcher = [
            *("srun", f"--jobid={self._leader}", "--het-group=0", "--overlap"),
            *("--nodes=1", "--ntasks=1", f"--nodelist={extra.node}"),
            *([f"--cpus-per-task={asked.cpus_per_task * tasks}"] if asked.cpus_per_task else []),
            *([f"--gpus-per-node={asked.gpus_per_node}"] if asked.gpus_per_node else []),
            *("--mpi=none", "--kill-on-bad-exit=1", "--unbuffered", "--open-mode=append"),
            *interpreter.srun_options(asked, self._paths.root.parent),
        ]
        return self._run(extra, launcher, [], own)


class LocalSteps(_Steps):
    """`local_step`, for a job on this machine; its idle nodes are only counted."""

    def __init__(self, config: RunConfig, paths: RunPaths, controller: int, attempt: str) -> None:
        super().__init__(config, paths, attempt)
        self._controller = controller
        count = (self._resources.max_nodes or 0) - self._resources.nodes
        self.nodes = [f"local-{number}" for number in range(1, count + 1)]
        self._first_gpu = sum(each.resources.gpus_per_node for each in place(config) if not each.on)

    def start(self, extra: Extra) -> ProcessId:
        """Starts a process that ends with the job's script."""
        gpus = self._resources.gpus_per_node
        job_id = self._attempt.rsplit(".", 1)[0]
        processes = folder(self._paths.submission, extra.id) / f"{job_id}_processes.json"
        first = self._first_gpu + self.nodes.index(extra.node) * gpus
        launcher = [
            *(sys.executable, "-P", "-m", "relax_hpc.launch.local_step", "--tasks", "1"),
            *("--first-gpu", str(first), "--gpus", str(gpus)),
            *("--controller", str(self._controller), "--job-id", job_id),
            *("--processes", str(processes)),
        ]
        return self._run(extra, launcher, ["--"])
