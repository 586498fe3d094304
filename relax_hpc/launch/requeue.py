"""A job that reaches its time limit, or is preempted, asks Slurm to start it again later.

Slurm announces both to every process of every task. Task 0 of each component acts, and the first of
them is the one: it says so in the run directory (`roles.ending`), waits until the trainer has
saved, as long as that can be, and asks for a requeue. That ends all tasks; if the job is not
requeued they go on until Slurm ends them.
"""

import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from types import FrameType

from relax_hpc import storage
from relax_hpc.fleet import seen
from relax_hpc.launch import states
from relax_hpc.launch.jobs import is_silent, output_of, words_of
from relax_hpc.paths import RunPaths
from relax_hpc.records import read_json, write_json, write_json_once

log = logging.getLogger(__name__)

SIGNAL, SIGNAL_AHEAD_S = signal.SIGUSR2, 90
"""The signal that Slurm sends, and how long before the time limit; NCCL may take SIGUSR1."""
_ANNOUNCEMENTS = {signal.SIGUSR1, SIGNAL}
MAX_REQUEUES = 1000
"""Each needs a step of progress, so it is not endless."""
_EARLY_S = 60.0
"""Seconds that Slurm may announce the time limit sooner."""
LIMIT, PREEMPTED, UNKNOWN = "time limit reached", "preempted", "out of time or preempted"
"""Why a job ends, for the verdict."""
MARGIN_S = 5.0
"""Seconds before the end at which a requeue is asked for, whatever has been saved."""
KEEP_S = 20.0
"""Seconds for rollout to keep what it has, once the trainer has saved."""
_LIMIT_EVERY_S = 120.0
_RETRY_S = 2.0
_LOOK_S = 10.0
"""Seconds for squeue to answer a job that is being ended, which Slurm kills after `KillWait`."""
_POLL_S = 0.2


def install(job_id: str, run_dir: Path, *, asks: bool) -> None:
    """Makes this process outlive Slurm's announcements, and act on them if it is one of those.

    USR1 and USR2 are blocked, also in all that it starts: engines would die of them. SIGTERM and
    SIGCONT come with a preemption, too; what is to end a task insists with SIGKILL. Where Slurm
    announces a preemption with these alone, the end is near by what `squeue` says.

    Called in the main thread. A library may have made threads before, as OpenBLAS does when numpy
    is imported; these do not block them. What comes to one is written to a pipe.
    """
    heard = SimpleQueue[bool]()  # whether it is sure; may be put to by a handler

    def terminated(_number: int, _frame: FrameType | None) -> None:
        heard.put(False)

    signal.pthread_sigmask(signal.SIG_BLOCK, _ANNOUNCEMENTS)
    for number in (*_ANNOUNCEMENTS, signal.SIGCONT):
        signal.signal(number, _go_on)
    signal.signal(signal.SIGTERM, terminated if asks else _go_on)
    if asks:
        _listen(heard)
        act = threading.Thread(target=_act, args=[job_id, run_dir, heard], daemon=True)
        act.start()


def leave() -> None:
    """Makes this process, which is done, outlive announcements until it has exited.

    The interpreter takes handlers away while it ends, and not all threads block the signals.
    """
    for number in (*_ANNOUNCEMENTS, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _listen(heard: SimpleQueue[bool]) -> None:
    """Starts to put there what is announced, whichever thread it comes to."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)

    def wait() -> None:
        while True:
            signal.sigwait(_ANNOUNCEMENTS)
            heard.put(True)

    def read() -> None:
        while True:
            if os.read(reading, 1)[0] in _ANNOUNCEMENTS:
                heard.put(True)

    for target in (wait, read):
        threading.Thread(target=target, name="requeue", daemon=True).start()


def _act(job_id: str, run_dir: Path, heard: SimpleQueue[bool]) -> None:
    take_over(job_id, run_dir)
    while True:
        answer(job_id, run_dir, is_sure=heard.get())


def take_over(job_id: str, run_dir: Path) -> None:
    """Asks for the requeue of an end that was announced before this process began.

    Whoever announced it may have been killed before it asked, and then nobody would.
    """
    record = read_json(RunPaths(run_dir).ending(attempt_of(job_id)))
    if record is not None and "refused" not in record:
        ask_in_time(job_id, run_dir, left_s=left_s(job_id))


def answer(job_id: str, run_dir: Path, *, is_sure: bool) -> None:
    """Announces the end of the job and asks for a requeue in time, if nobody does.

    Args:
        job_id: of the leader.
        run_dir: of the run.
        is_sure: the end was announced; else only a job that Slurm ends soon is meant.
    """
    heard = time.monotonic()
    if is_sure and not announce(job_id, run_dir):
        return
    seconds = left_s(job_id)
    if not is_sure:
        is_near = seconds is not None and seconds <= SIGNAL_AHEAD_S
        if not (is_near and announce(job_id, run_dir)):
            return
    most_s = SIGNAL_AHEAD_S - (time.monotonic() - heard)
    ask_in_time(job_id, run_dir, left_s=seconds, most_s=most_s)


def attempt_of(job_id: str) -> str:
    """Name of this attempt of a job, as `TaskContext` has it."""
    return f"{job_id}.{num_restarts()}"


def num_restarts() -> int:
    """Times that Slurm has started this job again."""
    return int(os.environ.get("SLURM_RESTART_COUNT", "0"))


def announce(job_id: str, run_dir: Path, **why: bool) -> bool:
    """Says that the job is about to end; whether nobody had. After a refusal one may again.

    Args:
        job_id: of the leader.
        run_dir: of the run.
        why: goes into the record.
    """
    record = RunPaths(run_dir).ending(attempt_of(job_id))
    if "refused" in (read_json(record) or {}):
        storage.delete(record)
    return write_json_once(record, {"time": time.time(), **why})


def ask_in_time(
    job_id: str,
    run_dir: Path,
    *,
    left_s: float | None,
    most_s: float = SIGNAL_AHEAD_S,
    why: str = "",
) -> None:
    """Asks for a requeue once the trainer has saved and rollout has kept what it had, or when there
    is no more time; notes when in the record of the end.

    Args:
        job_id: of the leader.
        run_dir: of the run.
        left_s: seconds until the job ends; None where nobody says.
        most_s: seconds of these that are waited for, since a preemption does not move the limit.
        why: the job ends; unset, `left_s` tells.
    """
    paths, attempt = RunPaths(run_dir), attempt_of(job_id)
    limit = None if left_s is None else time.time() + left_s
    end = time.monotonic() + min(SIGNAL_AHEAD_S if left_s is None else left_s, most_s)
    records = paths.saves(attempt), paths.critic_saves(attempt)
    while (late := is_unsaved(records)) and time.monotonic() < end - MARGIN_S:
        time.sleep(_POLL_S)
    # A rollout task that has died meanwhile keeps nothing, so they are waited for not as long.
    kept, until = paths.all_keeps(attempt), min(end - MARGIN_S, time.monotonic() + KEEP_S)
    while (kept := [each for each in kept if is_unsaved([each])]) and time.monotonic() < until:
        time.sleep(_POLL_S)
    step = (read_json(records[0]) or {}).get("step")
    saved = "" if step is None else f", with step {step} saved"
    if late:
        log.warning("the trainer has not saved in time")
        saved += ", and a save was not done in time"
    said = {"time": time.time()} | (read_json(paths.ending(attempt)) or {})
    write_json(paths.ending(attempt), said | {"asked": time.time(), "limit": limit})
    if refused := ask(job_id, run_dir, until=end, saved=saved, why=why or reason(left_s)):
        write_json(paths.ending(attempt), {"time": time.time(), "refused": refused})


def reason(left_s: float | None) -> str:
    """Tells in words why an end was announced, by the seconds of the time limit that are left."""
    if left_s is None:
        return UNKNOWN
    return LIMIT if left_s <= SIGNAL_AHEAD_S + _EARLY_S else PREEMPTED


def is_unsaved(records: Iterable[Path]) -> bool:
    """Whether somebody who will save has not done so."""
    found = [read_json(record) for record in records]
    return any(each is not None and each["step"] is None for each in found)


def ask(
    job_id: str,
    run_dir: Path,
    *,
    until: float = 0.0,
    saved: str = "",
    why: str = UNKNOWN,
    hold_for: str = "",
) -> str:
    """Has Slurm requeue a job; one that is not requeued ends all the same, and can be resumed.

    A job that `cancel` has told to end is not requeued. Slurm would do it, as long as tasks of it
    live.

    Args:
        job_id: of the leader.
        run_dir: of the run.
        until: time.monotonic() up to which it is asked again where the controller is silent.
        saved: words for the verdict: what was saved for this, and what was not.
        why: the job ends, in words.
        hold_for: why the job is to be held in the queue until somebody releases it; unset, it is
            started again as soon as Slurm can.

    Returns:
        Why it was refused; empty if it was not.
    """
    restarts, cancelled = num_restarts(), RunPaths(run_dir).cancelled(job_id)
    is_cancelled = seen.follow(cancelled, partial(storage.exists, cancelled))
    if is_cancelled():
        return _end_cancelled(job_id, run_dir)
    if restarts >= MAX_REQUEUES:
        said = f"the job is not requeued: it has been, {restarts} times; resume it"
        return _refuse(job_id, run_dir, said)
    why = hold_for or f"{why}{saved}"
    held = ", and held until the other side has made work" * bool(hold_for)
    said = f"{why}: requeued, for the time number {restarts + 1}{held}"
    tell(job_id, run_dir, "requeued", said)  # before: a job that is requeued is ended at once
    command = ["scontrol", "requeuehold" if hold_for else "requeue", job_id]
    answer = output_of(command)
    while answer.returncode and is_silent(answer) and time.monotonic() < until:
        if is_cancelled():
            break
        time.sleep(_RETRY_S)
        answer = output_of(command)
    # The record is written before scancel: where it is not here yet, scancel comes after this.
    if is_cancelled():
        return _end_cancelled(job_id, run_dir)
    # What asked may have been ended by the requeue that it asked for, or Slurm was quicker.
    if answer.returncode and not was_requeued(job_id):
        log.error(
            "the job is not requeued (%s): once it has ended, relax-hpc resume %s",
            words_of(answer), run_dir,
        )  # fmt: skip
        said = f"{why}, and not requeued ({words_of(answer)}){'' if hold_for else '; resume it'}"
        tell(job_id, run_dir, "refused", said)
        return said
    log.warning("%s", said)
    return ""


def _end_cancelled(job_id: str, run_dir: Path) -> str:
    """Cancels a job, which may have been requeued since it was; why it is not requeued."""
    output_of(["scancel", job_id])
    return _refuse(
        job_id, run_dir, "the job is not requeued: the run was cancelled; resume it to go on"
    )


def _refuse(job_id: str, run_dir: Path, said: str) -> str:
    log.error(said)
    tell(job_id, run_dir, "refused", said)
    return said


def was_requeued(job_id: str) -> bool:
    """Whether Slurm has requeued the job since this attempt of it began."""
    command = ["squeue", "-h", "--states=all", "-j", job_id, "-O", "RestartCnt"]
    answer = output_of(command, _LOOK_S)
    if answer.returncode and is_silent(answer):
        answer = output_of(command, _LOOK_S)
    return any(word.isdigit() and int(word) > num_restarts() for word in answer.stdout.split())


def tell(job_id: str, run_dir: Path, what: str, words: str) -> None:
    """Leaves the verdict on a job; `runs` is above this room."""
    module = [sys.executable, "-P", "-m", "relax_hpc.runs.verdict", str(run_dir)]
    answer = output_of([*module, "--job-id", job_id, "--what", what, "--words", words])
    if answer.returncode:
        log.error("the verdict could not be written: %s", words_of(answer))


class JobEnd:
    """The end of a job by its time limit; see `roles.training.admission`.

    Slurm is asked in a thread, now and then: whoever may do so can move the limit. That begins when
    somebody first wants to know, which of the tasks that may ask for a requeue only a trainer does.
    """

    def __init__(self, job_id: str, run_dir: Path) -> None:
        self._job_id, self._run_dir = job_id, run_dir
        self._at: float | None = None
        """Time of `time.monotonic()`."""
        self._follower = threading.Thread(target=self._follow, name="time limit", daemon=True)

    @property
    def ahead_s(self) -> float:
        return SIGNAL_AHEAD_S

    def left_s(self) -> float | None:
        if self._follower.ident is None:
            self._follower.start()
        at = self._at
        return None if at is None else at - time.monotonic()

    def announce(self) -> None:
        if not announce(self._job_id, self._run_dir):
            return
        threading.Thread(
            target=ask_in_time,
            args=(self._job_id, self._run_dir),
            kwargs={"left_s": self.left_s(), "most_s": math.inf, "why": LIMIT},
            daemon=True,
        ).start()

    def _follow(self) -> None:
        while True:
            if (seconds := left_s(self._job_id)) is not None:
                self._at = time.monotonic() + seconds
            time.sleep(_LIMIT_EVERY_S)


def _go_on(_number: int, _frame: FrameType | None) -> None:
    """A handler, and not SIG_IGN, which children would inherit."""


def left_s(job_id: str) -> float | None:
    """Seconds of a running job's time limit that are left; None where nobody says so soon."""
    asked = time.monotonic()
    known = states.in_queue([job_id], _LOOK_S).known.values()
    left = [each.left_s for each in known if each.state == "RUNNING" and each.left_s is not None]
    return min(left) - (time.monotonic() - asked) if left else None
