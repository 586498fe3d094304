"""Rows of Parquet files, read by row group."""

from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import accumulate
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

from relax_hpc import user_files
from relax_hpc.errors import ConfigError, first_line
from relax_hpc.prompts.order import Blocks
from relax_hpc.prompts.rows import REMEDY, Row

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

MOST_GROUP_BYTES = 2**27
"""Bytes of a row group in memory, at most."""
MOST_HELD_BYTES = 2**28
"""Bytes of row groups that a process holds, of all files together: those of a window and of the
next one."""
_MOST_WINDOW = 256
_BATCH_ROWS = 1024
_READ_BYTES = 2**20


class Group(NamedTuple):
    """A row group in memory."""

    batches: list["pa.RecordBatch"]
    ends: list[int]
    """Rows up to the end of each batch."""
    num_bytes: int

    def row(self, index: int) -> dict[str, Any]:
        number = bisect_right(self.ends, index)
        batch = self.batches[number]
        place = index - self.ends[number] + batch.num_rows
        columns = zip(batch.schema.names, batch.columns, strict=True)
        return {name: column[place].as_py() for name, column in columns}


class GroupCache:
    """The row groups that were asked for last."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._lock, self._reading = Lock(), Lock()  # threads read, and one group at a time
        self._groups: OrderedDict[tuple[ParquetRows, int], Group] = OrderedDict()

    def get(self, file: "ParquetRows", number: int) -> Group:
        """Returns a row group, read if it is not there."""
        if (held := self.held(file, number)) is not None:
            return held
        with self._reading:
            if (held := self.held(file, number)) is not None:
                return held
            with self._lock:
                self._shrink(self._most_bytes - file.group_bytes[number])
            group = file.read(number)
            with self._lock:
                self._groups[file, number] = group
                self._shrink(self._most_bytes, keep=1)
        return group

    def held(self, file: "ParquetRows", number: int) -> Group | None:
        """Returns a row group that is there; waits for nobody who reads another."""
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


class ParquetRows:
    """A Parquet file; fields without a value are left out."""

    def __init__(self, path: Path) -> None:
        """Reads where the row groups are.

        Raises:
            ConfigError: the file cannot be read, or a row group is too large to be held.
        """
        self.path = path
        user_files.opened(path, REMEDY).close()
        file = _reader(self)
        about = file.metadata
        groups = [about.row_group(number) for number in range(about.num_row_groups)]
        self._sizes = array("q", (group.num_rows for group in groups))
        self._starts = array("q", accumulate(self._sizes, initial=0))
        self.group_bytes = array("q", (group.total_byte_size for group in groups))
        """Bytes of each row group, as the file says."""
        self.types: dict[str, str] = {field.name: _kind(field.type) for field in file.schema_arrow}
        """Column -> what it holds, in words."""
        for number, num_bytes in enumerate(self.group_bytes):
            self._check(number, num_bytes, self._sizes[number])

    @property
    def blocks(self) -> Blocks:
        largest = max(self.group_bytes, default=1)
        return Blocks(self._sizes, min(_MOST_WINDOW, max(1, MOST_GROUP_BYTES // max(1, largest))))

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(f"{index} of {len(self)} rows")
        number = bisect_right(self._starts, index) - 1
        where = self.where(index)
        try:
            fields = _CACHE.get(self, number).row(index - self._starts[number])
        except UnicodeDecodeError:
            raise ConfigError(f"{where}: is not UTF-8 text; write the file again") from None
        return Row(where, without_none(fields), self.path.parent, fields)

    def where(self, index: int) -> str:
        return f"{self.path}, row {index}"

    def fetch(self, index: int) -> Callable[[], object] | None:
        """Gives the function that reads the group of a row; None if that is there."""
        number = bisect_right(self._starts, index) - 1
        return None if _CACHE.held(self, number) else partial(_CACHE.get, self, number)

    def read(self, number: int) -> Group:
        """Reads a row group.

        Raises:
            ConfigError: it is damaged, or too large to be held.
        """
        import pyarrow as pa

        batches, ends, num_bytes = list["pa.RecordBatch"](), list[int](), 0
        try:
            read = _reader(self).iter_batches(_BATCH_ROWS, [number], use_threads=False)
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
        return Group(batches, ends, num_bytes)

    def _check(self, number: int, num_bytes: int, num_rows: int) -> None:
        if num_bytes > MOST_GROUP_BYTES:
            size = max(1, num_rows * MOST_GROUP_BYTES // (num_bytes * 8))
            raise ConfigError(
                f"{self.path}: row group {number} has {num_bytes >> 20} MiB or more in memory, "
                f"{MOST_GROUP_BYTES >> 20} are the most; write the file with smaller ones, e.g. "
                f"pyarrow.parquet.write_table(table, path, row_group_size={size})"
            )


@lru_cache(maxsize=8)  # of a folder of many files not all are open
def _reader(rows: ParquetRows) -> "pq.ParquetFile":
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
    """Refuses files in which a column of the same name holds something else.

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
    """Leaves out fields without a value: Parquet gives every struct all keys that one has."""
    if isinstance(value, dict):
        return {key: without_none(part) for key, part in value.items() if part is not None}
    return [without_none(part) for part in value] if isinstance(value, list) else value
