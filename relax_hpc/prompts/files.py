"""Data as a job names it: files, folders, patterns, a program, a set of a hub, or part of one."""

import re
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from relax_hpc.errors import ConfigError, first_line
from relax_hpc.prompts.order import Blocks
from relax_hpc.prompts.parquet import ParquetRows, check_types, without_none
from relax_hpc.prompts.program import PLACE, ProgramRows
from relax_hpc.prompts.rows import REMEDY, JsonLines, Row, Rows
from relax_hpc.user_files import HUB

if TYPE_CHECKING:
    from datasets import Dataset

KINDS = (".jsonl", ".parquet")
_SLICE = re.compile(r"(.+)\[(-?\d*):(-?\d*)\]", re.DOTALL)
_HUB_NAME = re.compile(r"hf:(?P<name>[^:/]+(/[^:/]+)?)(:(?P<config>[^:/]+))?/(?P<split>[^:/]+)")


def open_rows(*named: Path) -> Rows:
    """Opens data; what is in its rows is looked at when they are asked for.

    Args:
        named: files, folders, patterns ("data/*.parquet"), programs ("mine.py:Class") and sets of
            a hub ("hf:owner/name:config/split"), each maybe with a slice behind it
            ("x.jsonl[100:2000]").

    Raises:
        ConfigError: missing, unreadable or empty, or files that do not fit together.
    """
    parts = [_opened(str(name)) for name in named]
    check_types([file for part in parts for file in _files_of(part)])
    return parts[0] if len(parts) == 1 else Joined(parts)


def paths_of(*named: Path) -> list[Path]:
    """The files that are read for some data; none for a set of a hub.

    Raises:
        ConfigError: there are none.
    """
    names = [_divided(str(name))[0] for name in named]
    return [path for name in names if not name.startswith(HUB) for path in _paths(name)]


def fetch(rows: Rows, index: int) -> Callable[[], object] | None:
    """Gives a function to be called before a row is asked for, in whatever thread, where else the
    caller would wait for storage; None if there is nothing to wait for."""
    if isinstance(rows, Joined | Sliced):
        return fetch(*rows.place(index))
    return rows.fetch(index) if isinstance(rows, ParquetRows) else None


class Joined:
    """Rows of several, one after the other."""

    def __init__(self, parts: Sequence[Rows]) -> None:
        self.parts = parts
        self._starts = array("q", accumulate(map(len, parts), initial=0))

    @property
    def blocks(self) -> Blocks:
        every = [part.blocks for part in self.parts]
        sizes = array("q", (size for each in every for size in each.sizes))
        return Blocks(sizes, min(each.window for each in every))

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> Row:
        part, place = self.place(index)
        return part[place]

    def where(self, index: int) -> str:
        part, place = self.place(index)
        return part.where(place)

    def place(self, index: int) -> tuple[Rows, int]:
        """The part that a row is of, and its place there."""
        if not 0 <= index < len(self):
            raise IndexError(f"{index} of {len(self)} rows")
        number = bisect_right(self._starts, index) - 1
        return self.parts[number], index - self._starts[number]


class Sliced:
    """Some rows that follow each other."""

    def __init__(self, rows: Rows, chosen: range) -> None:
        self.rows, self._chosen = rows, chosen

    @property
    def blocks(self) -> Blocks:
        sizes, window = self.rows.blocks
        starts = accumulate(sizes, initial=0)
        first, end = self._chosen.start, self._chosen.stop
        inside = (
            min(start + size, end) - max(start, first)
            for start, size in zip(starts, sizes, strict=False)
        )
        return Blocks(array("q", (size for size in inside if size > 0)), window)

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, index: int) -> Row:
        return self.rows[self._chosen[index]]

    def where(self, index: int) -> str:
        return self.rows.where(self._chosen[index])

    def place(self, index: int) -> tuple[Rows, int]:
        """The rows that these are some of, and a row's place there."""
        return self.rows, self._chosen[index]


class HubRows:
    """A set of the Hugging Face hub, or of its cache on this machine."""

    def __init__(self, name: str) -> None:
        """Downloads it if it is not there.

        Raises:
            ConfigError: there is no such set, or nothing that could load it.
        """
        self._name = name
        parts = _HUB_NAME.fullmatch(name)
        if not parts:
            raise ConfigError(f"{name}: is no set of the hub; write hf:owner/name:config/split")
        self._dataset = _loaded(name, parts["name"], parts["config"], parts["split"])

    @property
    def blocks(self) -> Blocks:
        return Blocks.even(len(self))

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Row:
        fields = self._dataset[index]
        return Row(self.where(index), without_none(fields), given=fields)

    def where(self, index: int) -> str:
        return f"{self._name}, row {index}"


def _loaded(said: str, name: str, config: str | None, split: str) -> "Dataset":
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


def _opened(name: str) -> Rows:
    base, ends = _divided(name)
    rows = _whole(base)
    if not len(rows):
        raise ConfigError(f"{base}: is empty; it has to hold a row or more")
    return Sliced(rows, _chosen(name, ends, len(rows))) if ends else rows


def _whole(name: str) -> Rows:
    if name.startswith(HUB):
        return HubRows(name)
    if PLACE.fullmatch(name):
        return ProgramRows(name)
    parts = [_file(path) for path in _paths(name)]
    return parts[0] if len(parts) == 1 else Joined(parts)


def _divided(name: str) -> tuple[str, tuple[str, str] | None]:
    """A name, and the ends of the slice behind it."""
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


def _file(path: Path) -> Rows:
    return ParquetRows(path) if path.suffix == ".parquet" else JsonLines(path, REMEDY)


def _files_of(rows: Rows) -> Iterator[ParquetRows]:
    if isinstance(rows, Joined):
        for part in rows.parts:
            yield from _files_of(part)
    elif isinstance(rows, Sliced):
        yield from _files_of(rows.rows)
    elif isinstance(rows, ParquetRows):
        yield rows
