"""Slurm's reasons for not starting a job yet, in words."""

import re
import time

COMPONENT_CANCELLED = "ComponentCancelled"
"""Our word for a job that Slurm has requeued after one of its components was cancelled."""
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
"""Begins of the reasons that name a limit -> whose it is, and the command that shows it."""
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
"""Limits by the rest of the reason; most are neither refused nor started by Slurm."""


def why(reason: str) -> str:
    """Says a reason in words, and what to do; empty for one that is not known."""
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
    """Says when a job is expected to start; empty where Slurm does not."""
    if start is None or start < time.time():
        return ""
    form = "%H:%M" if start - time.time() < 12 * 3600 else "%Y-%m-%d %H:%M"
    return f"expected to start at {time.strftime(form, time.localtime(start))}"
