"""Names those who have not committed what a step waits for."""

import itertools
from collections.abc import Sequence

from relax_hpc.bus.intake import Intake


def owed_by(intake: Intake, producers: Sequence[str], wanted: int) -> str:
    """Names each producer and sidecar writer that is late, and the prompt groups that it owes.

    Args:
        intake: what is there.
        producers: in order; producer r of R owns the guids with guid % R == r.
        wanted: prompt groups that are waited for.
    """
    owed: dict[str, list[int]] = {}
    free = (g for g in itertools.count(intake.planned.below) if g not in intake.planned)
    for guid in itertools.islice(free, wanted):
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
