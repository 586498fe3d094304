"""Calls Slurm's commands: asks for the state of a job's components, with or without accounting, and
explains reasons."""

import functools
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from subprocess import CompletedProcess, TimeoutExpired

from relax_hpc.runtime import process
from relax_hpc.runtime.process import ProcessId

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
"""Every state of squeue and sacct, and our RESTARTING -> whether the job may still act.

A job being requeued is PENDING, not PREEMPTED or NODE_FAIL; a REVOKED one is on another cluster.
"""

UNKNOWN = "UNKNOWN"
"""Slurm answers but has forgotten the job, which left no exit code."""

UNREACHABLE = "UNREACHABLE"
"""Slurm, or the job's machine, gave no answer."""

_HELD = "job requeued in held state"
"""Reason of a job requeued with hold; squeue says PENDING."""
_WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT")
_FORGOTTEN = "Invalid job id"


_SILENCE = re.compile(
    r"Unable to contact|Could not establish a configuration|timed out|[Cc]onnection (refused|reset)"
    r"|Zero Bytes|communication|Unable to resolve|[Cc]onnect failure|DNS SRV|No route to host"
)
"""Messages of Slurm's commands when the controller is unreachable."""
_TASTES = ("SQUEUE_", "SINFO_", "SACCT_", "SCANCEL_", "SLURM_TIME_FORMAT")
"""Prefixes of variables that change the output of Slurm's commands."""


@dataclass(frozen=True, slots=True)
class StartedJob:
    job_id: str
    component_ids: tuple[str, ...]
    """Names of the components for `squeue` and `scancel`."""
    cancel: Callable[[], None]
    """Ends every component."""
    controller: ProcessId | None = None
    """The process that runs the script, without Slurm."""


def output_of(
    command: Sequence[str], timeout_s: float = 60, environment: Mapping[str, str] | None = None
) -> CompletedProcess[str]:
    """Runs a short Slurm command, with untranslated output.

    A missing command or a timeout counts as a failure: see `words_of`.
    """
    all_of_it = os.environ if environment is None else environment
    plain = {name: value for name, value in all_of_it.items() if not name.startswith(_TASTES)}
    try:
        return process.run(command, timeout_s, environment=plain)
    except TimeoutExpired:
        said = f"no answer in {timeout_s:.0f} s"
    except OSError as error:
        said = f"cannot be run: {error.strerror}"
    except ValueError as error:  # an argument that no program can be given
        said = f"cannot be run: {error}"
    return CompletedProcess(command, returncode=-1, stdout="", stderr=said)


def words_of(answer: CompletedProcess[str]) -> str:
    """Describes a command's failure in one line."""
    name = Path(answer.args[0]).name
    said = [line.strip() for line in answer.stderr.splitlines() if line.strip()]
    lines = [re.sub(rf"^{name}: ((error|fatal): )?", "", line) for line in said]
    if is_silent(answer):
        lines = lines[-1:]  # before it, each of its tries
    return f"{name}: {'; '.join(lines) or f'exit code {answer.returncode}'}"


def is_silent(answer: CompletedProcess[str]) -> bool:
    """Whether a command failed because nobody answered it, rather than because of the request."""
    return answer.returncode < 0 or bool(_SILENCE.search(answer.stderr))


@dataclass(frozen=True, slots=True)
class SlurmState:
    job_id: str
    """Name for squeue and sacct: "<leader>+<k>", or "<leader>" if it is alone."""
    state: str
    """PENDING, RUNNING, COMPLETED, FAILED, CANCELLED, TIMEOUT, ..."""
    nodes: str
    reason: str = ""
    """Slurm's reason for waiting."""
    start: float | None = None
    """Actual or expected start, seconds since 1970."""
    left_s: float | None = None
    """Remaining seconds of its time limit."""


@dataclass(frozen=True, slots=True)
class Answer:
    known: dict[str, SlurmState]
    """Components by name, without forgotten ones."""
    silence: str
    """Why the controller did not answer; empty if it did. `known` is then empty: accounting may
    report an earlier attempt of a requeued job."""


def is_alive(state: str) -> bool:
    """Whether a job in that state may still act; an unknown state counts as alive."""
    return ALIVE.get(state, True)


def is_over(state: str) -> bool:
    """Whether there is nothing to wait for, even if the result will never be known."""
    return not is_alive(state) or state == UNKNOWN


def is_waiting(state: str) -> bool:
    return state in _WAITING


def is_doubtful(state: str) -> bool:
    """Whether nobody can tell: UNKNOWN, UNREACHABLE, or a state unknown to us."""
    return state not in ALIVE


@functools.cache
def has_accounting() -> bool:
    """Whether sacct works here; without a database it only prints that it is disabled."""
    return shutil.which("sacct") is not None and not output_of([*SACCT, "-j", "1"]).returncode


def query(leaders: Sequence[str]) -> Answer:
    """Returns the components of jobs.

    squeue knows a job at once and forgets it minutes after its end; sacct does the reverse.
    """
    if not leaders:
        return Answer({}, "")
    answer = in_queue(leaders)
    if answer.silence or not has_accounting():
        return answer
    said = output_of([*SACCT, "-j", ",".join(leaders)])
    return Answer(_parse(said.stdout.splitlines()[1:]) | answer.known, "")


def in_queue(leaders: Sequence[str], timeout_s: float = 60) -> Answer:
    """Returns the components of jobs from squeue alone: accounting may be slow.

    Args:
        leaders: at least one.
        timeout_s: limit for squeue.
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
    """Parses Slurm's local time; None for "N/A"."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        return None


def _seconds(text: str) -> float | None:
    """Parses "[[D-]HH:]MM:SS"; None for "UNLIMITED", "INVALID", "NOT_SET"."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


COMPONENT_CANCELLED = "ComponentCancelled"
"""Our reason for a job requeued after one of its components was cancelled."""
_WAITS = {
    COMPONENT_CANCELLED: "never starts, since a component was cancelled; cancel it, then resume",
    "Resources": "waits for nodes to be free",
    "Priority": "others are before it in the queue",
    "Dependency": "waits for the jobs that it depends on",
    "DependencyNeverSatisfied": "never starts, since a job that it depends on failed; cancel it",
    "BeginTime": "is not to begin before a set time; a job that was requeued waits two minutes",
    "JobHeldUser": "is held; scontrol release starts it",
    "JobHeldAdmin": "is held by an administrator",
    "launch": "is held, since a node could not be prepared for it; scontrol release starts it",
    "JobHoldMaxRequeue": "is held, since it was requeued too often; scontrol release starts it",
    "ReqNodeNotAvail": "nodes that it needs are down, drained or reserved",
    "Reservation": "waits for its reservation to begin",
    "Licenses": "waits for licenses",
    "PartitionDown": "its partition is down",
    "PartitionInactive": "its partition is inactive",
    "PartitionTimeLimit": "never starts: asks for more time than its partition allows; cancel it",
    "PartitionNodeLimit": "never starts: asks for more nodes than its partition allows; cancel it",
    "QOSNotAllowed": "never starts: its QOS is not for its partition; cancel it, change one",
    "InvalidQOS": "never starts: its QOS is gone, or not for its account; cancel it",
    "InvalidAccount": "never starts: its account is gone, or not for you; cancel it",
    "AccountNotAllowed": "never starts: its account is not for its partition; cancel it",
    "BadConstraints": "never starts: no node has what it asks for; cancel it",
    "NodeDown": "a node that it needs is down",
}
_OWNERS = {
    "Assoc": ("its account", "sacctmgr show assoc"),
    "QOS": ("its QOS", "sacctmgr show qos"),
    "Max": ("its QOS", "sacctmgr show qos"),
}
"""Prefixes of limit reasons -> whose limit it is, and the command that shows it."""
_LIMITS = {
    r"(Max)?.*Per(Job|Node)|Min.*|Time": (
        "never starts: {owner} does not allow a job what it asks for; cancel it, change that"
    ),
    r"(Max)?(Submit)?Jobs?.*|GrpSubmitJobs|GrpJobs": (
        "there are as many jobs as {owner} allows; starts when others end"
    ),
    r"Grp(?!.*Run).*(Minutes|Wall)": (
        "the hours of {owner} are used up; waits for new ones, or cancel it and take another"
    ),
    r".*": "{owner} has all it may at once; starts when others end, never if it alone wants more",
}
"""Limits by the rest of the reason; Slurm neither refuses nor starts most such jobs."""


def why(reason: str) -> str:
    """Explains a reason, with advice; empty if unknown."""
    word = (re.match(r"\w*", reason) or [""])[0]
    return _WAITS.get(word) or _limit(word)


def _limit(word: str) -> str:
    for begin, (owner, command) in _OWNERS.items():
        if word.startswith(begin):
            rest = word.removeprefix(begin).removesuffix("Limit")
            said = next(text for form, text in _LIMITS.items() if re.fullmatch(form, rest))
            return f"{said.format(owner=owner)} ({command})"
    return ""


def when(start: float | None) -> str:
    """Says when a job is expected to start; empty if unknown."""
    if start is None or start < time.time():
        return ""
    form = "%H:%M" if start - time.time() < 12 * 3600 else "%Y-%m-%d %H:%M"
    return f"expected to start at {time.strftime(form, time.localtime(start))}"
