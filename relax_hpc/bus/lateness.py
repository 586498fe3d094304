"""Names those who have not committed what a step waits for."""

import itertools
from collections.abc import Iterator, Sequence

from relax_hpc.bus.intake import Intake


def owed_by(intake: Intake, producers: Sequence[str], wanted: int) -> str:
    """Names each producer and sidecar writer that is late, and the prompt groups that it owes.

    Args:
        intake: what is there.
        producers: in order; producer r of R owns the guids with guid % R == r.
        wanted: prompt groups that are waited for.
    """
    owed: dict[str, list[int]] = {}
    for guid in unplanned(intake, wanted):
        group = intake.waiting.get(guid)
        if group is None:
            owed.setdefault(producers[guid % len(producers)], []).append(guid)
        else:
            for writer in intake.owners_of_what_lacks(group):
                owed.setdefault(writer, []).append(guid)
    return "; ".join(
        f"{name} owes {guids} (its log has {intake.num_records(name)} records)"
        for name, guids in owed.items()
    )


def lacks_groups(intake: Intake, wanted: int, *, own: bool) -> bool:
    """Whether nobody has committed some of the groups that are waited for; else only columns of
    them are missing.

    Args:
        intake: what is there.
        wanted: prompt groups that are waited for.
        own: a batch takes its own groups, and not the first that are ready.
    """
    if not own:
        return len(intake.waiting) < wanted
    return any(guid not in intake.waiting for guid in unplanned(intake, wanted))


def unplanned(intake: Intake, count: int) -> Iterator[int]:
    """The lowest guids that are not in the plan."""
    free = (g for g in itertools.count(intake.planned.below) if g not in intake.planned)
    return itertools.islice(free, count)
