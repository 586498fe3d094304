"""Everything that a restart needs to know of the steps that no checkpoint goes back to.

A snapshot sums up the front of the plan and of the commit logs, so that the cost of a restart
follows what is live, not how long the run has lasted. It may be lost: the logs hold everything.
"""

import json
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

from relax_hpc.errors import BusError
from relax_hpc.paths import BusPaths
from relax_hpc.records import read_bytes, write_json
from relax_hpc.storage import names, patiently

KEPT = 2


class GuidSet:
    """Prompt ordinals: all below a bound, and some above it."""

    def __init__(self, below: int = 0, above: Iterable[int] = ()) -> None:
        self.below = below
        self.above = set(above)

    def __contains__(self, guid: int) -> bool:
        return guid < self.below or guid in self.above

    def update(self, guids: Iterable[int]) -> None:
        self.above.update(guids)
        while self.below in self.above:
            self.above.remove(self.below)
            self.below += 1


class LogPosition(NamedTuple):
    """The part of a commit log that is done with."""

    records: int
    """Leading records that are."""
    fence: int
    """Fence of the owner there."""
    settled: list[str]
    """uuids of later ones that are, too."""


class Snapshot(NamedTuple):
    """The plan up to and including `step`. Everything else begins behind it."""

    fence: int
    """Plan fence whose log the last record of `step` stands in."""
    records: int
    """Records of the chain that it sums up."""
    end: int
    """Byte at which they end in the log of `fence`."""
    step: int
    planned_below: int
    """All guids below are planned or skipped,"""
    planned_above: list[int]
    """and these."""
    dropped: list[tuple[int, str]]
    """(guid, uuid) of drops that matter still; guid -1 is the whole shard."""
    on_record: list[tuple[str, int, int]]
    """(uuid, guid, rows) of shards that matter still: used or passed over, -2 as repeated."""
    duplicates: int
    """Trajectories that were passed over as repeated."""
    logs: dict[str, LogPosition]
    skipped_below: int = 0
    """How many of the guids below are skipped,"""
    skipped_above: Sequence[int] = ()
    """and which of those above."""


NOTHING = Snapshot(0, 0, 0, 0, 0, [], [], [], 0, {})
"""A run that has just begun."""


def write_snapshot(paths: BusPaths, snapshot: Snapshot) -> None:
    """Publishes it and deletes all but the newest ones.

    Raises:
        BusError: storage refused, or a newer trainer took the draft away.
    """
    path = paths.plan_snapshot(snapshot.fence, snapshot.records)
    try:
        write_json(path, snapshot._asdict())
        for old in [paths.plan / name for name in _files(paths)[KEPT:]]:
            patiently(old, partial(old.unlink, missing_ok=True))
    except OSError as error:
        raise BusError(f"{path}: cannot be written: {error.strerror}") from error


def remove_drafts(paths: BusPaths) -> None:
    """Deletes what earlier trainers left half written."""
    for draft in [paths.plan / name for name in names(paths.plan)]:
        if draft.match(".snap.*.tmp"):
            patiently(draft, partial(draft.unlink, missing_ok=True))


def read_snapshots(paths: BusPaths) -> list[Snapshot]:
    """Reads all that there are, newest first."""
    found = []
    for name in _files(paths):
        try:
            found.append(_parse(json.loads(read_bytes(paths.plan / name))))
        except FileNotFoundError:  # its writer had a newer one
            continue
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise BusError(f"{paths.plan / name}: cannot be read: {error}; delete it") from error
    return found


def _parse(values: dict[str, Any]) -> Snapshot:
    logs = {name: LogPosition(*position) for name, position in values.pop("logs").items()}
    dropped = [(guid, uuid) for guid, uuid in values.pop("dropped")]
    on_record = [tuple(entry) for entry in values.pop("on_record")]
    return Snapshot(**values, dropped=dropped, on_record=on_record, logs=logs)


def _files(paths: BusPaths) -> list[str]:
    """Newest first: the names sort by the records they sum up."""
    listed = (name for name in names(paths.plan) if fnmatchcase(name, "snap.*.json"))
    return sorted(listed, reverse=True)
