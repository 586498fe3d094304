"""Maps the ordinal of a prompt to a row, by the seed alone.

It keeps no state, so an ordinal names the same row in every process and after every restart. All
of it is integer arithmetic, the same on every machine.

Each epoch permutes a source's blocks (row groups, runs of lines), then the rows within each window
of a few blocks. So reading stays in one part of the files at a time.
"""

import hashlib
import struct
from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from relax_hpc.errors import ConfigError

VERSION = 2
"""Version of this order: a run keeps the order it began in. 1 shuffled a list."""
MIXED = 1000
"""Prompts per block of a mixture: in each, every source has its exact share."""
GRADES = 10
"""Consecutive parts of an epoch, easiest first."""

_EVEN_ROWS, _EVEN_WINDOW = 256, 256
_ROUNDS = 6
_MASK = 2**64 - 1
_ODD, _OTHER_ODD = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93


class Permutation:
    """`permutation[place]`: a shuffled `range(size)`, computed one place at a time.

    A Feistel network over the smallest power of two that holds `size`; results outside are fed back
    until they are inside (Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002).
    """

    __slots__ = ("_high_mask", "_keys", "_low_bits", "_low_mask", "_size")

    def __init__(self, size: int, *key: object) -> None:
        """Args:
        size: 1 to 2**64.
        key: seeds it.
        """
        bits = max(2, (size - 1).bit_length())
        self._size, self._low_bits = size, bits // 2
        self._low_mask, self._high_mask = (1 << bits // 2) - 1, (1 << bits - bits // 2) - 1
        named = "/".join(map(str, key)).encode()
        digest = hashlib.blake2b(named, digest_size=8 * _ROUNDS).digest()
        keys = struct.unpack(f"<{_ROUNDS}Q", digest)
        self._keys = tuple(zip(keys[::2], keys[1::2], strict=True))

    def __getitem__(self, place: int) -> int:
        if not 0 <= place < self._size:
            raise IndexError(f"{place} of {self._size}")
        bits, low_mask, high_mask = self._low_bits, self._low_mask, self._high_mask
        while True:
            high, low = place >> bits, place & low_mask
            for of_high, of_low in self._keys:
                mixed = (low + of_high) * _ODD & _MASK
                high ^= ((mixed ^ mixed >> 29) * _OTHER_ODD & _MASK) >> 32 & high_mask
                mixed = (high + of_low) * _ODD & _MASK
                low ^= ((mixed ^ mixed >> 29) * _OTHER_ODD & _MASK) >> 32 & low_mask
            place = high << bits | low
            if place < self._size:
                return place


class Blocks(NamedTuple):
    """Rows that lie together."""

    sizes: Sequence[int]
    """Rows of each block, in the order of the files."""
    window: int
    """Number of blocks whose rows are mixed, and so read at the same time."""

    @classmethod
    def even(cls, num_rows: int) -> Self:
        """Makes equal blocks, but for the last one, for rows without any."""
        whole, rest = divmod(num_rows, _EVEN_ROWS)
        return cls([_EVEN_ROWS] * whole + [rest] * (rest > 0), _EVEN_WINDOW)


class Epochs:
    """`epochs[ordinal]`: every row of a source once per epoch."""

    def __init__(self, blocks: Blocks, seed: int | None, name: str = "") -> None:
        """Args:
        seed: of the run; None keeps the rows in order.
        name: of the source: two of the same size have different orders.
        """
        self._window, self._seed, self._name = blocks.window, seed, name
        self._starts = array("q", accumulate(blocks.sizes, initial=0))
        self._drawn = lru_cache(maxsize=2)(self._draw)
        self._rows = lru_cache(maxsize=4)(self._draw_rows)

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, ordinal: int) -> int:
        """Returns the row of `ordinal` >= 0, which may lie in any epoch."""
        if self._seed is None:
            return ordinal % self._starts[-1]
        block, number = self.place(ordinal)
        return self._starts[block] + number

    def place(self, ordinal: int) -> tuple[int, int]:
        """Returns the block of `ordinal` in a shuffled epoch, and the index within it."""
        epoch, place = divmod(ordinal, self._starts[-1])
        blocks, begins = self._drawn(epoch)
        window = (bisect_right(begins, place) - 1) // self._window
        first = begins[window * self._window]
        end = begins[min((window + 1) * self._window, len(blocks))]
        place = first + self._rows(end - first, epoch, window)[place - first]
        block = bisect_right(begins, place) - 1
        return blocks[block], place - begins[block]

    def _draw_rows(self, size: int, epoch: int, window: int) -> Permutation:
        return Permutation(size, self._seed, self._name, epoch, "window", window)

    def _draw(self, epoch: int) -> tuple["array[int]", "array[int]"]:
        """The blocks in the order of an epoch, and where each begins."""
        count = len(self._starts) - 1
        drawn = Permutation(count, self._seed, self._name, epoch, "blocks")
        blocks = array("q", (drawn[place] for place in range(count)))
        sizes = (self._starts[block + 1] - self._starts[block] for block in blocks)
        return blocks, array("q", accumulate(sizes, initial=0))


def grades_of(values: npt.NDArray[np.float64]) -> bytes:
    """Divides rows by value into `GRADES` of equal size, the smallest first.

    Equal values share a grade, so there may be fewer.
    """
    places = [max(len(values) * part // GRADES - 1, 0) for part in range(1, GRADES)]
    ends = np.unique(np.sort(values)[places])
    return np.searchsorted(ends, values).astype(np.uint8).tobytes()


class Grades:
    """`grades[ordinal]`: epochs that begin with the rows of grade 0, then those of grade 1, ...

    Within a grade, rows are in the order of `Epochs`.
    """

    def __init__(self, blocks: Blocks, grades: bytes, seed: int | None, name: str = "") -> None:
        """Args:
        grades: of each row.
        seed: as in `Epochs`.
        name: as in `Epochs`.
        """
        self._grades = grades
        self._starts = array("q", accumulate(blocks.sizes, initial=0))
        spans = list(pairwise(self._starts))
        self._parts = []
        for grade in range(max(grades) + 1):
            sizes = array("q", (grades.count(grade, start, end) for start, end in spans))
            self._parts.append(Epochs(Blocks(sizes, blocks.window), seed, f"{name}/{grade}"))
        self._begins = list(accumulate(map(len, self._parts), initial=0))
        self._found = lru_cache(maxsize=blocks.window)(self._find)

    def __len__(self) -> int:
        return len(self._grades)

    def __getitem__(self, ordinal: int) -> int:
        epoch, place = divmod(ordinal, len(self))
        grade = bisect_right(self._begins, place) - 1
        part = self._parts[grade]
        block, number = part.place(epoch * len(part) + place - self._begins[grade])
        return self._starts[block] + self._found(grade, block)[number]

    def _find(self, grade: int, block: int) -> "array[int]":
        grades = self._grades[self._starts[block] : self._starts[block + 1]]
        return array("i", (row for row, each in enumerate(grades) if each == grade))


class Turn(NamedTuple):
    """An ordinal's part in a mixture."""

    source: int
    ordinal: int
    """Index of the prompt within the source."""


class Mixture:
    """`mixture[ordinal]`: interleaves sources, with exact shares of every 1,000 prompts."""

    def __init__(self, weights: Sequence[float], seed: int | None) -> None:
        """Raises:
        ConfigError: a source is so light that it would never have a turn.
        """
        self._seed, self._counts = seed, shares(weights, MIXED)
        if 0 in self._counts:
            light = weights[self._counts.index(0)]
            raise ConfigError(
                f"weight = {light}: of {MIXED:,} prompts none would be of this source; give it "
                f"{sum(weights) / MIXED:.3g} or more, or remove it"
            )
        self._ends = list(accumulate(self._counts))
        self._drawn = lru_cache(maxsize=4)(self._draw)

    def __getitem__(self, ordinal: int) -> Turn:
        block, place = divmod(ordinal, MIXED)
        source, number = self._drawn(block)[place]
        return Turn(source, block * self._counts[source] + number)

    def _draw(self, block: int) -> list[Turn]:
        """The turns of a block, numbered within it."""
        places = Permutation(MIXED, self._seed, "mixture", block)
        numbers, turns = [0] * len(self._counts), []
        for place in range(MIXED):
            source = bisect_right(self._ends, places[place])
            turns.append(Turn(source, numbers[source]))
            numbers[source] += 1
        return turns


def shares(weights: Sequence[float], total: int) -> list[int]:
    """Divides `total` in proportion to `weights`, by largest remainder; ties go to the first."""
    exact = [Fraction(weight) for weight in weights]  # floats would round otherwise elsewhere
    wanted = [weight * total / sum(exact) for weight in exact]
    counts = [int(each) for each in wanted]
    rest = sorted(range(len(counts)), key=lambda n: (counts[n] - wanted[n], n))
    for index in rest[: total - sum(counts)]:
        counts[index] += 1
    return counts


class DataSource(NamedTuple):
    name: str
    blocks: Blocks
    weight: float = 1.0
    grades: bytes = b""
    """Grade of each row for a curriculum; empty without one."""


class RowOrder:
    """`order[ordinal]`: rows of all sources, numbered through one source after the other."""

    def __init__(self, sources: Sequence[DataSource], seed: int | None) -> None:
        """Args:
            sources: each with at least one row.
            seed: of the run; None keeps the rows in order and ignores weights.

        Raises:
            ConfigError: a source is so light that it would never have a turn.
        """
        self._epochs = [
            Grades(each.blocks, each.grades, seed, each.name)
            if each.grades
            else Epochs(each.blocks, seed, each.name)
            for each in sources
        ]
        self._starts = list(accumulate(map(len, self._epochs), initial=0))
        is_mixed = seed is not None and len(sources) > 1
        self._mixture = Mixture([each.weight for each in sources], seed) if is_mixed else None

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, ordinal: int) -> int:
        """Raises:
        IndexError: below 0.
        """
        if ordinal < 0:
            raise IndexError(f"prompt ordinals start at 0, not {ordinal}")
        if self._mixture:
            source, own = self._mixture[ordinal]
            return self._starts[source] + self._epochs[source][own]
        if len(self._epochs) == 1:
            return self._epochs[0][ordinal]
        return ordinal % len(self)


def check_num_rows(num_rows: Mapping[str, int], before: Mapping[str, int], *, since: str) -> None:
    """Refuses to continue with a changed number of rows, on which the order depends.

    Args:
        num_rows: rows of each file, by the key that names it.
        before: the same, when the run was begun or submitted.
        since: "begun" or "submitted".

    Raises:
        ConfigError: names the file, and both numbers.
    """
    for key, count in num_rows.items():
        if before[key] != count:
            raise ConfigError(
                f"{key}: has {count:,} rows, the run was {since} with {before[key]:,}; restore the "
                "files, or submit a new run"
            )
