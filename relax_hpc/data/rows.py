"""Opens data as a job names it, and reads its rows one at a time, with little of a file in memory.

Data are files of JSON lines or Parquet, folders and patterns of them, programs and Hugging Face
data sets, whole or sliced.
"""

import os
import re
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager, nullcontext, suppress
from functools import lru_cache, partial
from itertools import accumulate, chain
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from relax_hpc.data.order import Blocks
from relax_hpc.errors import ConfigError, first_line, show
from relax_hpc.runtime.files import user_files, user_programs
from relax_hpc.runtime.files.storage import patiently
from relax_hpc.runtime.files.user_files import HUB

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq
    from datasets import Dataset

SAMPLE = 1000
"""Rows of a file tokenized at submission."""
REMEDY = "name a file of JSON lines or Parquet (.parquet)"
MOST_LINE_BYTES = 2**26
_OBJECTS = "write one object per line"
_NO_CSV = "CSV is not read: write JSON lines, as docs/how-to/data.md shows, or Parquet"
_MOST_MARKS = 2**19


class DataRow(NamedTuple):
    where: str
    fields: dict[str, Any]
    folder: Path | None = None
    """Base of paths in the row; None if the data are in no folder."""
    given: dict[str, Any] | None = None
    """All fields, including empty ones, which `fields` lack for tables."""


class DataRows:
    """Rows, each read on access."""

    def __init__(self, name: str) -> None:
        """Takes the name in messages."""
        self._name = name

    @property
    def blocks(self) -> Blocks:
        """Rows that are read together; their sizes add up to the number of rows."""
        return Blocks.even(len(self))

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, index: int) -> DataRow:
        """Raises:
        ConfigError: the row is not an object.
        """
        raise NotImplementedError

    def where(self, index: int) -> str:
        return f"{self._name}, row {index}"

    def fetch(self, index: int) -> Callable[[], object] | None:
        """Returns a function that loads a row's block, in any thread; None if access is
        immediate."""
        return None

    @property
    def tables(self) -> Sequence["ParquetRows"]:
        """The Parquet files with these rows."""
        return ()

    def _check_index(self, index: int) -> None:
        if not 0 <= index < len(self):
            raise IndexError(f"{index} of {len(self)} rows")


class JsonLines(DataRows):
    """One object per line; blank lines are no rows. The file stays on disk.

    The index of a long file keeps only every second row's offset, then every fourth, and so on.
    """

    def __init__(self, path: Path, remedy: str) -> None:
        """Indexes the rows.

        Raises:
            ConfigError: the file cannot be read, or a line is too long.
        """
        super().__init__(str(path))
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

    def __len__(self) -> int:
        return self._len

    def __getitem__(self, index: int) -> DataRow:
        number, line = self._line(index)
        where = f"{self.path}, line {number}"
        try:
            text = line.decode()
        except UnicodeDecodeError:
            raise ConfigError(f"{where}: is not UTF-8 text; JSON lines are expected") from None
        fields = user_files.parse_object(where, text, self._needed)
        return DataRow(where, fields, self.path.parent)

    def where(self, index: int) -> str:
        mark, further = divmod(index, self._stride)
        number = self._line(index)[0] if further else self._numbers[mark]
        return f"{self.path}, line {number}"

    def _line(self, index: int) -> tuple[int, bytes]:
        """Returns the line number and content of a row."""
        self._check_index(index)
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
    return user_files.open_text(rows.path, rows.remedy)


MOST_GROUP_BYTES = 2**27
"""Most bytes of a row group in memory."""
MOST_HELD_BYTES = 2**28
"""Most bytes of row groups in a process, over all files: the current window and the next."""
MOST_GROUP_ROWS = 2**20
"""Most rows of a row group: pyarrow's default."""
_MOST_COLUMNS = 4096
_MOST_BATCH_BYTES = 2**29
_MOST_WINDOW = 256
_BATCH_ROWS = 1024
_READ_BYTES = 2**20


class RowGroup(NamedTuple):
    batches: list["pa.RecordBatch"]
    ends: list[int]
    """Cumulative rows at the end of each batch."""
    num_bytes: int

    def row(self, index: int) -> dict[str, Any]:
        number = bisect_right(self.ends, index)
        batch = self.batches[number]
        place = index - self.ends[number] + batch.num_rows
        columns = zip(batch.schema.names, batch.columns, strict=True)
        return {name: column[place].as_py() for name, column in columns}


class GroupCache:
    """The most recently used row groups."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._lock, self._reading = Lock(), Lock()  # threads read, and one group at a time
        self._groups: OrderedDict[tuple[ParquetRows, int], RowGroup] = OrderedDict()

    def get(self, file: "ParquetRows", number: int) -> RowGroup:
        """Returns a row group; reads it if needed."""
        if (held := self.find(file, number)) is not None:
            return held
        with self._reading:
            if (held := self.find(file, number)) is not None:
                return held
            with self._lock:
                self._shrink(self._most_bytes - file.group_bytes[number])
            group = file.read(number)
            with self._lock:
                self._groups[file, number] = group
                self._shrink(self._most_bytes, keep=1)
        return group

    def find(self, file: "ParquetRows", number: int) -> RowGroup | None:
        """Returns a cached row group; never waits for a reader."""
        key = (file, number)
        with self._lock:
            if key in self._groups:
                self._groups.move_to_end(key)
            return self._groups.get(key)

    def _shrink(self, most_bytes: int, keep: int = 0) -> None:
        held = sum(group.num_bytes for group in self._groups.values())
        while held > most_bytes and len(self._groups) > keep:
            held -= self._groups.popitem(last=False)[1].num_bytes


_CACHE = GroupCache(MOST_HELD_BYTES)


class ParquetRows(DataRows):
    """A Parquet file; empty fields are left out."""

    def __init__(self, path: Path) -> None:
        """Reads the metadata.

        Raises:
            ConfigError: the file cannot be read, or a row group is too large to be held.
        """
        super().__init__(str(path))
        self.path = path
        user_files.open_file(path, REMEDY).close()
        file = _parquet_reader(self)
        about = file.metadata
        if about.num_columns > _MOST_COLUMNS:
            raise ConfigError(
                f"{path}: has {about.num_columns:,} columns, {_MOST_COLUMNS:,} are the most; write "
                "it with the columns that are needed"
            )
        groups = [about.row_group(number) for number in range(about.num_row_groups)]
        self._sizes = array("q", (group.num_rows for group in groups))
        self._starts = array("q", accumulate(self._sizes, initial=0))
        self.group_bytes = array("q", (group.total_byte_size for group in groups))
        """Bytes of each row group, by the metadata."""
        self.types: dict[str, str] = {field.name: _kind(field.type) for field in file.schema_arrow}
        """Column -> its type in words."""
        self._refused: dict[int, ConfigError] = {}
        for number, num_bytes in enumerate(self.group_bytes):
            self._check(number, num_bytes, self._sizes[number])

    @property
    def blocks(self) -> Blocks:
        largest = max(self.group_bytes, default=1)
        return Blocks(self._sizes, min(_MOST_WINDOW, max(1, MOST_GROUP_BYTES // max(1, largest))))

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> DataRow:
        self._check_index(index)
        number = bisect_right(self._starts, index) - 1
        where = self.where(index)
        try:
            fields = _CACHE.get(self, number).row(index - self._starts[number])
        except UnicodeDecodeError:
            raise ConfigError(f"{where}: is not UTF-8 text; write the file again") from None
        return DataRow(where, without_none(fields), self.path.parent, fields)

    def fetch(self, index: int) -> Callable[[], object] | None:
        number = bisect_right(self._starts, index) - 1
        return None if _CACHE.find(self, number) else partial(_CACHE.get, self, number)

    @property
    def tables(self) -> Sequence["ParquetRows"]:
        return [self]

    def read(self, number: int) -> RowGroup:
        """Reads a row group; a refused one only once.

        Raises:
            ConfigError: it is damaged, or too large to be held.
        """
        if number in self._refused:
            raise self._refused[number]
        try:
            return self._read(number)
        except ConfigError as error:
            self._refused[number] = error
            raise

    def _read(self, number: int) -> RowGroup:
        import pyarrow as pa

        batches, ends, num_bytes = list["pa.RecordBatch"](), list[int](), 0
        # A text that many rows have is in the file once: each of a batch may be as long as all.
        most = _MOST_BATCH_BYTES // max(1, self.group_bytes[number])
        size = min(_BATCH_ROWS, max(1, most))
        try:
            pa.default_memory_pool().release_unused()  # else a tenth more stays resident
            read = _parquet_reader(self).iter_batches(size, [number], use_threads=False)
            for batch in read:
                num_bytes += batch.nbytes
                batches.append(batch)
                ends.append(batch.num_rows + (ends[-1] if ends else 0))
                self._check(number, num_bytes, ends[-1])  # what repeats is small in the file only
        except (pa.ArrowException, OSError) as error:
            raise ConfigError(
                f"{self.path}: row group {number} is damaged or cut short: {first_line(error)}; "
                "write the file again"
            ) from None
        return RowGroup(batches, ends, num_bytes)

    def _check(self, number: int, num_bytes: int, num_rows: int) -> None:
        if num_rows > MOST_GROUP_ROWS:
            raise ConfigError(
                f"{self.path}: row group {number} has {num_rows:,} rows, {MOST_GROUP_ROWS:,} are "
                "the most; write the file with smaller ones, e.g. "
                f"pyarrow.parquet.write_table(table, path, row_group_size={MOST_GROUP_ROWS >> 3})"
            )
        if num_bytes > MOST_GROUP_BYTES:
            size = max(1, num_rows * MOST_GROUP_BYTES // (num_bytes * 8))
            raise ConfigError(
                f"{self.path}: row group {number} has {num_bytes >> 20} MiB or more in memory, "
                f"{MOST_GROUP_BYTES >> 20} are the most; write the file with smaller ones, e.g. "
                f"pyarrow.parquet.write_table(table, path, row_group_size={size})"
            )


@lru_cache(maxsize=8)  # of a folder of many files not all are open
def _parquet_reader(rows: ParquetRows) -> "pq.ParquetFile":
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # Read as it is needed: else all of a row group is in memory twice.
        return pq.ParquetFile(
            rows.path, memory_map=False, pre_buffer=False, buffer_size=_READ_BYTES
        )
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(
            f"{rows.path}: is not Parquet, or cut short: {first_line(error)}; write it again"
        ) from None


def check_types(files: Sequence[ParquetRows]) -> None:
    """Refuses files whose columns of the same name differ in type.

    Raises:
        ConfigError: names both files, the column and its types.
    """
    first: dict[str, tuple[ParquetRows, str]] = {}
    for file in files:
        for column, kind in file.types.items():
            if kind == "null":
                continue
            other, known = first.setdefault(column, (file, kind))
            if known != kind:
                raise ConfigError(
                    f"{file.path}: column {column} is {kind}, in {other.path} it is "
                    f"{known}; write both alike, or leave one file out"
                )


def _kind(type_: "pa.DataType") -> str:
    import pyarrow as pa

    if pa.types.is_integer(type_) or pa.types.is_floating(type_):
        return "number"
    return str(type_).replace("large_", "").replace("string_view", "string")


def without_none(value: Any) -> Any:  # noqa: ANN401
    """Drops empty fields: Parquet gives every struct the keys of all."""
    if isinstance(value, dict):
        return {key: without_none(part) for key, part in value.items() if part is not None}
    return [without_none(part) for part in value] if isinstance(value, list) else value


PLACE = re.compile(r".+\.py:[A-Za-z_]\w*", re.DOTALL)
"""Name of a program: "folder/file.py:Class"."""


class ProgramRows(DataRows):
    """Rows of a user's object with `__len__` and `__getitem__`, which are dicts."""

    def __init__(self, place: str) -> None:
        """Args:
            place: "file.py:name" of a class, or a function that returns such an object.

        Raises:
            ConfigError: it cannot be made, or has no length.
        """
        super().__init__(place)
        self._has_made_one = False
        try:
            make = user_programs.import_place(place)
            with user_programs.limit_time(place):
                self._rows: Any = make()
                self._count = len(self._rows)
        except Exception as error:
            raise ConfigError(
                f"{place}: cannot be made: {user_programs.describe_error(error)}; correct it"
            ) from error

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> DataRow:
        where = self.where(index)
        try:
            # Later ones may be asked for by a run, which has its own watchdog.
            with nullcontext() if self._has_made_one else user_programs.limit_time(where):
                fields = self._rows[index]
            self._has_made_one = True
        except Exception as error:
            raise ConfigError(
                f"{where}: cannot be made: {user_programs.describe_error(error)}; correct it"
            ) from error
        if not isinstance(fields, dict):
            raise ConfigError(f"{where}: is {show(fields)}; return a dict, as a line of JSON")
        return DataRow(where, fields)


KINDS = (".jsonl", ".parquet")
_SLICE = re.compile(r"(.+)\[(-?\d*):(-?\d*)\]", re.DOTALL)
_HUB_NAME = re.compile(r"hf:(?P<name>[^:/]+(/[^:/]+)?)(:(?P<config>[^:/]+))?/(?P<split>[^:/]+)")


def open_rows(*named: Path) -> DataRows:
    """Opens data; rows are checked on access.

    Args:
        named: files, folders, patterns ("data/*.parquet"), programs ("mine.py:Class") and Hugging
            Face sets ("hf:owner/name:config/split"), each optionally with a slice
            ("x.jsonl[100:2000]").

    Raises:
        ConfigError: missing, unreadable or empty, or files that do not fit together.
    """
    parts = [_open(str(name)) for name in named]
    check_types([file for part in parts for file in part.tables])
    return parts[0] if len(parts) == 1 else Joined(parts)


def paths_of(*named: Path) -> list[Path]:
    """Returns the files behind some data; none for a Hugging Face set.

    Raises:
        ConfigError: there are none.
    """
    names = [_divide(str(name))[0] for name in named]
    return [path for name in names if not name.startswith(HUB) for path in _paths(name)]


def facts_of(files: Sequence[Path]) -> dict[str, list[int]]:
    """Returns size and time of change, in ns, of each file that is there, by path."""
    found = {}
    for file in files:
        with suppress(FileNotFoundError, NotADirectoryError):
            facts = patiently(file, file.stat)
            found[str(file)] = [facts.st_size, facts.st_mtime_ns]
    return found


class _PartedRows(DataRows):
    """Rows that are those of other data."""

    def __init__(self, parts: Sequence[DataRows]) -> None:
        super().__init__("")
        self._parts = parts

    def place(self, index: int) -> tuple[DataRows, int]:
        """Returns the part that holds a row, and its index there."""
        raise NotImplementedError

    def __getitem__(self, index: int) -> DataRow:
        part, place = self.place(index)
        return part[place]

    def where(self, index: int) -> str:
        part, place = self.place(index)
        return part.where(place)

    def fetch(self, index: int) -> Callable[[], object] | None:
        part, place = self.place(index)
        return part.fetch(place)

    @property
    def tables(self) -> Sequence[ParquetRows]:
        return [*chain.from_iterable(part.tables for part in self._parts)]


class Joined(_PartedRows):
    """Several sets of rows, one after the other."""

    def __init__(self, parts: Sequence[DataRows]) -> None:
        super().__init__(parts)
        self._starts = array("q", accumulate(map(len, parts), initial=0))

    @property
    def blocks(self) -> Blocks:
        every = [part.blocks for part in self._parts]
        sizes = array("q", (size for each in every for size in each.sizes))
        return Blocks(sizes, min(each.window for each in every))

    def __len__(self) -> int:
        return self._starts[-1]

    def place(self, index: int) -> tuple[DataRows, int]:
        self._check_index(index)
        number = bisect_right(self._starts, index) - 1
        return self._parts[number], index - self._starts[number]


class Sliced(_PartedRows):
    """A contiguous slice of rows."""

    def __init__(self, rows: DataRows, chosen: range) -> None:
        super().__init__([rows])
        self._chosen = chosen

    @property
    def blocks(self) -> Blocks:
        sizes, window = self._parts[0].blocks
        starts = accumulate(sizes, initial=0)
        first, end = self._chosen.start, self._chosen.stop
        inside = (
            min(start + size, end) - max(start, first)
            for start, size in zip(starts, sizes, strict=False)
        )
        return Blocks(array("q", (size for size in inside if size > 0)), window)

    def __len__(self) -> int:
        return len(self._chosen)

    def place(self, index: int) -> tuple[DataRows, int]:
        return self._parts[0], self._chosen[index]


class HubRows(DataRows):
    """A set of the Hugging Face hub, or of its local cache."""

    def __init__(self, name: str) -> None:
        """Downloads it if needed.

        Raises:
            ConfigError: there is no such set, or nothing that could load it.
        """
        super().__init__(name)
        parts = _HUB_NAME.fullmatch(name)
        if not parts:
            raise ConfigError(f"{name}: is no set of the hub; write hf:owner/name:config/split")
        self._dataset = _load(name, parts["name"], parts["config"], parts["split"])

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> DataRow:
        fields = self._dataset[index]
        return DataRow(self.where(index), without_none(fields), given=fields)


def _load(said: str, name: str, config: str | None, split: str) -> "Dataset":
    try:
        import datasets
    except ImportError:
        raise ConfigError(
            f"{said}: needs the library datasets; pip install datasets, or name files of JSON "
            "lines or Parquet"
        ) from None
    try:
        return datasets.load_dataset(name, config, split=split)
    except Exception as error:  # noqa: BLE001 - of a hub, a network, a cache or a loader
        raise ConfigError(
            f"{said}: cannot be loaded: {first_line(error)}; correct the name, load it once where "
            "the hub can be reached (its cache will do), or name files"
        ) from None


def _open(name: str) -> DataRows:
    base, ends = _divide(name)
    rows = _whole(base)
    if not len(rows):
        raise ConfigError(f"{base}: is empty; it has to hold a row or more")
    return Sliced(rows, _chosen(name, ends, len(rows))) if ends else rows


def _whole(name: str) -> DataRows:
    if name.startswith(HUB):
        return HubRows(name)
    if PLACE.fullmatch(name):
        return ProgramRows(name)
    parts = [_file(path) for path in _paths(name)]
    return parts[0] if len(parts) == 1 else Joined(parts)


def _divide(name: str) -> tuple[str, tuple[str, str] | None]:
    """Splits a name from the ends of its slice."""
    found = _SLICE.fullmatch(name)
    if found is None or Path(name).exists():
        return name, None
    return found[1], (found[2], found[3])


def _chosen(name: str, ends: tuple[str, str], count: int) -> range:
    first, end = (int(text) if text not in ("", "-") else None for text in ends)
    chosen = range(count)[first:end]
    outside = any(place is not None and not -count <= place <= count for place in (first, end))
    if outside or not chosen:
        said = "reaches beyond them" if outside else "holds none of them"
        raise ConfigError(f"{name}: there are {count:,} rows, and the slice {said}; correct it")
    return chosen


def _paths(name: str) -> list[Path]:
    path = Path(name.rpartition(":")[0] if PLACE.fullmatch(name) else name)
    if path.is_dir():
        found = sorted(each for each in path.iterdir() if each.suffix in KINDS)
        if not found:
            raise ConfigError(f"{path}: is a folder; name one that holds .jsonl or .parquet files")
        return found
    if any(sign in name for sign in "*?[") and not path.exists():
        found = sorted(Path(path.anchor).glob(str(path.relative_to(path.anchor))))
        if not found:
            raise ConfigError(f"{path}: no file is called so; {REMEDY}")
        return found
    return [path]


def _file(path: Path) -> DataRows:
    return ParquetRows(path) if path.suffix == ".parquet" else JsonLines(path, REMEDY)


def sample(sizes: Sequence[int], count: int) -> list[int]:
    """Chooses `count` rows to check, in order, deterministically.

    Half are the largest, which would be too long first; the others are spread evenly.
    """
    if len(sizes) <= count:
        return list(range(len(sizes)))
    by_size = sorted(range(len(sizes)), key=lambda index: (-sizes[index], index))
    rest, evenly = sorted(by_size[count // 2 :]), count - count // 2
    places = (place * (len(rest) - 1) // (evenly - 1) for place in range(evenly))
    return sorted([*by_size[: count // 2], *(rest[place] for place in places)])


def describe_left_out(
    chosen: Sequence[Sized], every: Sequence[Sized], what: str, before: str
) -> str | None:
    """Says that only `chosen` of the rows of `every` file were checked; None if all were.

    Args:
        what: name of the rows.
        before: what happens only after all were checked.
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


class TaskShare(NamedTuple):
    """A task's part of the rows, and of the work."""

    number: int
    """0 to size - 1."""
    size: int

    def rows(self, num_rows: int) -> range:
        """Returns contiguous rows, so that all tasks together read a file once."""
        first, end = (num_rows * n // self.size for n in (self.number, self.number + 1))
        return range(first, end)


@contextmanager
def naming(key: str) -> Iterator[None]:
    """Adds the key of the job that names the data to errors about them."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from None
