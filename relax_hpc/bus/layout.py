"""Creates and opens a bus, and deals prompt groups to rollout tasks.

Every growing file exists before any role starts: a client may cache a name as missing for seconds
if it looks the name up too early. So the launcher creates them all.

Each prompt group has one folder for good. The number of tasks may change between two jobs: another
task then keeps the folders of a task that is gone.
"""

import heapq
import itertools
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from relax_hpc.bus.log import RecordKind, read_log
from relax_hpc.errors import BusError, without_number
from relax_hpc.runtime.files.records import read_json, sync, write_json
from relax_hpc.runtime.paths import BusPaths
from relax_hpc.schema import COLUMNS, ColumnWriter

FORMAT = 5


class Deal(NamedTuple):
    """Prompt groups dealt to the same number of rollout tasks."""

    first: int
    """First guid; the deal ends before the first guid of the next one."""
    size: int
    """Number of tasks: guid g is in the folder of producer g % size."""


class Deals(tuple[Deal, ...]):
    """All deals of a run, oldest first: which folder a prompt group is in, and which task keeps
    it."""

    @property
    def num_tasks(self) -> int:
        return self[-1].size

    def folder_of(self, guid: int) -> int:
        """Returns the number of the producer in whose folder a prompt group is committed."""
        return guid % next(deal.size for deal in reversed(self) if deal.first <= guid)

    def task_of(self, folder: int) -> int:
        """Returns the rollout task that keeps a folder: its own, or a substitute if that is
        gone."""
        return folder % self.num_tasks

    def guids(self, task: int, *, start: int) -> Iterator[int]:
        """Yields the prompt groups in a task's folders, rising from `start`, without end."""
        for deal, following in zip(self, (*self[1:], None), strict=True):
            first = max(start, deal.first)
            begins = (
                first + (folder - first) % deal.size
                for folder in range(task, deal.size, self.num_tasks)
            )
            runs = (
                range(begin, following.first, deal.size)
                if following
                else itertools.count(begin, deal.size)
                for begin in begins
            )
            yield from heapq.merge(*runs)


class BusHeader(NamedTuple):
    """RUN.json: written at launch; extended by a resume with another number of rollout tasks."""

    format: int
    producers: list[str]
    run: dict[str, Any]
    """Facts about the run that the launcher stores with the data."""
    sidecar_writers: Mapping[str, ColumnWriter] = MappingProxyType({})
    """Name -> role of the writers that add columns to shards of `producers`."""
    deals: Deals = Deals()


def create(
    paths: BusPaths,
    producers: Sequence[str],
    header: Mapping[str, object],
    *,
    sidecar_writers: Mapping[str, ColumnWriter] | None = None,
) -> None:
    """Creates the folders, empty logs and credits, and RUN.json last.

    Raises:
        BusError: a bus exists already (a run directory is used once), or it cannot be written.
    """
    writers, deals = dict(sidecar_writers or {}), Deals([Deal(0, len(producers))])
    made = BusHeader(FORMAT, list(producers), dict(header), writers, deals)
    names = [*producers, *writers]
    try:
        for folder in (paths.plan, paths.credits.parent, *map(paths.producer, names)):
            folder.mkdir(parents=True, exist_ok=True)
        for file in (paths.credits, *map(paths.log, names)):
            os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
            sync(file.parent)
        write_json(paths.header, made._asdict())
        sync(paths.root)
    except FileExistsError as error:
        raise BusError(
            f"{paths.root}: holds a bus already; a run directory is used once, choose another name"
        ) from error
    except OSError as error:
        raise BusError(f"{paths.root}: a bus cannot be made here: {error.strerror}") from error


def open_bus(paths: BusPaths) -> BusHeader:
    """Reads RUN.json.

    Raises:
        BusError: not a bus, or one of another format.
    """
    try:
        record = read_json(paths.header)
        if record is None:
            raise BusError(f"{paths.root}: is not a bus (no {paths.header.name})")
        if int(record["format"]) == FORMAT:
            dealt = record.pop("deals", None) or [(0, len(record["producers"]))]
            return BusHeader(**record, deals=Deals(Deal(*each) for each in dealt))
    except (OSError, ValueError, TypeError, KeyError) as error:
        said = f"cannot be read: {without_number(error)}; restore the file"
        raise BusError(f"{paths.header}: {said}") from error
    raise BusError(
        f"{paths.header}: is bus format {record['format']}, this relax-hpc reads {FORMAT}; use the "
        "version that wrote it"
    )


def deal(paths: BusPaths, producers: Sequence[str]) -> None:
    """Deals prompt groups not yet begun to a new number of rollout tasks; nothing if unchanged.

    Groups already begun stay in place. No task may be alive. RUN.json is replaced last, so a crash
    before changes nothing.

    Raises:
        BusError: not a bus of this format, a damaged log, or it cannot be written.
    """
    header = open_bus(paths)
    if len(producers) == header.deals.num_tasks:
        return
    logs = [read_log(paths.log(name)) for name in header.producers]
    begun = (RecordKind.BASE, RecordKind.PARTIAL)
    ends = [record.guid_max + 1 for log in logs for record in log if record.kind in begun]
    first = max([*ends, header.deals[-1].first])
    deals = [each for each in header.deals if each.first < first]
    if not deals or deals[-1].size != len(producers):
        deals.append(Deal(first, len(producers)))
    new = producers[len(header.producers) :]
    known = [*header.producers, *new]
    try:
        for name in new:
            paths.producer(name).mkdir(exist_ok=True)
            os.close(os.open(paths.log(name), os.O_WRONLY | os.O_CREAT, 0o644))
            sync(paths.producer(name))
        sync(paths.producer(known[0]).parent)
        write_json(paths.header, header._replace(producers=known, deals=Deals(deals))._asdict())
        sync(paths.root)
    except OSError as error:
        raise BusError(
            f"{paths.root}: folders of further rollout tasks cannot be made: {error.strerror}"
        ) from error


def roles_of(header: BusHeader, columns: Collection[str]) -> tuple[ColumnWriter, ...]:
    """Returns the roles of sidecar writers that write one of `columns`: a batch waits for them."""
    roles = dict.fromkeys(header.sidecar_writers.values())
    return tuple(role for role in roles if any(COLUMNS[name].writer == role for name in columns))


def check_needs(paths: BusPaths, header: BusHeader, needs: Sequence[ColumnWriter]) -> None:
    """Raises:
    BusError: groups would wait for columns that nobody writes."""
    written = set(header.sidecar_writers.values())
    for role in needs:
        if role not in written:
            raise BusError(
                f"{paths.header}: batches need the columns of {role}, but no sidecar writer has "
                f"that role; there are {sorted(written) or 'none'}"
            )
