"""Requeues a job that reaches its time limit or is preempted.

Slurm signals every process of every task. Task 0 of each component reacts, and the first one leads:
it writes the announcement (`roles.ending`), waits for the trainer's save as long as possible, and
asks for a requeue, which ends all tasks. If refused, they run until Slurm ends them.
"""

import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from types import FrameType

from relax_hpc.launch import states
from relax_hpc.launch.states import is_silent, output_of, words_of
from relax_hpc.runtime.files import storage
from relax_hpc.runtime.files.records import follow, read_json, retract, write_json, write_json_once
from relax_hpc.runtime.paths import RunPaths

log = logging.getLogger(__name__)

SIGNAL, SIGNAL_AHEAD_S = signal.SIGUSR2, 90
"""The signal that Slurm sends, and its lead over the time limit; NCCL may use SIGUSR1."""
_ANNOUNCEMENTS = {signal.SIGUSR1, SIGNAL}
MAX_REQUEUES = 1000
"""Not endless: each needs a step of progress."""
_EARLY_S = 60.0
"""How much earlier Slurm may signal the time limit."""
LIMIT, PREEMPTED, UNKNOWN = "time limit reached", "preempted", "out of time or preempted"
"""Reasons for the verdict."""
MARGIN_S = 5.0
"""Seconds before the end at which the requeue is requested, saved or not."""
KEEP_S = 20.0
"""Seconds for rollout to keep its responses after the trainer's save."""
_LIMIT_EVERY_S = 120.0
_RETRY_S = 2.0
_LOOK_S = 10.0
"""Limit for squeue in an ending job, which Slurm kills after `KillWait`."""
_POLL_S = 0.2


def install(job_id: str, run_dir: Path, *, asks: bool) -> None:
    """Makes this process survive Slurm's announcements, and react if it is responsible.

    Blocks USR1 and USR2, also in child processes: engines would die of them. A preemption also
    sends SIGTERM and SIGCONT; a real kill follows with SIGKILL. If Slurm announces preemptions by
    these alone, `squeue` tells whether the end is near.

    Call it in the main thread. Threads made earlier, e.g. by OpenBLAS in numpy's import, do not
    block the signals; their deliveries go to a pipe.
    """
    heard = SimpleQueue[bool]()  # whether it is sure; may be put to by a handler

    def note_sigterm(_number: int, _frame: FrameType | None) -> None:
        heard.put(False)

    signal.pthread_sigmask(signal.SIG_BLOCK, _ANNOUNCEMENTS)
    for number in (*_ANNOUNCEMENTS, signal.SIGCONT):
        signal.signal(number, _go_on)
    signal.signal(signal.SIGTERM, note_sigterm if asks else _go_on)
    if asks:
        _listen(heard)
        act = threading.Thread(target=_act, args=[job_id, run_dir, heard], daemon=True)
        act.start()


def leave() -> None:
    """Makes this process survive announcements until it has exited.

    The interpreter removes handlers at exit, and not all threads block the signals.
    """
    for number in (*_ANNOUNCEMENTS, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _listen(heard: SimpleQueue[bool]) -> None:
    """Begins to queue announcements, whichever thread receives them."""
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
    outlive(job_id, run_dir, partial(take_over, job_id, run_dir), is_sure=False)
    while True:
        is_sure = heard.get()
        call = partial(answer, job_id, run_dir, is_sure=is_sure)
        outlive(job_id, run_dir, call, is_sure=is_sure)


def outlive(job_id: str, run_dir: Path, call: Callable[[], None], *, is_sure: bool) -> None:
    """Runs the thread that reacts to the job's end. On any error it logs, and still requests the
    requeue: nobody else would.

    Args:
        job_id: of the leader.
        is_sure: the end was announced; else only act if the run directory has an announcement, or
            the end is near.
    """
    begun = time.monotonic()
    try:
        call()
    except BaseException as error:  # also SystemExit, which ends a thread without a word
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        log.exception("the end of the job was not answered as it should be; asking for the requeue")
    else:
        return
    end = begun + SIGNAL_AHEAD_S
    saved = f", and its end was not answered as it should be ({why})"
    try:
        seconds, record = read_left_s(job_id), RunPaths(run_dir).ending(attempt_of(job_id))
        is_told = "refused" not in (read_json(record) or {"refused": ""})
        if not (is_sure or is_told or (seconds is not None and seconds <= SIGNAL_AHEAD_S)):
            return
        if not is_told:  # better by several than by nobody
            write_json(record, {"time": time.time()})
        most_s = end - time.monotonic()
        why = f"{reason(seconds)}{saved}"
        ask_in_time(job_id, run_dir, left_s=seconds, most_s=most_s, why=why)
    except BaseException:
        log.exception("the trainer cannot be waited for; asking for the requeue at once")
        try:
            ask(job_id, run_dir, until=end, saved=saved)
        except BaseException:  # the verdict says so
            log.exception("the requeue could not be asked for")


def take_over(job_id: str, run_dir: Path) -> None:
    """Requests the requeue for an end announced before this process began.

    The announcing process may have been killed before its request.
    """
    record = read_json(RunPaths(run_dir).ending(attempt_of(job_id)))
    if record is not None and not record.keys() & {"refused", "cancel"}:
        ask_in_time(job_id, run_dir, left_s=read_left_s(job_id))


def answer(job_id: str, run_dir: Path, *, is_sure: bool) -> None:
    """Announces the job's end and requests a requeue in time, unless another process does.

    Args:
        job_id: of the leader.
        is_sure: the end was announced; else only act if Slurm ends the job soon.
    """
    heard = time.monotonic()
    if is_sure and not announce(job_id, run_dir):
        return
    seconds = read_left_s(job_id)
    if not is_sure:
        is_near = seconds is not None and seconds <= SIGNAL_AHEAD_S
        if not (is_near and announce(job_id, run_dir)):
            return
    most_s = SIGNAL_AHEAD_S - (time.monotonic() - heard)
    ask_in_time(job_id, run_dir, left_s=seconds, most_s=most_s)


def attempt_of(job_id: str) -> str:
    """Returns the attempt's name, as in `TaskContext`."""
    return f"{job_id}.{num_restarts()}"


def num_restarts() -> int:
    """Number of times that Slurm has restarted this job."""
    return int(os.environ.get("SLURM_RESTART_COUNT", "0"))


def announce(job_id: str, run_dir: Path, **why: bool) -> bool:
    """Announces the job's end; returns whether it was first. After a refusal it can be repeated,
    and it takes the place of `relax-hpc cancel --save`.

    Args:
        job_id: of the leader.
        why: fields for the record.
    """
    record = RunPaths(run_dir).ending(attempt_of(job_id))
    if (read_json(record) or {}).keys() & {"refused", "cancel"}:
        retract(record)
    return write_json_once(record, {"time": time.time(), **why})


def ask_in_time(
    job_id: str,
    run_dir: Path,
    *,
    left_s: float | None,
    most_s: float = SIGNAL_AHEAD_S,
    why: str = "",
) -> None:
    """Requests a requeue once trainer and rollout have saved, or when time runs out; records when.

    Args:
        job_id: of the leader.
        left_s: seconds until the job ends; None if unknown.
        most_s: longest wait, since a preemption does not move the limit.
        why: reason; default follows from `compute_left_s`.
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
    """Describes why an end was announced, by the remaining seconds of the time limit."""
    if left_s is None:
        return UNKNOWN
    return LIMIT if left_s <= SIGNAL_AHEAD_S + _EARLY_S else PREEMPTED


def is_unsaved(records: Iterable[Path]) -> bool:
    """Whether a save is still pending."""
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
    """Asks Slurm to requeue a job; a refused one ends, and can be resumed.

    Never requeues a job that `cancel` is ending, which Slurm would allow while its tasks live.

    Args:
        job_id: of the leader.
        until: time.monotonic() until which an unresponsive controller is retried.
        saved: what was saved or not, for the verdict.
        why: reason, in words.
        hold_for: reason to hold the job until released; default starts it as soon as possible.

    Returns:
        Why it was refused; empty if it was not.
    """
    restarts, cancelled = num_restarts(), RunPaths(run_dir).cancellation(job_id)
    is_cancelled = partial(_is_so, follow(cancelled, partial(storage.exists, cancelled)))
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
    try:
        answer = output_of(command)
        while answer.returncode and is_silent(answer) and time.monotonic() < until:
            if is_cancelled():
                break
            time.sleep(_RETRY_S)
            answer = output_of(command)
    except BaseException as error:  # the verdict must not stay
        unsaid = f"{type(error).__name__}: {error}".splitlines()[0]
        tell(job_id, run_dir, "refused", f"{why}, and not requeued ({unsaid}); resume it")
        raise
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


def _is_so(look: Callable[[], bool]) -> bool:
    """Whether the run was cancelled; False if unreadable: `cancel` cancels requeued jobs again."""
    try:
        return look()
    except OSError as error:
        log.warning("%s; taken for a run that nobody cancelled", error)
        return False


def _end_cancelled(job_id: str, run_dir: Path) -> str:
    """Cancels a job, maybe requeued since; returns why it is not requeued."""
    output_of(["scancel", job_id])
    return _refuse(
        job_id, run_dir, "the job is not requeued: the run was cancelled; resume it to go on"
    )


def _refuse(job_id: str, run_dir: Path, said: str) -> str:
    log.error(said)
    tell(job_id, run_dir, "refused", said)
    return said


def was_requeued(job_id: str) -> bool:
    """Whether Slurm has requeued the job since this attempt began."""
    command = ["squeue", "-h", "--states=all", "-j", job_id, "-O", "RestartCnt"]
    answer = output_of(command, _LOOK_S)
    if answer.returncode and is_silent(answer):
        answer = output_of(command, _LOOK_S)
    return any(word.isdigit() and int(word) > num_restarts() for word in answer.stdout.split())


def tell(job_id: str, run_dir: Path, what: str, words: str) -> None:
    """Records the verdict on a job; this package may not import `runs`."""
    module = [sys.executable, "-P", "-m", "relax_hpc.runs.verdict", str(run_dir)]
    try:
        answer = output_of([*module, "--job-id", job_id, "--what", what, "--words", words])
    except Exception:  # whoever asks for a requeue goes on
        log.exception("the verdict could not be written: %s", words)
        return
    if answer.returncode:
        log.error("the verdict could not be written: %s", words_of(answer))


class SlurmJobEnd:
    """The end of a job by its time limit; see `roles.ending.Admission`.

    A thread asks Slurm now and then, since the limit may be changed. It starts on first use, which
    is only in a trainer.
    """

    def __init__(self, job_id: str, run_dir: Path) -> None:
        self._job_id, self._run_dir = job_id, run_dir
        self._at: float | None = None
        """`time.monotonic()` at the end."""
        self._follower = threading.Thread(target=self._follow, name="time limit", daemon=True)

    @property
    def ahead_s(self) -> float:
        return SIGNAL_AHEAD_S

    def compute_left_s(self) -> float | None:
        if self._follower.ident is None:
            self._follower.start()
        at = self._at
        return None if at is None else at - time.monotonic()

    def announce(self) -> None:
        if not announce(self._job_id, self._run_dir):
            return
        ask = partial(
            ask_in_time, self._job_id, self._run_dir, left_s=self.compute_left_s(), most_s=math.inf,
            why=LIMIT,
        )  # fmt: skip
        end = (self._job_id, self._run_dir, ask)
        threading.Thread(target=outlive, args=end, kwargs={"is_sure": True}, daemon=True).start()

    def _follow(self) -> None:
        while True:
            try:
                if (seconds := read_left_s(self._job_id)) is not None:
                    self._at = time.monotonic() + seconds
            except Exception:
                log.exception("the time limit could not be asked for; asking again")
            time.sleep(_LIMIT_EVERY_S)


def _go_on(_number: int, _frame: FrameType | None) -> None:
    """A handler instead of SIG_IGN, which children would inherit."""


def read_left_s(job_id: str) -> float | None:
    """Remaining seconds of a job's time limit; None if unknown in time."""
    asked = time.monotonic()
    known = states.in_queue([job_id], _LOOK_S).known.values()
    left = [each.left_s for each in known if each.state == "RUNNING" and each.left_s is not None]
    return min(left) - (time.monotonic() - asked) if left else None
