"""An engine as users see it."""

from dataclasses import dataclass

from relax_hpc.fleet import members
from relax_hpc.fleet.roster import Roster
from relax_hpc.fleet.scaling import Extra, ScaleState
from relax_hpc.fleet.standing import Standing, standing
from relax_hpc.paths import RunPaths


@dataclass(frozen=True, slots=True)
class Row:
    """One engine."""

    id: str
    state: Standing
    node: str
    version: int | None
    """Policy version of its weights, as far as the trainer knows."""
    since: float | None
    """Time at which it got into this state, seconds since 1970; of an initial engine, since it
    answers."""
    requests: int | None
    """Requests that run or wait in it now; None where that cannot be learned from here."""
    reason: str = ""


def extras(paths: RunPaths) -> list[Row]:
    """The added engines that are there, or failed."""
    state, roster = ScaleState.read(paths), Roster.read(paths)
    rows = [of_extra(paths, extra, roster) for extra in state.extras.values()] if state else []
    return [row for row in rows if row.state not in ("GONE", "CANCELLED")]


def of_extra(paths: RunPaths, extra: Extra, roster: Roster | None) -> Row:
    """The row of an added engine."""
    state, version = extra.state, None
    if extra.process and not extra.ended and not extra.ending:
        state = standing(members.find(paths, extra.id), roster)
    if roster and extra.id in roster.members and not extra.ended:
        version = roster.members[extra.id].version
    return Row(extra.id, state, extra.node, version, extra.since, None, extra.reason)
