"""Groups that no batch will have, of which the trainer does not know yet.

It skips them by the same rule. So what takes their place is sampled at once: the trainer may be
busy, or, where the sides of a run are jobs of their own, not be there. Then tasks that have nothing
to do tell each other which groups these are.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from relax_hpc.bus.credits import Credit
from relax_hpc.bus.reader import BatchIndex
from relax_hpc.config.run import RunConfig
from relax_hpc.fleet.seen import Seen
from relax_hpc.paths import RunPaths
from relax_hpc.records import read_json, write_json
from relax_hpc.roles.dealing.judging import judge_of, most_skipped
from relax_hpc.roles.rollout.folders import Folders
from relax_hpc.schema import PromptGroup

EXCHANGE_EVERY_S = 1.0


class Skip(NamedTuple):
    """A committed group that teaches nothing."""

    guid: int
    producer: int
    """Place in the header of the bus."""
    seq: int
    """Sequence number of the shard that it is in."""


Exchange = Callable[[Sequence[Skip]], Sequence[Skip]]
"""Tells the other tasks of a run of skips of this one; returns those that they have told of."""


class Skips:
    """The groups of this task that teach nothing, until the trainer knows of them.

    Args:
        config: of the run.
        folders: of the task.
        exchange: with other tasks, while there is nothing to do; None: there are none, or the
            trainer is there to say what they skip.
    """

    def __init__(
        self, config: RunConfig, folders: Folders, exchange: Exchange | None = None
    ) -> None:
        self._judge, self._most, self._folders = judge_of(config), most_skipped(config), folders
        self._exchange = None if self._judge is None else exchange
        self._guids = set[int]()
        self._others: Sequence[Skip] = ()

    def judge(self, groups: Sequence[PromptGroup]) -> None:
        """Takes groups that are finished, committed or not."""
        if self._judge is None or not groups:
            return
        verdicts = self._judge(BatchIndex.of([row for each in groups for row in each.trajectories]))
        for group, verdict in zip(groups, verdicts, strict=True):
            if not verdict.teaches:
                self._guids.add(group.guid)

    def take_back(self, guids: Iterable[int]) -> None:
        """Forgets groups that are sampled again."""
        self._guids.difference_update(guids)

    def note(self, *, idle: bool) -> None:
        """Takes whether the task has nothing to do; may be called as often as one likes."""
        if idle and self._exchange is not None:
            own = map(self._of, sorted(self._guids))
            self._others = self._exchange([skip for skip in own if skip is not None])

    def unknown_to(self, credit: Credit | None) -> list[int]:
        """Guids of those that the trainer did not know when it wrote the credit, rising.

        No more than may be skipped for one step: it is the trainer that ends such a run.

        Args:
            credit: the newest; None before the first trainer has started.
        """
        if credit is not None and not credit.seen:
            return []  # whether it knows cannot be told
        others = self._others
        if credit is not None:
            place = self._folders.place_of
            self._guids = {guid for guid in self._guids if not credit.covers(guid, place(guid))}
            others = [s for s in others if not credit.covers(s.guid, (s.producer, s.seq))]
        return sorted(self._guids | {skip.guid for skip in others})[: self._most]

    def _of(self, guid: int) -> Skip | None:
        place = self._folders.place_of(guid)
        return None if place is None else Skip(guid, *place)


class Board:
    """The records of all tasks in the run directory. Looked at now and then.

    Args:
        paths: of the run.
        number: of the task.
        size: tasks that there are.
    """

    def __init__(self, paths: RunPaths, number: int, size: int) -> None:
        self._record = paths.skips(number)
        self._names = [paths.skips(n).name for n in range(size) if n != number]
        self._read = Seen(paths.control, lambda name: read_json(paths.control / name) or {})
        self._told, self._found = list[Skip](), list[Skip]()
        self._next_look = 0.0

    def __call__(self, own: Sequence[Skip]) -> Sequence[Skip]:
        """The `Exchange`; what is told replaces what was."""
        if time.monotonic() < self._next_look:
            return self._found
        self._next_look = time.monotonic() + EXCHANGE_EVERY_S
        if own != self._told:
            write_json(self._record, {"skips": own})
            self._told = list(own)
        records = self._read.get(*self._names)
        self._found = [Skip(*skip) for record in records for skip in record.get("skips", ())]
        return self._found


def exchange_of(config: RunConfig, paths: RunPaths, number: int, size: int) -> Board | None:
    """The exchange of a task, where the trainer may be away and there are others."""
    return Board(paths, number, size) if config.launch.layout == "separate" and size > 1 else None
