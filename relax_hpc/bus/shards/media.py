"""Stores and reads media: encoded bytes, once per shard however many rows show them."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xxhash

from relax_hpc.errors import BusError
from relax_hpc.schema import (
    COLUMNS,
    NO_SPANS,
    OFFSETS,
    Array,
    ColumnPieces,
    Columns,
    MediaKind,
    Medium,
    Trajectory,
)

if TYPE_CHECKING:
    from relax_hpc.bus.shards.shard import Shard

BYTES, REFS, SPANS = "ragged/media_bytes", "ragged/media_ref", "ragged/media_spans"
FRAMES, DIGEST = "ragged/media_frames", "media/xxh3"
_KIND, _GRID = "media/kind", "media/grid_thw"
_SECONDS, _CANONICAL = "media/seconds_per_grid", "media/canonical_xxh3"
FACTS = (REFS, SPANS, FRAMES, DIGEST, _KIND, _GRID, _SECONDS, _CANONICAL)
"""All columns of media but their bytes: `Trajectory.media` without `data`."""
_UNKNOWN = bytes(16)
_AT_ONCE = 16
"""Media whose bytes are in memory while a shard is verified."""


def digest(data: npt.NDArray[np.uint8]) -> bytes:
    """Returns XXH3-128 in its canonical byte order: equal on every machine, not cryptographic."""
    return xxhash.xxh3_128_digest(np.ascontiguousarray(data).data)


def gather(rows: Sequence[Trajectory]) -> ColumnPieces:
    """Gathers the media of the rows, in the order of first appearance; nothing if there are none.

    Raises:
        BusError: bytes that are not a flat uint8 array, or spans outside a row or its media.
    """
    for t in rows:
        _check_spans(t)
    if not any(t.media for t in rows):
        return {}
    seen = _Distinct()
    refs = [seen.number(medium) for t in rows for medium in t.media]
    found = seen.media
    columns: dict[str, Array | Sequence[Array]] = {
        OFFSETS["media_ref"]: _ends([len(t.media) for t in rows]),
        REFS: np.array(refs, np.int32),
        OFFSETS["media_byte"]: _ends([len(data) for data in seen.data]),
        _KIND: np.array([medium.kind for medium in found], np.uint8),
        _GRID: np.array([medium.grid_thw for medium in found], np.int32),
        DIGEST: np.frombuffer(b"".join(seen.digests), np.uint8).reshape(-1, 16),
        BYTES: seen.data,
    }
    if any(medium.canonical_xxh3 for medium in found):
        known = b"".join(medium.canonical_xxh3 or _UNKNOWN for medium in found)
        columns[_CANONICAL] = np.frombuffer(known, np.uint8).reshape(-1, 16)
    if any(medium.frames for medium in found):
        columns[OFFSETS["media_frame"]] = _ends([len(medium.frames) for medium in found])
        columns[FRAMES] = np.array([n for medium in found for n in medium.frames], np.int32)
        columns[_SECONDS] = np.array([medium.seconds_per_grid for medium in found], np.float32)
    if any(len(t.media_spans) for t in rows):
        columns[OFFSETS["media_span"]] = _ends([len(t.media_spans) for t in rows])
        columns[SPANS] = np.concatenate([t.media_spans for t in rows], dtype=np.int32)
    return columns


def of_rows(columns: Columns) -> list[tuple[Medium, ...]]:
    """Returns the media of every row; empty if they were not read. Rows share them."""
    rows = len(columns[OFFSETS["token"]]) - 1
    if not columns.keys() >= {REFS, _KIND, _GRID}:
        return [()] * rows
    media = _of(columns, range(len(columns[_KIND])))
    refs, bounds = columns[REFS].tolist(), columns[OFFSETS["media_ref"]].tolist()
    return [tuple(media[ref] for ref in refs[bounds[i] : bounds[i + 1]]) for i in range(rows)]


def owners(digests: Array, ends: Array) -> npt.NDArray[np.int64]:
    """Returns [m], for each medium the first one of its digest that has bytes.

    Args:
        digests: [m, 16] of the bytes.
        ends: [m + 1] offsets of the bytes.
    """
    first: dict[bytes, int] = {}
    sizes = np.diff(ends)
    for number, value in enumerate(digests):
        if sizes[number]:
            first.setdefault(value.tobytes(), number)
    own: Iterator[int] = (
        number if sizes[number] else first.get(value.tobytes(), number)
        for number, value in enumerate(digests)
    )
    return np.fromiter(own, np.int64, len(digests))


def spans_of(columns: Columns) -> list[npt.NDArray[np.int32]]:
    """Returns [spans, 3] of every row; empty if they were not read."""
    rows = len(columns[OFFSETS["token"]]) - 1
    if SPANS not in columns:
        return [NO_SPANS] * rows
    values: Any = columns[SPANS]
    ends = columns[OFFSETS["media_span"]].tolist()
    return [values[ends[i] : ends[i + 1]] for i in range(rows)]


def numbers_of(shard: "Shard", row: int) -> list[int]:
    if REFS not in shard.fields:
        return []
    numbers: list[int] = shard.read_rows(REFS, row, row + 1).tolist()
    return numbers


def read(shard: "Shard", numbers: Sequence[int]) -> list[Medium]:
    """Reads some media of a shard by number, and no byte of others.

    Raises:
        DamagedError: bytes do not match their digest.
    """
    names = [n for n, c in COLUMNS.items() if c.axis in ("medium", "media_frame")]
    facts = {name: shard.read(name) for name in names if name in shard.fields}
    for axis in ("media_byte", "media_frame"):
        if OFFSETS[axis] in shard.fields:
            facts[OFFSETS[axis]] = shard.read(OFFSETS[axis])
    found = _of(facts, numbers)
    ends = facts[OFFSETS["media_byte"]].tolist()
    has_bytes = owners(facts[DIGEST], facts[OFFSETS["media_byte"]]).tolist()
    whole = []
    for number, medium in zip(numbers, found, strict=True):
        owner = has_bytes[number]
        data: Any = shard.read_raw(BYTES, ends[owner], ends[owner + 1])
        if digest(data) != facts[DIGEST][number].tobytes():
            raise shard.corrupt(
                f"medium {number} ({medium.kind.name}, {len(data):,} bytes of {BYTES}) does not "
                f"match {DIGEST}"
            )
        whole.append(medium._replace(data=data))
    return whole


def verify(shard: "Shard") -> None:
    """Compares every medium of a shard with its digest, and with the references of rows.

    Raises:
        DamagedError: a digest does not match, or a row refers to a medium that is not there.
    """
    if DIGEST not in shard.fields:
        return
    count, rows = len(shard.read(DIGEST)), shard.read(OFFSETS["token"])
    for first in range(0, count, _AT_ONCE):
        read(shard, range(first, min(first + _AT_ONCE, count)))
    refs: Any = shard.read(REFS)
    if len(refs) and not 0 <= refs.min() <= refs.max() < count:
        raise shard.corrupt(f"{REFS} names media up to {refs.max()}, and there are {count}")
    if SPANS not in shard.fields:
        return
    spans: Any = shard.read(SPANS).astype(np.int64)
    of_row = np.repeat(np.arange(len(rows) - 1), np.diff(shard.read(OFFSETS["media_span"])))
    num_media = np.diff(shard.read(OFFSETS["media_ref"]))[of_row]
    ends = spans[:, 1] + spans[:, 2]
    inside = (spans[:, 0] >= 0) & (spans[:, 0] < num_media) & (ends <= np.diff(rows)[of_row])
    if wrong := np.flatnonzero(~inside).tolist():
        raise shard.corrupt(
            f"{SPANS}: row {of_row[wrong[0]]} has {spans[wrong[0]].tolist()} (medium, first token, "
            "tokens), which is not in it"
        )


def _of(columns: Columns, numbers: Sequence[int]) -> list[Medium]:
    """Builds media from the columns, without data if the bytes are not among these."""
    held: dict[str, Any] = dict(columns)
    data, ends = held.get(BYTES), held[OFFSETS["media_byte"]].tolist() if BYTES in held else []
    has_bytes = range(len(ends))
    if DIGEST in held and data is not None:
        has_bytes = owners(held[DIGEST], held[OFFSETS["media_byte"]]).tolist()
    bounds = held[OFFSETS["media_frame"]].tolist() if FRAMES in held else []
    found = []
    for m in numbers:
        canonical = held[_CANONICAL][m].tobytes() if _CANONICAL in held else _UNKNOWN
        t, y, x = held[_GRID][m].tolist()
        of = has_bytes[m] if ends else m
        found.append(
            Medium(
                MediaKind(int(held[_KIND][m])),
                np.empty(0, np.uint8) if data is None else data[ends[of] : ends[of + 1]],
                (t, y, x),
                b"" if canonical == _UNKNOWN else canonical,
                tuple(held[FRAMES][bounds[m] : bounds[m + 1]].tolist()) if bounds else (),
                float(held[_SECONDS][m]) if _SECONDS in held else 0.0,
            )
        )
    return found


def _ends(sizes: Sequence[int]) -> npt.NDArray[np.int64]:
    return np.cumsum([0, *sizes]).astype(np.int64)


def _check_spans(t: Trajectory) -> None:
    if not len(t.media_spans):
        return
    medium, first, tokens = t.media_spans.T.astype(np.int64)
    inside = (medium >= 0) & (medium < len(t.media)) & (tokens > 0)
    apart = first >= np.concatenate([[0], (first + tokens)[:-1]])
    wrong = np.flatnonzero(~(inside & apart & (first + tokens <= len(t.token_ids))))
    if len(wrong):
        raise BusError(
            f"prompt group {t.guid}, trajectory {t.guid}/{t.sibling}: span "
            f"{t.media_spans[wrong[0]].tolist()} (medium, first token, tokens) of a row of "
            f"{len(t.token_ids)} tokens and {len(t.media)} media; spans lie in the row, in order "
            "and apart, and are of its media"
        )


class _Distinct:
    """Numbers media by content; recognises the same array without reading it.

    If several media are views of the same bytes, as a video and its sound, the first holds the
    bytes.
    """

    def __init__(self) -> None:
        self.media: list[Medium] = []
        self.data: list[npt.NDArray[np.uint8]] = []
        """Bytes to store, each once."""
        self._owners: dict[bytes, int] = {}
        self.digests: list[bytes] = []
        self._by_array: dict[tuple[object, ...], int] = {}
        self._by_content: dict[tuple[object, ...], int] = {}

    def number(self, medium: Medium) -> int:
        # The caller's rows keep the array alive, so its id stays its own.
        array = (id(medium.data), *_make_key(medium))
        if array not in self._by_array:
            self._by_array[array] = self._number(medium)
        return self._by_array[array]

    def _number(self, medium: Medium) -> int:
        if medium.data.dtype != np.uint8 or medium.data.ndim != 1:
            raise BusError(f"a medium is a flat uint8 array, got {medium.data.dtype}")
        value = digest(medium.data)
        content = (value, *_make_key(medium))
        known = self._by_content.get(content)
        # 128 bits that anybody can compute: two media are the same only if their bytes are.
        if known is not None and np.array_equal(self.media[known].data, medium.data):
            return known
        owner = self._owners.setdefault(value, len(self.media))
        is_stored = owner < len(self.media) and np.array_equal(self.media[owner].data, medium.data)
        self.media.append(medium)
        self.data.append(medium.data[:0] if is_stored else medium.data)
        self.digests.append(value)
        self._by_content[content] = len(self.media) - 1
        return len(self.media) - 1


def _make_key(medium: Medium) -> tuple[object, ...]:
    return (medium.kind, *medium[2:])
