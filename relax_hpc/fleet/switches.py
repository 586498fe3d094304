"""The progress of every request of an engine when its policy changed: which tokens are whose.

The trainer learns it from the receipts of an update, and leaves it in the run directory for those
whose requests they are. A request that is not named had no token yet.
"""

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path

from relax_hpc.comm.orders import Receipt
from relax_hpc.fleet.members import Member
from relax_hpc.paths import RunPaths
from relax_hpc.records import read_json, write_json
from relax_hpc.storage import delete, delete_folder, names

log = logging.getLogger(__name__)

_KEPT = 32
"""Number of versions that are kept."""
_WAIT_S, _POLL_S = 60.0, 0.02
"""The record of a version is written when all its engines go on; with files some do so earlier."""
Counts = Mapping[str, int]
"""Response tokens by request."""


class Notes:
    """Records of engines as they are written; the newest of each are kept.

    It may be used by threads, one at a time for each engine.
    """

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self._kept = dict[str, tuple[str, list[int]]]()
        """Engine -> its start, and the versions that there are records of."""

    def note(self, member: Member, version: int, receipts: Iterable[Receipt]) -> None:
        """Publishes what the ranks of an engine said.

        Args:
            member: whose requests they are.
            version: that later tokens belong to.
            receipts: without any, nothing is known, and that is published.
        """
        told = [receipt.num_sampled for receipt in receipts]
        counts: dict[str, int] | None = {}
        for of_rank in told or [None]:
            counts = None if counts is None or of_rank is None else counts | of_rank
        path = self._paths.switch(member.id, member.start, version)
        write_json(path, {"num_sampled": counts})
        start, kept = self._kept.get(member.id, ("", []))
        if start != member.start:  # an earlier trainer may have left some
            found = (Path(name) for name in names(path.parent))
            kept = [int(each.stem) for each in found if each.suffix == ".json"]
        old = [each for each in kept if each <= version - _KEPT]
        for each in old:  # an engine that loads files skips versions
            delete(self._paths.switch(member.id, member.start, each))
        self._kept[member.id] = (member.start, sorted({*kept, version}.difference(old)))


def forget_earlier(paths: RunPaths, member: str) -> None:
    """Deletes what is left of earlier starts of an engine, whose requests ended with them."""
    for start in names(folder := paths.switches(member)):
        delete_folder(folder / start)


class Switches:
    """The changes of policy of one start of an engine, as those see them who ask it."""

    def __init__(self, paths: RunPaths, member: str, start: str) -> None:
        self._path = partial(paths.switch, member, start)
        self._found: dict[int, asyncio.Task[Counts | None]] = {}

    async def between(self, before: int, now: int) -> dict[int, Counts] | None:
        """The changes after version `before` up to version `now`, oldest first.

        Returns:
            Version and counts, of the versions that the engine was given; None if they are not
            known, or not in time.
        """
        if now <= before:  # a trainer that was started again went back
            return None
        newest = await self._at(now)
        if newest is None:
            return None
        found = dict[int, Counts]()
        for version in range(max(before + 1, now - _KEPT), now):
            record = await asyncio.to_thread(read_json, self._path(version))
            if record is None:  # the newest is there, so this engine was not given it
                continue
            if record["num_sampled"] is None:
                return None
            found[version] = record["num_sampled"]
        return found | {now: newest}

    async def _at(self, version: int) -> Counts | None:
        """Returns the counts of a version, read once for all that ask."""
        if version not in self._found:
            self._found = {v: task for v, task in self._found.items() if v > version - _KEPT}
            self._found[version] = asyncio.create_task(_read(self._path(version)))
        return await asyncio.shield(self._found[version])


async def _read(path: Path) -> Counts | None:
    deadline = time.monotonic() + _WAIT_S
    while (record := await asyncio.to_thread(read_json, path)) is None:
        if time.monotonic() > deadline:
            log.warning("the trainer did not write %s within %g s", path, _WAIT_S)
            return None
        await asyncio.sleep(_POLL_S)
    counts: Counts | None = record["num_sampled"]
    return counts
