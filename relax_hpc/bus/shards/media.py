"""Media: encoded bytes, each stored once in a shard however many rows show it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from relax_hpc.errors import BusError
from relax_hpc.schema import OFFSETS, ColumnPieces, Columns, MediaKind, Medium, Trajectory

BYTES, REFS = "ragged/media_bytes", "ragged/media_ref"


def digest(data: npt.NDArray[np.uint8]) -> bytes:
    """XXH3-128 in its canonical order of bytes: the same on every machine, not cryptographic."""
    return xxhash.xxh3_128_digest(np.ascontiguousarray(data).data)


def gather(rows: Sequence[Trajectory]) -> ColumnPieces:
    """Gathers the media of the rows, in the order of first appearance; nothing if there are none.

    Raises:
        BusError: bytes that are not a flat uint8 array.
    """
    if not any(t.media for t in rows):
        return {}
    seen = _Distinct()
    refs = [seen.number(medium) for t in rows for medium in t.media]
    sizes = [len(medium.data) for medium in seen.media]
    return {
        OFFSETS["media_ref"]: np.cumsum([0, *(len(t.media) for t in rows)]).astype(np.int64),
        REFS: np.array(refs, np.int32),
        OFFSETS["media_byte"]: np.cumsum([0, *sizes]).astype(np.int64),
        "media/kind": np.array([medium.kind for medium in seen.media], np.uint8),
        "media/grid_thw": np.array([medium.grid_thw for medium in seen.media], np.int32),
        "media/xxh3": np.frombuffer(b"".join(seen.digests), np.uint8).reshape(-1, 16),
        BYTES: [medium.data for medium in seen.media],
    }


def of_rows(columns: Columns) -> list[tuple[Medium, ...]]:
    """The media of every row; empty where their bytes were not read. Rows share them."""
    rows = len(columns[OFFSETS["token"]]) - 1
    if BYTES not in columns:
        return [()] * rows
    data: Any = columns[BYTES]
    ends = columns[OFFSETS["media_byte"]].tolist()
    kinds, grids = columns["media/kind"].tolist(), columns["media/grid_thw"].tolist()
    media = [
        Medium(MediaKind(kinds[m]), data[ends[m] : ends[m + 1]], (g[0], g[1], g[2]))
        for m, g in enumerate(grids)
    ]
    refs, bounds = columns[REFS].tolist(), columns[OFFSETS["media_ref"]].tolist()
    return [tuple(media[ref] for ref in refs[bounds[i] : bounds[i + 1]]) for i in range(rows)]


class _Distinct:
    """Numbers media by content; the same array again is recognised without reading it."""

    def __init__(self) -> None:
        self.media: list[Medium] = []
        self.digests: list[bytes] = []
        self._by_array: dict[tuple[object, ...], int] = {}
        self._by_content: dict[tuple[object, ...], int] = {}

    def number(self, medium: Medium) -> int:
        # The caller's rows keep the array alive, so its id stays its own.
        array = (id(medium.data), medium.kind, medium.grid_thw)
        if array not in self._by_array:
            self._by_array[array] = self._number(medium)
        return self._by_array[array]

    def _number(self, medium: Medium) -> int:
        if medium.data.dtype != np.uint8 or medium.data.ndim != 1:
            raise BusError(f"a medium is a flat uint8 array, got {medium.data.dtype}")
        value = digest(medium.data)
        content = (value, medium.kind, tuple(medium.grid_thw))
        known = self._by_content.get(content)
        # 128 bits that anybody can compute: two media are the same only if their bytes are.
        if known is not None and np.array_equal(self.media[known].data, medium.data):
            return known
        self.media.append(medium)
        self.digests.append(value)
        self._by_content[content] = len(self.media) - 1
        return len(self.media) - 1
