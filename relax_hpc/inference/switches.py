"""Records how far each request of an engine was when its policy changed, to date its tokens.

The trainer learns it from the receipts of an update and writes it to the run directory, for the
clients of the requests. A request that is not listed had no token yet.
"""

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path

from relax_hpc.inference.members import Member
from relax_hpc.runtime.comm.orders import Receipt
from relax_hpc.runtime.files.records import read_json, write_json
from relax_hpc.runtime.files.storage import delete, delete_folder, names
from relax_hpc.runtime.paths import RunPaths

log = logging.getLogger(__name__)

_KEPT = 32
_WAIT_S, _POLL_S = 60.0, 0.02
"""A version's record is written when all its engines have resumed; with files some resume earlier.
"""
Counts = Mapping[str, int]
"""Response tokens by request."""


class Notes:
    """Writes the records of engines; keeps the newest of each.

    Threads may use it, one at a time for each engine.
    """

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self._kept = dict[str, tuple[str, list[int]]]()
        """Engine -> its start, and the versions with records."""

    def note(self, member: Member, version: int, receipts: Iterable[Receipt]) -> None:
        """Publishes the counts from the receipts of an engine's ranks.

        Args:
            receipts: if there are none, publishes that nothing is known.
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
    """Deletes records of earlier starts of an engine, whose requests ended with them."""
    for start in names(folder := paths.switches(member)):
        delete_folder(folder / start)


class Switches:
    """The policy changes of one start of an engine, for its clients."""

    def __init__(self, paths: RunPaths, member: str, start: str) -> None:
        self._path = partial(paths.switch, member, start)
        self._found: dict[int, asyncio.Task[Counts | None]] = {}

    async def between(self, before: int, now: int) -> dict[int, Counts] | None:
        """Returns the changes after version `before` up to version `now`, oldest first.

        Returns:
            Version and counts, of the versions given to the engine; None if unknown, or not in
            time.
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
