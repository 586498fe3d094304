"""The standing of an engine: what the owner says of it, joined with what the trainer says."""

from typing import Literal

from relax_hpc.fleet.members import Member
from relax_hpc.fleet.roster import Roster

Standing = Literal[
    "PENDING", "WAITING", "STARTING", "HEALTHY", "SYNCING", "ACTIVE", "ASLEEP", "FENCED",
    "DRAINING", "GONE", "FAILED", "CANCELLED",
]  # fmt: skip
"""PENDING and CANCELLED are known to the scaler only: there is no engine to speak for itself."""

ENDED = ("GONE", "FAILED", "CANCELLED")


def standing(member: Member | None, roster: Roster | None) -> Standing:
    """The state of an engine whose step was started.

    Only an ACTIVE one is sent requests, except before the first update (`roster` is None): then
    rollout tasks use their own engines as they are, at version 0.
    """
    if member is None:
        return "STARTING"
    if member.state != "HEALTHY" or roster is None:
        return member.state
    if roster.serves(member.id, member.start):
        return "ACTIVE"
    entry = roster.members.get(member.id)
    if entry is None or entry.start != member.start or entry.state == "ACTIVE":
        return "HEALTHY"
    return entry.state
