"""Files of rows, read one at a time: JSON lines or Parquet."""

import os
from array import array
from collections.abc import Sequence, Sized
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from relax_hpc import user_files
from relax_hpc.errors import ConfigError, first_line

SAMPLE = 1000
"""Rows of a file that are tokenized where a run is submitted."""
REMEDY = "name a file of JSON lines or Parquet (.parquet)"


class Row(NamedTuple):
    where: str
    """File and line, for messages."""
    fields: dict[str, Any]


class Rows(Protocol):
    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Row:
        """Raises:
        ConfigError: the row is not an object.
        """
        ...

    def where(self, index: int) -> str:
        """File and line of a row."""
        ...


def open_rows(path: Path) -> Rows:
    """Opens a file; what is in its rows is looked at when they are asked for.

    Raises:
        ConfigError: missing, unreadable or empty.
    """
    rows = ParquetRows(path) if path.suffix == ".parquet" else JsonLines(path, REMEDY)
    if not len(rows):
        raise ConfigError(f"{path}: is empty; it has to hold a document or more")
    return rows


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


class JsonLines:
    """One object per line; blank lines are no rows. The file stays on disk."""

    def __init__(self, path: Path, remedy: str) -> None:
        self._path = path
        # Not mapped into memory: a file that somebody cuts short would end the process.
        self._file = user_files.opened_text(path, remedy)
        self._starts, self._sizes, self._numbers = array("q"), array("q"), array("q")
        start = self._file.tell()
        for number, line in enumerate(self._file, start=1):
            if line.strip():
                self._starts.append(start)
                self._sizes.append(len(line))
                self._numbers.append(number)
            start += len(line)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Row:
        where = self.where(index)
        line = os.pread(self._file.fileno(), self._sizes[index], self._starts[index])
        try:
            text = line.decode()
        except UnicodeDecodeError:
            raise ConfigError(f"{where}: is not UTF-8 text; JSON lines are expected") from None
        return Row(where, user_files.parse_object(where, text, "write one object per line"))

    def where(self, index: int) -> str:
        return f"{self._path}, line {self._numbers[index]}"


class ParquetRows:
    """A Parquet file, held in memory; fields without a value are left out."""

    def __init__(self, path: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self._path = path
        user_files.opened(path, REMEDY).close()
        try:
            self._table = pq.read_table(path, memory_map=False)
        except (pa.ArrowException, OSError) as error:
            raise ConfigError(
                f"{path}: is not Parquet: {first_line(error)}; write it again"
            ) from None

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: int) -> Row:
        where = self.where(index)
        try:
            [fields] = self._table.slice(index, 1).to_pylist()
        except UnicodeDecodeError:
            raise ConfigError(f"{where}: is not UTF-8 text; write the file again") from None
        return Row(where, _without_none(fields))

    def where(self, index: int) -> str:
        return f"{self._path}, row {index}"


def _without_none(value: Any) -> Any:  # noqa: ANN401
    """Parquet gives every struct all keys that one of them has."""
    if isinstance(value, dict):
        return {key: _without_none(part) for key, part in value.items() if part is not None}
    return [_without_none(part) for part in value] if isinstance(value, list) else value
