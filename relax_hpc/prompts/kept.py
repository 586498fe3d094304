"""The rows that a run uses, of those that there are."""

from collections.abc import Collection, Sequence

import numpy as np


class Kept:
    """`kept[index]`: the rows that are not left out, numbered anew from 0."""

    def __init__(self, num_rows: int, left_out: Collection[int] = ()) -> None:
        """Args:
        num_rows: that there are.
        left_out: those of them that are not used.
        """
        rows = np.unique(np.fromiter(left_out, np.int64, len(left_out)))
        self.left_out = frozenset(rows.tolist())
        self._len = num_rows - len(rows)
        self._rows = rows
        self._used_before = rows - np.arange(len(rows))
        """[rows that are left out] how many rows before each of them are used."""

    def __len__(self) -> int:
        return self._len

    def sizes(self, blocks: Sequence[int], first: int) -> list[int]:
        """Rows that are used of each of some blocks, the first of which begins at row `first`."""
        ends = first + np.append(0, np.cumsum(np.asarray(blocks, np.int64)))
        left_out = np.diff(np.searchsorted(self._rows, ends))
        return [int(size) for size in np.asarray(blocks, np.int64) - left_out]

    def __getitem__(self, index: int) -> int:
        """The row that is used as number `index`."""
        if not 0 <= index < self._len:
            raise IndexError(f"{index} of {self._len} rows")
        if not self.left_out:
            return index
        return index + int(np.searchsorted(self._used_before, index, side="right"))
