"""The order of prompts: an ordinal -> a row, by the seed alone.

Nothing is remembered between two questions, so whoever asks, in whichever process and after
whichever restart, gets the same row. All of it is integers; it is the same on every machine.

Within an epoch a source's blocks (row groups, runs of lines) are permuted, and then the rows of
each window of a few blocks among themselves. So reading stays in one part of the files at a time.
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
"""Number of this order: a run goes on only in the order that it began in. 1 shuffled a list."""
MIXED = 1000
"""Prompts in a block of a mixture: in each, every source has its exact share."""
GRADES = 10
"""Parts of an epoch that follow each other, the easiest first."""

_EVEN_ROWS, _EVEN_WINDOW = 256, 256
_ROUNDS = 6
_MASK = 2**64 - 1
_ODD, _OTHER_ODD = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93


class Permutation:
    """`permutation[place]`: a shuffled `range(size)`, computed one place at a time.

    A Feistel network over the smallest power of two that holds `size`; who lands outside walks on
    until it is inside again (Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002).
    """

    __slots__ = ("_high_mask", "_keys", "_low_bits", "_low_mask", "_size")

    def __init__(self, size: int, *key: object) -> None:
        """Draws it.

        Args:
            size: 1 to 2**64.
            key: what it depends on.
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
    """Blocks whose rows are mixed with each other: so many are read at the same time."""

    @classmethod
    def even(cls, num_rows: int) -> Self:
        """Makes blocks of equal size, the last one apart, of rows that lie in no blocks."""
        whole, rest = divmod(num_rows, _EVEN_ROWS)
        return cls([_EVEN_ROWS] * whole + [rest] * (rest > 0), _EVEN_WINDOW)


class Epochs:
    """`epochs[ordinal]`: every row of a source once per epoch."""

    def __init__(self, blocks: Blocks, seed: int | None, name: str = "") -> None:
        """Draws nothing yet.

        Args:
            blocks: of the source.
            seed: of the run; without one, rows rise.
            name: of the source: two of the same size have different orders.
        """
        self._window, self._seed, self._name = blocks.window, seed, name
        self._starts = array("q", accumulate(blocks.sizes, initial=0))
        self._drawn = lru_cache(maxsize=2)(self._draw)
        self._rows = lru_cache(maxsize=4)(self._draw_rows)

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, ordinal: int) -> int:
        """The row of `ordinal` >= 0, which may be any number of epochs on."""
        if self._seed is None:
            return ordinal % self._starts[-1]
        block, number = self.place(ordinal)
        return self._starts[block] + number

    def place(self, ordinal: int) -> tuple[int, int]:
        """The block of the row of `ordinal` in a shuffled epoch, and its number in there."""
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
        """Blocks in the order of an epoch, and the place at which each of them begins."""
        count = len(self._starts) - 1
        drawn = Permutation(count, self._seed, self._name, epoch, "blocks")
        blocks = array("q", (drawn[place] for place in range(count)))
        sizes = (self._starts[block + 1] - self._starts[block] for block in blocks)
        return blocks, array("q", accumulate(sizes, initial=0))


def grades_of(values: npt.NDArray[np.float64]) -> bytes:
    """Divides rows by their values into `GRADES` of the same size, the smallest first.

    Rows of one value are of one grade, so there may be fewer.
    """
    places = [max(len(values) * part // GRADES - 1, 0) for part in range(1, GRADES)]
    ends = np.unique(np.sort(values)[places])
    return np.searchsorted(ends, values).astype(np.uint8).tobytes()


class Grades:
    """`grades[ordinal]`: epochs that begin with the rows of grade 0, then those of grade 1, ...

    Rows of one grade are in the order of `Epochs`.
    """

    def __init__(self, blocks: Blocks, grades: bytes, seed: int | None, name: str = "") -> None:
        """Counts the grades of each block.

        Args:
            blocks: of the source.
            grades: of each row.
            seed: as of `Epochs`.
            name: as of `Epochs`.
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
        """The row of `ordinal` >= 0, which may be any number of epochs on."""
        epoch, place = divmod(ordinal, len(self))
        grade = bisect_right(self._begins, place) - 1
        part = self._parts[grade]
        block, number = part.place(epoch * len(part) + place - self._begins[grade])
        return self._starts[block] + self._found(grade, block)[number]

    def _find(self, grade: int, block: int) -> "array[int]":
        """The rows of a grade in a block, counted in the block."""
        grades = self._grades[self._starts[block] : self._starts[block + 1]]
        return array("i", (row for row, each in enumerate(grades) if each == grade))


class Turn(NamedTuple):
    """An ordinal's part in a mixture."""

    source: int
    """Number of the source."""
    ordinal: int
    """Number of the prompt among those of the source."""


class Mixture:
    """`mixture[ordinal]`: sources take turns, with exact shares of every 1,000 prompts."""

    def __init__(self, weights: Sequence[float], seed: int | None) -> None:
        """Draws nothing yet.

        Raises:
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
    """Divides `total` in proportion to `weights`, by largest remainder; of equal ones the first."""
    exact = [Fraction(weight) for weight in weights]  # floats would round otherwise elsewhere
    wanted = [weight * total / sum(exact) for weight in exact]
    counts = [int(each) for each in wanted]
    rest = sorted(range(len(counts)), key=lambda n: (counts[n] - wanted[n], n))
    for index in rest[: total - sum(counts)]:
        counts[index] += 1
    return counts


class Source(NamedTuple):
    """One of the sources of a run."""

    name: str
    blocks: Blocks
    weight: float = 1.0
    grades: bytes = b""
    """Grade of each row, if an epoch is to rise through grades; "" if it has no grades."""


class Order:
    """`order[ordinal]`: rows of all sources, numbered through one source after the other."""

    def __init__(self, sources: Sequence[Source], seed: int | None) -> None:
        """Draws nothing yet.

        Args:
            sources: with a row each at least.
            seed: of the run; without one, rows rise and weights are not looked at.

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
        """The row of `ordinal`.

        Raises:
            IndexError: it is below 0.
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
    """Refuses to go on with other rows: the order is drawn for as many as there are.

    Args:
        num_rows: rows of each file, by the key that names it.
        before: likewise, when the run was begun or submitted.
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
