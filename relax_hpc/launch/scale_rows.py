"""An engine as users see it."""

from dataclasses import dataclass

from relax_hpc.launch.scale_records import Extra, ScaleState
from relax_hpc.paths import RunPaths
from relax_hpc.weights.roster import Roster
from relax_hpc.weights.standing import Standing


@dataclass(frozen=True, slots=True)
class Row:
    """One engine."""

    id: str
    state: Standing
    node: str
    version: int | None
    """Policy version of its weights, as far as the trainer knows."""
    since: float | None
    """When it got into this state, seconds since 1970; of an initial engine, since it answers."""
    requests: int | None
    """That run or wait in it now; None where that cannot be learned from here."""
    reason: str = ""


def extras(paths: RunPaths) -> list[Row]:
    """The added engines that are there, or failed."""
    state, roster = ScaleState.read(paths), Roster.read(paths)
    rows = [of_extra(extra, roster) for extra in state.extras.values()] if state else []
    return [row for row in rows if row.state not in ("GONE", "CANCELLED")]


def of_extra(extra: Extra, roster: Roster | None) -> Row:
    holding = roster.members.get(extra.id) if roster else None
    version = holding.version if holding and not extra.ended else None
    return Row(extra.id, extra.state, extra.node, version, extra.since, None, extra.reason)
