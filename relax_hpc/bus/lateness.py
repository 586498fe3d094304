"""The wait for what a step lacks: how long it may last, and who has not committed what."""

import itertools
import time
from collections.abc import Callable, Iterator

from relax_hpc.bus.intake import Intake
from relax_hpc.bus.layout import BusHeader
from relax_hpc.storage import is_short


class Deadline:
    """The end of a wait, which begins now.

    Args:
        timeout_s: how long it may last.
        is_excused: while it says so nobody is late; nor is anybody while there is no room.
    """

    def __init__(self, timeout_s: float, is_excused: Callable[[], bool]) -> None:
        self._timeout_s, self._is_excused = timeout_s, is_excused
        self._looks_at, self._at = 0.0, time.monotonic() + timeout_s

    def is_over(self) -> bool:
        """May be asked as often as one likes."""
        if (now := time.monotonic()) >= self._looks_at:
            self._looks_at = now + self._timeout_s / 100
            if is_short() or self._is_excused():  # producers hold, too
                self._at = now + self._timeout_s
        return now > self._at


def owed_by(intake: Intake, header: BusHeader, wanted: int) -> str:
    """Names each producer and sidecar writer that is late, and the prompt groups that it owes.

    Args:
        intake: what is there.
        header: of the bus.
        wanted: prompt groups that are waited for.
    """
    owed: dict[str, list[int]] = {}
    for guid in unplanned(intake, wanted):
        group = intake.waiting.get(guid)
        if group is None:
            owed.setdefault(header.producers[header.deals.folder_of(guid)], []).append(guid)
        else:
            for writer in intake.owners_of_what_lacks(group):
                owed.setdefault(writer, []).append(guid)
    said = []
    for name, guids in owed.items():
        who = _keeper(name, header)
        log = "its log" if who == name else f"its log in {name}"
        said.append(f"{who} owes {guids} ({log} has {intake.num_records(name)} records)")
    return "; ".join(said)


def _keeper(name: str, header: BusHeader) -> str:
    """The name of who writes in a folder: of a task that is no more, another one does."""
    if name not in header.producers:
        return name
    return header.producers[header.deals.task_of(header.producers.index(name))]


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
