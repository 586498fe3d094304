"""Files of rows, read one at a time: JSON lines or Parquet. Little of a file is held in memory."""

import os
from array import array
from collections.abc import Sequence, Sized
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

from relax_hpc import user_files
from relax_hpc.errors import ConfigError
from relax_hpc.prompts.order import Blocks

SAMPLE = 1000
"""Rows of a file that are tokenized where a run is submitted."""
REMEDY = "name a file of JSON lines or Parquet (.parquet)"
MOST_LINE_BYTES = 2**26
_OBJECTS = "write one object per line"
_NO_CSV = "CSV is not read: write JSON lines, as docs/data.md shows, or Parquet"
_MOST_MARKS = 2**19


class Row(NamedTuple):
    where: str
    """File and line, for messages."""
    fields: dict[str, Any]
    folder: Path | None = None
    """Folder of the file, where paths in it begin; None where the data are in none."""
    given: dict[str, Any] | None = None
    """The fields as a table has them, also those without a value, which `fields` lack there."""


class Rows(Protocol):
    @property
    def blocks(self) -> Blocks:
        """Rows that are read together; their sizes add up to the number of rows."""
        ...

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Row:
        """Raises:
        ConfigError: the row is not an object.
        """
        ...

    def where(self, index: int) -> str:
        """File and line of a row."""
        ...


class JsonLines:
    """One object per line; blank lines are no rows. The file stays on disk.

    Of a long file only the place of every second row is kept in memory, of a longer one of every
    fourth, and so on.
    """

    def __init__(self, path: Path, remedy: str) -> None:
        """Looks where rows begin.

        Raises:
            ConfigError: the file cannot be read, or a line is too long.
        """
        self.path, self.remedy = path, remedy
        self._needed = _NO_CSV if path.suffix.lower() == ".csv" else _OBJECTS
        # Not mapped into memory: a file that somebody cuts short would end the process.
        file = _reader(self)
        self._starts, self._numbers = array("q"), array("q")
        self._stride, self._len = 1, 0
        start, number = file.tell(), 0
        while line := file.readline(MOST_LINE_BYTES):
            number += 1
            if len(line) == MOST_LINE_BYTES:
                raise ConfigError(
                    f"{path}, line {number}: has more than {MOST_LINE_BYTES >> 20} MiB; {remedy}, "
                    "an object per line"
                )
            if line.strip():
                self._mark(start, number)
            start += len(line)
        self._end = start

    def _mark(self, start: int, number: int) -> None:
        if self._len % self._stride == 0:
            self._starts.append(start)
            self._numbers.append(number)
            if len(self._starts) > _MOST_MARKS:
                self._starts, self._numbers = self._starts[::2], self._numbers[::2]
                self._stride *= 2
        self._len += 1

    @property
    def blocks(self) -> Blocks:
        return Blocks.even(self._len)

    def __len__(self) -> int:
        return self._len

    def __getitem__(self, index: int) -> Row:
        number, line = self._line(index)
        where = f"{self.path}, line {number}"
        try:
            text = line.decode()
        except UnicodeDecodeError:
            raise ConfigError(f"{where}: is not UTF-8 text; JSON lines are expected") from None
        fields = user_files.parse_object(where, text, self._needed)
        return Row(where, fields, self.path.parent)

    def where(self, index: int) -> str:
        mark, further = divmod(index, self._stride)
        number = self._line(index)[0] if further else self._numbers[mark]
        return f"{self.path}, line {number}"

    def _line(self, index: int) -> tuple[int, bytes]:
        """Number and content of the line that a row is."""
        if not 0 <= index < self._len:
            raise IndexError(f"{index} of {self._len} rows")
        mark, further = divmod(index, self._stride)
        start = self._starts[mark]
        end = self._starts[mark + 1] if mark + 1 < len(self._starts) else self._end
        number = self._numbers[mark]
        for line in os.pread(_reader(self).fileno(), end - start, start).split(b"\n"):
            if line.strip():
                if not further:
                    return number, line
                further -= 1
            number += 1
        raise ConfigError(f"{self.path}: was changed while it was read; leave it as it is")


@lru_cache(maxsize=64)  # of a folder of many files not all are open
def _reader(rows: JsonLines) -> BinaryIO:
    return user_files.opened_text(rows.path, rows.remedy)


def sample(sizes: Sequence[int], count: int) -> list[int]:
    """`count` rows to look at where all would take too long, in order; the same ones every time.

    Half of them are the largest, which are the first to be too long; the others lie evenly.
    """
    if len(sizes) <= count:
        return list(range(len(sizes)))
    by_size = sorted(range(len(sizes)), key=lambda index: (-sizes[index], index))
    rest, evenly = sorted(by_size[count // 2 :]), count - count // 2
    places = (place * (len(rest) - 1) // (evenly - 1) for place in range(evenly))
    return sorted([*by_size[: count // 2], *(rest[place] for place in places)])


def left_out(chosen: Sequence[Sized], every: Sequence[Sized], what: str, before: str) -> str | None:
    """Says that only `chosen` of the rows of `every` file were looked at; None if all were.

    Args:
        what: the rows are called.
        before: what happens only after all were looked at.
    """
    count, total = sum(map(len, chosen)), sum(map(len, every))
    if count == total:
        return None
    return (
        f"checked {count:,} of {total:,} {what}; all are checked when the job starts, before "
        f"{before}"
    )


def is_list_of_objects(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(element, dict) for element in value)
