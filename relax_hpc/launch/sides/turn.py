"""Who of two jobs may give its nodes back: never both, or nobody would start either again.

A side that wants to goes through these steps, in this order:

1. it raises its flag, a record that names its present attempt,
2. it reads the flag of the other side,
3. it asks Slurm for the other job,
4. it does what `next_move` says.

Two that do so at the same time see each other's flag, at least one of them. A flag is of an
attempt: it means nothing any more once Slurm has requeued that job, which counts its attempts.
"""

from typing import Literal, NamedTuple

from relax_hpc.roles.role import Side

Queued = Literal["active", "held", "ended", "unknown"]
"""A job for who waits for it. active: it runs, or starts by itself. held: it starts when somebody
releases it. ended: it never does. unknown: Slurm does not answer."""

Move = Literal["hold", "release", "stay", "yield", "end"]
"""hold: give the nodes back. release: start the other job, and look again. stay: look again. yield:
lower the flag, and look again. end: the other job has ended, so nothing will ever come."""


class Seen(NamedTuple):
    """A job as Slurm has it."""

    queued: Queued
    attempt: str = ""
    """Job id and how often Slurm restarted it: "1234.0"."""


def other_side(side: Side) -> Side:
    return "training" if side == "sampling" else "sampling"


def next_move(side: Side, other: Seen, flag: str | None) -> Move:
    """Tells a side that has nothing to do, and has raised its flag, what to do.

    Args:
        side: its name.
        other: the other job.
        flag: attempt that the other side's flag names; None if it has none.
    """
    if other.queued == "unknown":
        return "stay"
    if other.queued == "ended":
        return "end"
    if other.queued == "held":
        return "release"
    if flag == other.attempt:  # it is about to be held
        return "yield" if side == "training" else "stay"
    return "hold"
