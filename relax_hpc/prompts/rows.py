"""Files of rows, read one at a time: JSON lines or Parquet."""

import json
import os
from array import array
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from relax_hpc.errors import ConfigError


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


def open_rows(path: Path) -> Rows:
    """Opens a file; what is in its rows is looked at when they are asked for.

    Raises:
        ConfigError: missing, unreadable or empty.
    """
    try:
        rows: Rows = ParquetRows(path) if path.suffix == ".parquet" else JsonLines(path)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; name a file of JSON lines or Parquet") from None
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read: {error.strerror or error}; name a file of JSON lines or "
            "Parquet"
        ) from error
    if not len(rows):
        raise ConfigError(f"{path}: is empty; it has to hold a document or more")
    return rows


class JsonLines:
    """One object per line; blank lines do not count. The file stays on disk."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # Not mapped into memory: a file that somebody cuts short would end the process.
        self._file = path.open("rb", buffering=0)
        self._starts, self._sizes, self._numbers = array("q"), array("q"), array("q")
        start = 0
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    self._starts.append(start)
                    self._sizes.append(len(line))
                    self._numbers.append(number)
                start += len(line)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Row:
        where = f"{self._path}, line {self._numbers[index]}"
        line = os.pread(self._file.fileno(), self._sizes[index], self._starts[index])
        try:
            fields = json.loads(line.decode())
        except UnicodeDecodeError:
            raise ConfigError(f"{where}: is not UTF-8 text; JSON lines are expected") from None
        except ValueError as error:
            raise ConfigError(f"{where}: is not JSON: {error}; one object per line") from None
        if not isinstance(fields, dict):
            raise ConfigError(f'{where}: is not an object; write {{"messages": [...]}}')
        return Row(where, fields)


class ParquetRows:
    """A Parquet file, held in memory; fields without a value are left out."""

    def __init__(self, path: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self._path = path
        try:
            self._table = pq.read_table(path, memory_map=False)
        except pa.ArrowInvalid as error:
            raise ConfigError(f"{path}: is not Parquet: {error}; write it again") from None

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: int) -> Row:
        [fields] = self._table.slice(index, 1).to_pylist()
        return Row(f"{self._path}, row {index}", _without_none(fields))


def _without_none(value: Any) -> Any:  # noqa: ANN401
    """Parquet gives every struct all keys that one of them has."""
    if isinstance(value, dict):
        return {key: _without_none(part) for key, part in value.items() if part is not None}
    return [_without_none(part) for part in value] if isinstance(value, list) else value
