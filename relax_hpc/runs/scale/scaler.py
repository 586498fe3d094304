"""Adds and removes engines of a running job.

It compares requests with the existing engines, and starts or ends steps of one engine on idle nodes
of rollout: through Slurm, or here. Its whole state is control/scale/state.json, which only it
writes.
"""

import argparse
import logging
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import psutil

from relax_hpc.config import job_file
from relax_hpc.config.engines import ROLLOUT
from relax_hpc.config.run import RunConfig
from relax_hpc.errors import LaunchError, ends_of
from relax_hpc.inference import members
from relax_hpc.inference.members import Roster, standing
from relax_hpc.launch import interpreter, requeue
from relax_hpc.launch.placement import Component, place
from relax_hpc.launch.script import set_up
from relax_hpc.launch.states import output_of
from relax_hpc.launch.supervision import BEGIN, INHERITED
from relax_hpc.runs.scale.records import (
    RUN_ENDED,
    Extra,
    ScaleOutcome,
    ScaleRequest,
    ScaleState,
)
from relax_hpc.runtime.files.records import read_bytes, write_json_once
from relax_hpc.runtime.files.storage import exists, patiently
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.runtime.process import ProcessId
from relax_hpc.runtime.telemetry import logs

log = logging.getLogger(__name__)

START_MARGIN_S = 60
"""Seconds for Slurm to start a step, besides the engine's own time."""
END_MARGIN_S = 15
"""Seconds from the end of a drain until the step is killed."""


_SHOWN_CHARACTERS = 300
_SETUP_FAILED = 'setup_failed() { echo "setup ended with exit code $2: $3"; exit "$2"; }'


def folder(submission: Path, member: str) -> Path:
    """Returns the folder of an added engine's step."""
    return submission / member.rpartition("-")[0] / member


class Steps:
    """Starts and ends single-task steps, through Slurm or on this machine."""

    nodes: list[str]
    """Nodes of rollout beyond the initial ones."""

    def __init__(self, config: RunConfig, paths: RunPaths, attempt: str) -> None:
        self._paths, self._attempt = paths, attempt
        self._resources = config.rollout_pool.resources

    def start(self, extra: Extra) -> ProcessId:
        """Raises LaunchError: it could not be started."""
        raise NotImplementedError

    def end(self, extra: Extra) -> None:
        """Asks the step to end at once."""
        process = extra.process and extra.process.find()
        if process:
            process.send_signal(signal.SIGTERM)

    def last_words(self, extra: Extra) -> str:
        """Returns the last output of a step that ended by itself."""
        at = folder(self._paths.submission, extra.id)
        for name in ("step.log", "log.err"):
            path = at / name
            text = read_bytes(path) if exists(path) else b""
            lines = text.decode(errors="replace").split("\n")
            if words := [line for line in lines if line.strip()]:
                return f"its step ended: {ends_of(words[-1], _SHOWN_CHARACTERS)} (see {path})"
        return f"its step ended without a word (see {at})"

    def _run(
        self, extra: Extra, launcher: list[str], separator: list[str], told: Sequence[str] = ()
    ) -> ProcessId:
        at = folder(self._paths.submission, extra.id)
        patiently(at, partial(at.mkdir, parents=True, exist_ok=True), small=True)
        logs = [f"--output={at / 'log.out'}", f"--error={at / 'log.err'}"]
        task = [
            *interpreter.command(self._resources, self._paths.root.parent, sys.executable),
            *("-u", "-P", "-m", "relax_hpc.runs.scale.extra_step", str(self._paths.root)),
            *("--number", str(extra.number), "--slot", str(extra.slot)),
            *("--attempt", self._attempt),
            *("--gpus", str(self._resources.gpus_per_node)),
            *(("--transport", extra.transport) if extra.transport else ()),
            *told,
        ]
        command = shlex.join([*launcher, *logs, *separator, *task])
        # As in the job script: what these lines export reaches the task.
        setup = set_up(extra.id, self._resources.setup)
        lines = "\n".join([BEGIN, _SETUP_FAILED, *setup, f"unset {INHERITED}", f"exec {command}"])
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


class Scaler:
    """Requests and extra engines; `tick` advances all of them."""

    def __init__(self, config: RunConfig, paths: RunPaths, steps: Steps, attempt: str) -> None:
        self._config, self._paths, self._steps = config, paths, steps
        # It looks twice a second: at what has not changed since, it looks without opening a file.
        self._roster, self._members = members.follow_roster(paths), members.follow(paths)
        self._request = ScaleRequest.follow(paths)
        self._initial = config.rollout_pool.count
        per_node = self._initial // config.rollout_pool.resources.nodes
        state = ScaleState.read(paths)
        self._state = state or ScaleState(attempt, self._initial, steps.nodes, per_node)
        self._state.nodes = steps.nodes
        if self._state.attempt != attempt:  # their steps ended with the job that they were part of
            self._state.attempt = attempt
            for extra in self._state.live:
                self._note(extra.now("GONE", "the job was started again"))
            self._restore()
        self._written: ScaleState | None = None
        self._publish()

    def tick(self) -> None:
        held = self._roster()
        for extra in self._state.live:
            self._observe(extra, held)
        self._take_request()
        self._judge()
        self._restore()
        for extra in self._state.live:
            if extra.state == "PENDING":
                self._start(extra)
        self._publish()

    def end(self, timeout_s: float) -> None:
        for extra in self._state.staying:
            self._tell_to_end(extra, "GONE", RUN_ENDED)
        deadline = time.monotonic() + timeout_s
        while self._state.live and time.monotonic() < deadline:
            for extra in self._state.live:
                self._observe(extra, None)
            time.sleep(0.1)
        for extra in self._state.live:
            self._steps.end(extra)
            self._note(extra.now("GONE", RUN_ENDED))
        self._publish()

    def _observe(self, extra: Extra, held: Roster | None) -> None:
        """Updates a step's state."""
        if extra.process is None:
            return
        [member] = self._members.get(extra.id)
        if extra.process.find() is None:
            self._note_end(extra, member.reason if member and member.state == "FAILED" else "")
        elif extra.ending:
            self._insist(extra)
        elif member and member.state in ("FAILED", "GONE", "DRAINING"):
            reason = member.reason or "ended without being told to"
            self._tell_to_end(extra, "FAILED", reason)
        else:
            found = standing(member, held)
            if extra.state == "ACTIVE" and found in ("SYNCING", "HEALTHY"):
                return  # a moment of every step: no news
            self._note(extra.now(found))
            self._check_deadline(self._state.extras[extra.id])

    def _note_end(self, extra: Extra, said: str) -> None:
        final = extra.ending or "FAILED"
        reason = extra.reason if extra.ending else said or self._steps.last_words(extra)
        self._note(extra.now(final, reason))
        if final == "FAILED" and not self._is_of_pending(extra):
            lost = [each for each in self._state.extras.values() if each.state == "FAILED"]
            if not extra.was_active or len(lost) > self._config.launch.max_restarts:
                self._state.engines -= 1  # else it is replaced

    def _insist(self, extra: Extra) -> None:
        if time.time() > extra.end_by:
            log.warning("%s does not end by itself: ending its step", extra.id)
            self._steps.end(extra)
            extra = replace(extra, end_by=time.time() + END_MARGIN_S)
        self._note(extra.now("DRAINING"))

    def _check_deadline(self, extra: Extra) -> None:
        """Fails a new engine that does not start or get weights in time."""
        limit, missing = (
            self._config.launch.advanced.peer_timeout_s,
            "the trainer gave it no weights",
        )
        if extra.state == "STARTING":
            limit = self._config.rollout_pool.advanced.start_timeout_s + START_MARGIN_S
            missing = "its engine was not healthy"
        if not extra.was_active and time.time() > extra.since + limit:
            self._tell_to_end(extra, "FAILED", f"{missing} within {limit} s")

    def _take_request(self) -> None:
        """Takes the next request, once the previous one is settled."""
        number = max(self._state.requests, default=0)
        if number and not self._state.requests[number].final:
            return
        request = self._request(number + 1)
        if request is None:
            return
        log.info("%s", request)
        self._state.requests[request.id] = ScaleOutcome("PENDING", before=self._state.engines)
        if exists(self._paths.scale_cancel(request.id)):
            return self._settle(request.id, "CANCELLED", "before it was begun")
        if request.kind == "in":
            return self._remove(request)
        count = request.engines - self._initial - len(self._state.staying)
        self._state.transport = request.transport
        self._state.engines = max(request.engines, self._state.engines)
        try:
            self._add(count, request.id)
        except LaunchError as error:
            self._state.engines = self._state.requests[request.id].before
            self._settle(request.id, "FAILED", str(error))

    def _add(self, count: int, request: int) -> None:
        free = self._state.free
        if count > len(free):
            raise LaunchError(f"{count} more engines asked for, there is room for {len(free)}")
        next_number = max((e.number for e in self._state.extras.values()), default=0) + 1
        for number, (node, slot) in enumerate(free[: max(count, 0)], start=next_number):
            extra = Extra(f"extra-{number}", request, node, slot, "PENDING", time.time())
            self._note(replace(extra, transport=self._state.transport))

    def _remove(self, request: ScaleRequest) -> None:
        """Removes engines, the newest first."""
        staying = self._state.staying
        keep = max(request.engines - self._initial, 0)
        chosen = (
            [e for e in staying if e.id == request.member] if request.member else staying[keep:]
        )
        for extra in chosen:
            self._tell_to_end(extra, "GONE", "removed", drain_s=request.drain_s)
        self._state.engines = self._initial + len(self._state.staying)

    def _judge(self) -> None:
        """Settles the pending request when it is done, or undoes it when it has failed."""
        number = max(self._state.requests, default=0)
        if not number or self._state.requests[number].final:
            return
        request = self._request(number)
        if request is not None and request.kind == "in":
            if all(not extra.ending for extra in self._state.live):
                self._settle(number, "DONE")
            return
        mine = [e for e in self._state.extras.values() if e.request == number and e.state != "GONE"]
        failed = [extra for extra in mine if "FAILED" in (extra.state, extra.ending)]
        if failed:
            self._undo(number, mine, f"{failed[0].id} failed")
        elif exists(self._paths.scale_cancel(number)):
            self._undo(number, mine, "cancelled")
        elif all(extra.state == "ACTIVE" for extra in mine):
            return self._settle(number, "DONE")
        mine = [self._state.extras[extra.id] for extra in mine]
        if all(extra.ended for extra in mine):
            why = "; ".join(f"{extra.id}: {extra.reason}" for extra in failed)
            self._settle(number, "FAILED" if failed else "CANCELLED", why)

    def _undo(self, number: int, mine: Sequence[Extra], reason: str) -> None:
        """All or nothing: ends the engines that were started for this request."""
        self._state.engines = self._state.requests[number].before
        for extra in mine:
            if not extra.ended and not extra.ending:
                self._tell_to_end(extra, "CANCELLED", reason)

    def _restore(self) -> None:
        """Replaces missing engines: lost ones, or those of an earlier job."""
        missing = self._state.engines - self._initial - len(self._state.staying)
        if missing <= 0:
            return
        try:
            self._add(missing, max(self._state.requests, default=0))
        except LaunchError as error:
            log.warning("engines that were lost are not replaced: %s", error)
            self._state.engines -= missing

    def _start(self, extra: Extra) -> None:
        try:
            process = self._steps.start(extra)
        except LaunchError as error:
            self._note(extra.now("FAILED", str(error)))
        else:
            self._note(replace(extra, process=process).now("STARTING"))

    def _tell_to_end(
        self,
        extra: Extra,
        ending: Literal["GONE", "FAILED", "CANCELLED"],
        reason: str,
        *,
        drain_s: float = 0,
    ) -> None:
        write_json_once(self._paths.drain(extra.id), {"drain_s": drain_s})
        end_by = time.time() + drain_s + END_MARGIN_S
        told = replace(extra, ending=ending, reason=reason, end_by=end_by)
        self._note(told.now("DRAINING") if extra.process else told.now(ending))

    def _is_of_pending(self, extra: Extra) -> bool:
        outcome = self._state.requests.get(extra.request)
        return outcome is not None and not outcome.final

    def _settle(
        self, number: int, state: Literal["DONE", "FAILED", "CANCELLED"], reason: str = ""
    ) -> None:
        log.info("request %d: %s %s", number, state, reason)
        before = self._state.requests[number].before
        self._state.requests[number] = ScaleOutcome(state, before, reason)

    def _note(self, extra: Extra) -> None:
        before = self._state.extras.get(extra.id)
        if before is None or before.state != extra.state:
            log.info("%s on %s: %s %s", extra.id, extra.node, extra.state, extra.reason)
        self._state.extras[extra.id] = extra

    def _publish(self) -> None:
        if self._state == self._written:
            return
        ids = [extra.id for extra in self._state.live]
        if self._written is None or ids != [extra.id for extra in self._written.live]:
            members.announce_extras(self._paths, ids)
        self._state.write(self._paths)
        state = self._state
        self._written = replace(state, requests=dict(state.requests), extras=dict(state.extras))


class SlurmSteps(Steps):
    """Runs `srun --overlap` in this process's job."""

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

        It gets all CPUs of the node: Slurm would give each such step the same part.
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


class LocalSteps(Steps):
    """Runs `local_step`, for a job on this machine; its idle nodes are only counted."""

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


_TICK_S = 0.5
_END_S = 8.0
"""Seconds for extra engines to stop when the run ends."""


def main() -> None:
    args = _parse()
    paths, config = job_file.enter_run(args.run_dir)
    logs.setup_beside_script("scaler", logging.INFO)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    assert isinstance(config, RunConfig)
    attempt = requeue.attempt_of(args.job_id)
    steps = (
        LocalSteps(config, paths, args.controller, attempt)
        if args.local
        else SlurmSteps(config, paths, args.job_id, attempt)
    )
    scaler, controller = Scaler(config, paths, steps, attempt), ProcessId.of(args.controller)
    while not stop.wait(_TICK_S) and controller.find():
        scaler.tick()
    scaler.end(_END_S)
    if not stop.is_set():
        sys.exit(f"scaler: process {args.controller}, the job script, is not there any more")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--job-id", required=True)
    parser.add_argument("--controller", type=int, required=True, help="end when this process ends")
    parser.add_argument("--local", action="store_true", help="there is no Slurm")
    return parser.parse_args()


if __name__ == "__main__":
    main()
