"""Slurm's word on a job, per component, with or without an accounting database."""

import functools
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from relax_hpc.launch.jobs import output_of, words_of

# What is left of a finished job is worth a look for as long as slurmctld keeps it (MinJobAge).
SQUEUE = ("squeue", "--states=all", "--array", "-o", "%i|%T|%N|%A|%r|%S|%L")
SACCT = ("sacct", "-X", "--parsable2", "-o", "JobID,State,NodeList,JobIDRaw")

ALIVE: Mapping[str, bool] = {
    **dict.fromkeys(
        (
            *("PENDING", "CONFIGURING", "RUNNING", "RESTARTING", "COMPLETING"),
            *("SUSPENDED", "STOPPED", "SIGNALING", "RESIZING", "STAGE_OUT", "EXPEDITING"),
            # Slurm starts it again by itself, or once somebody releases it.
            *("REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"),
            *("LAUNCH_FAILED", "POWER_UP_NODE", "REVOKED"),
        ),
        True,
    ),
    **dict.fromkeys(
        (
            *("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "DEADLINE", "OUT_OF_MEMORY"),
            *("NODE_FAIL", "BOOT_FAIL", "PREEMPTED"),
        ),
        False,
    ),
}
"""Every state that squeue and sacct print, and our RESTARTING: may the job do something?

A job that Slurm requeues is PENDING, not PREEMPTED or NODE_FAIL; a REVOKED one is on another
cluster.
"""

UNKNOWN = "UNKNOWN"
"""Slurm answers and has forgotten the job, which left no exit code."""

UNREACHABLE = "UNREACHABLE"
"""Slurm, or the machine that runs the job, was not asked or gave no answer."""

_HELD = "job requeued in held state"
"""Reason of a job that was requeued and starts when it is released; squeue says PENDING."""
_WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT")
_FORGOTTEN = "Invalid job id"


@dataclass(frozen=True, slots=True)
class SlurmState:
    """One component as Slurm sees it."""

    job_id: str
    """Name for squeue and sacct: "<leader>+<k>", or "<leader>" where it is alone."""
    state: str
    """One word: PENDING, RUNNING, COMPLETED, FAILED, CANCELLED, TIMEOUT, ..."""
    nodes: str
    reason: str = ""
    """Slurm's word for why it waits."""
    start: float | None = None
    """Time at which it began, or is expected to begin, seconds since 1970."""
    left_s: float | None = None
    """Seconds of its time limit that are left."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Slurm's answer about some jobs."""

    known: dict[str, SlurmState]
    """Components by name; a job that Slurm has forgotten has none."""
    silence: str
    """Why the controller did not answer; empty if it did. `known` is then empty, since what the
    accounting database says may be the end of an earlier attempt of a job that was requeued."""


def is_alive(state: str) -> bool:
    """Whether a job in that state may do something; a word that we do not know counts as alive."""
    return ALIVE.get(state, True)


def is_over(state: str) -> bool:
    """Whether there is nothing to wait for; also if nobody will ever know how the job ended."""
    return not is_alive(state) or state == UNKNOWN


def is_waiting(state: str) -> bool:
    """Whether the job waits to be started, for the first time or again."""
    return state in _WAITING


def is_doubtful(state: str) -> bool:
    """Returns whether nobody can tell: UNKNOWN, UNREACHABLE, or a word that we do not know."""
    return state not in ALIVE


@functools.cache
def has_accounting() -> bool:
    """Whether sacct answers here; without a database it only prints that it is disabled."""
    return shutil.which("sacct") is not None and not output_of([*SACCT, "-j", "1"]).returncode


def query(leaders: Sequence[str]) -> Answer:
    """The components of jobs.

    squeue knows a job at once and forgets it minutes after its end; sacct is the other way round.
    """
    if not leaders:
        return Answer({}, "")
    answer = in_queue(leaders)
    if answer.silence or not has_accounting():
        return answer
    said = output_of([*SACCT, "-j", ",".join(leaders)])
    return Answer(_parse(said.stdout.splitlines()[1:]) | answer.known, "")


def in_queue(leaders: Sequence[str], timeout_s: float = 60) -> Answer:
    """The components of jobs that squeue knows: accounting, which may be slow, is not asked.

    Args:
        leaders: of the jobs; one at least.
        timeout_s: seconds that squeue has.
    """
    answer = output_of([*SQUEUE, "-h", "-j", ",".join(leaders)], timeout_s)
    if answer.returncode and _FORGOTTEN not in answer.stderr:
        return Answer({}, words_of(answer))
    return Answer(_parse(answer.stdout.splitlines()), "")


def _parse(lines: Iterable[str]) -> dict[str, SlurmState]:
    known = {}
    for line in lines:
        job_id, state, nodes, _, reason, start, left, *_ = [*line.split("|"), *[""] * 6]
        # sacct says who cancelled a job: "CANCELLED by 0".
        word = state.split()[0] if state else UNKNOWN
        why = reason.strip("()") if is_waiting(word) and reason not in ("", "None") else ""
        if why == _HELD:
            word, why = "REQUEUE_HOLD", "JobHeldUser"
        known[job_id] = SlurmState(job_id, word, nodes, why, _time(start), _seconds(left))
    return known


def _time(text: str) -> float | None:
    """Reads a local time as Slurm writes it; None of "N/A"."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        return None


def _seconds(text: str) -> float | None:
    """Reads "[[D-]HH:]MM:SS"; None of "UNLIMITED", "INVALID", "NOT_SET"."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
