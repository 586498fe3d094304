"""Reads and verifies the rows of a planned batch, and no more bytes than needed."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt

from relax_hpc.bus import layout
from relax_hpc.bus.plan import ShardRange, Sidecar
from relax_hpc.bus.shards import media
from relax_hpc.bus.shards.encode import PARTS, facts, from_columns
from relax_hpc.bus.shards.shard import OpenShards, Shard
from relax_hpc.data.media.stored import DECODERS, StoredMedium
from relax_hpc.errors import BusError, DamagedError
from relax_hpc.runtime.paths import BusPaths
from relax_hpc.schema import PRODUCER, Array, Columns, ColumnWriter, Trajectory, columns_of

NARROW = columns_of(PRODUCER)
"""Columns that every trajectory consists of."""


class Selection(Protocol):
    """Rows to read: a batch, a portion of one, or whole shards."""

    @property
    def step(self) -> int:
        """Readers close the shards of other steps."""
        ...

    @property
    def parts(self) -> Sequence[ShardRange]:
        """Rows, in the order of their numbers."""
        ...

    @property
    def sidecars(self) -> Mapping[str, Mapping[ColumnWriter, Sidecar]]:
        """uuid of a shard of `parts` -> role -> the sidecar that counts."""
        ...


class BatchIndex(NamedTuple):
    """Facts of each row of a batch, [n] in plan order, without its tokens."""

    guid: Array
    sibling: Array
    segment: Array
    rewards: Array
    reward_error: Array
    prompt_len: Array
    response_len: Array
    policy_version_min: Array
    policy_version_max: Array
    finish: Array

    @classmethod
    def of(cls, rows: Sequence[Trajectory]) -> Self:
        """Builds it from rows that are not in a shard yet, equal to what a reader would return."""
        columns = facts(rows)
        return cls(**{name: columns[f"row/{name}"] for name in cls._fields})


class Reader:
    """Reads selected rows. Every rank may have its own; readers share nothing but files.

    Shards stay open during a step, so each is looked up once.

    Args:
        verify: whether every byte is checked when it is read.

    Raises:
        BusError: not a bus of this format.
    """

    def __init__(
        self, paths: BusPaths, *, verify: bool = True, shards: OpenShards | None = None
    ) -> None:
        layout.open_bus(paths)
        self._shards = shards or OpenShards(paths, verify=verify)
        self._step = 0
        self._used: set[str] = set()

    def index(self, record: Selection) -> BatchIndex:
        """Reads the row columns of a batch.

        Raises:
            DamagedError: a shard is missing or damaged.
        """
        self._begin(record)
        columns: dict[str, list[Array]] = {name: [] for name in BatchIndex._fields}
        for part in _merge(record.parts):
            shard = self._shard(part)
            for name, values in columns.items():
                values.append(shard.read_rows(f"row/{name}", part.lo, part.hi))
        return BatchIndex(**{name: np.concatenate(values) for name, values in columns.items()})

    def parts(self, record: Selection) -> dict[str, Array]:
        """Reads the reward parts of a batch by name, [n] in plan order each; NaN if a row has none.

        Raises:
            DamagedError: a shard is missing or damaged.
        """
        self._begin(record)
        found: dict[str, Array] = {}
        num_rows = sum(part.hi - part.lo for part in record.parts)
        first = 0
        for part in _merge(record.parts):
            shard, last = self._shard(part), first + part.hi - part.lo
            if names := shard.part_names:
                values = shard.read_rows(PARTS, part.lo, part.hi)
                for column, name in enumerate(names):
                    of_all = found.setdefault(name, np.full(num_rows, np.nan, np.float32))
                    of_all[first:last] = values[:, column]
            first = last
        return found

    def rows(
        self, record: Selection, rows: Sequence[int], columns: Collection[str] | None = None
    ) -> list[Trajectory]:
        """Reads some trajectories of a batch, in the order given, sidecar columns included.

        Args:
            rows: numbers in its order, from 0.
            columns: columns to read besides `NARROW`, e.g. media; all by default. A sidecar that
                holds none of them is not opened.

        Raises:
            DamagedError: a shard is missing or damaged.
        """
        self._begin(record)
        wanted = np.unique(np.array(rows, np.int64))
        found: dict[int, Trajectory] = {}
        first = 0
        for part in _merge(record.parts):
            size = part.hi - part.lo
            inside = wanted[(wanted >= first) & (wanted < first + size)]
            for run in _runs(inside):
                lo, hi = part.lo + int(run[0]) - first, part.lo + int(run[-1]) - first + 1
                span = self._span(record, part, lo, hi, columns)
                made = from_columns(span, self._shard(part).part_names)
                found.update(zip(run.tolist(), made, strict=True))
            first += size
        return [found[row] for row in rows]

    def media(self, record: Selection, wanted: Iterable[tuple[int, int]]) -> list[StoredMedium]:
        """Reads media of rows with their bytes, in the order given; each once.

        For the facts without the bytes, call `rows` with `media.FACTS`.

        Raises:
            BusError: a row has no such medium.
            DamagedError: a shard is missing or damaged, or a medium does not match its digest.
        """
        self._begin(record)
        keys = list(wanted)
        places = {key: self._place(record, *key) for key in keys}
        found: dict[tuple[str, int], StoredMedium] = {}
        by_shard: dict[str, tuple[ShardRange, set[int]]] = {}
        for part, number in places.values():
            by_shard.setdefault(part.uuid, (part, set()))[1].add(number)
        for part, numbers in by_shard.values():
            shard, ordered = self._shard(part), sorted(numbers)
            decoders = str(shard.attributes.get(DECODERS, ""))
            for number, medium in zip(ordered, media.read(shard, ordered), strict=True):
                place = f"{shard.path}: medium {number}"
                found[part.uuid, number] = StoredMedium(medium, place, decoders)
        return [found[part.uuid, number] for part, number in (places[key] for key in keys)]

    def close(self) -> None:
        self._shards.close()

    def _place(self, record: Selection, row: int, place: int) -> tuple[ShardRange, int]:
        """Returns the part with the row, and the medium's number in that shard."""
        first = 0
        for part in record.parts:
            size = part.hi - part.lo
            if first <= row < first + size:
                numbers = media.numbers_of(self._shard(part), part.lo + row - first)
                if not 0 <= place < len(numbers):
                    raise BusError(f"row {row} has {len(numbers)} media, and no number {place}")
                return part, numbers[place]
            first += size
        raise BusError(f"there is no row {row} among {first}")

    def _begin(self, record: Selection) -> None:
        sidecars = (s.uuid for roles in record.sidecars.values() for s in roles.values())
        uuids = {*(part.uuid for part in record.parts), *sidecars}
        if record.step != self._step:
            self._shards.close(self._used - uuids)
            self._step, self._used = record.step, set()
        self._used |= uuids

    def _span(
        self, record: Selection, part: ShardRange, lo: int, hi: int, columns: Collection[str] | None
    ) -> Columns:
        base = self._shard(part)
        wide = columns_of(PRODUCER, optional=True)
        named = None if columns is None else {*NARROW, *(wide.keys() & set(columns))}
        span = base.read_span(lo, hi, named)
        for role, sidecar in record.sidecars.get(part.uuid, {}).items():
            wanted = [name for name in columns_of(role) if columns is None or name in columns]
            if not wanted:
                continue
            shard = self._shards.get(*sidecar)
            if (shard.attributes["parent"], shard.rows) != (part.uuid, base.rows):
                raise DamagedError(f"{shard.path}: does not belong to {base.path}; restore it")
            for name in wanted:
                span[name] = shard.read_rows(name, lo, hi)
        return span

    def _shard(self, part: ShardRange) -> Shard:
        return self._shards.get(part.producer, part.fence, part.seq, part.uuid)


def _merge(parts: Sequence[ShardRange]) -> Iterator[ShardRange]:
    """Merges parts that follow each other in a shard, so that they are one read."""
    merged: ShardRange | None = None
    for part in parts:
        if merged is not None and (merged.uuid, merged.hi) == (part.uuid, part.lo):
            merged = merged._replace(hi=part.hi)
            continue
        if merged is not None:
            yield merged
        merged = part
    if merged is not None:
        yield merged


def _runs(rows: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
    return np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1) if len(rows) else []
