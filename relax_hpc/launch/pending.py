"""Slurm's reasons for not starting a job yet, in words."""

import re
import time

_WAITS = {
    "Resources": "waits for nodes to be free",
    "Priority": "others are before it in the queue",
    "Dependency": "waits for the jobs that it depends on",
    "DependencyNeverSatisfied": "never starts, since a job that it depends on failed; cancel it",
    "BeginTime": "is not to begin before a set time; a job that was requeued waits two minutes",
    "JobHeldUser": "is held; scontrol release starts it",
    "JobHeldAdmin": "is held by an administrator",
    "JobHoldMaxRequeue": "is held, since it was requeued too often; scontrol release starts it",
    "ReqNodeNotAvail": "nodes that it needs are down, drained or reserved",
    "Reservation": "waits for its reservation to begin",
    "Licenses": "waits for licenses",
    "PartitionDown": "its partition is down",
    "PartitionInactive": "its partition is inactive",
    "PartitionTimeLimit": "never starts: asks for more time than its partition allows; cancel it",
    "PartitionNodeLimit": "never starts: asks for more nodes than its partition allows; cancel it",
    "BadConstraints": "never starts: no node has what it asks for; cancel it",
    "NodeDown": "a node that it needs is down",
}
_LIMITS = {"Assoc": "a limit of its account is reached", "QOS": "a limit of its QOS is reached"}


def why(reason: str) -> str:
    """Says a reason in words; empty for one that is not known."""
    word = (re.match(r"\w*", reason) or [""])[0]
    limit = next((words for prefix, words in _LIMITS.items() if word.startswith(prefix)), "")
    return _WAITS.get(word, limit)


def when(start: float | None) -> str:
    """Says when a job is expected to start; empty where Slurm does not."""
    if start is None or start < time.time():
        return ""
    form = "%H:%M" if start - time.time() < 12 * 3600 else "%Y-%m-%d %H:%M"
    return f"expected to start at {time.strftime(form, time.localtime(start))}"
