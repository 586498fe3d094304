"""The rows of a set of data, read one at a time as the job's `prompts` say."""

import asyncio
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, chain
from pathlib import Path

import numpy as np

from relax_hpc.config.prompts import Columns, PromptsConfig, SourceConfig
from relax_hpc.errors import ConfigError, MediumError, shown
from relax_hpc.prompts import rows
from relax_hpc.prompts.files import Joined, fetch, open_rows, paths_of
from relax_hpc.prompts.order import Source, grades_of
from relax_hpc.prompts.record import Record, read_record
from relax_hpc.prompts.rows import Row

MOST_READ = 200_000
"""Rows that are read where a run is submitted."""
_STRETCHES = 64
_SURELY_ALL = 1000
"""Rows at the begin, of which none can be used, after which no further one is read."""


class _AnswerError(ConfigError):
    """No response could ever have the answer."""


class Records:
    """Rows of one or several sources, one after the other.

    Nothing of them is kept: a row is read when it is asked for.
    """

    def __init__(
        self,
        sources: Mapping[str, SourceConfig],
        settings: PromptsConfig,
        *,
        wrong: Callable[[str, str], str] = lambda answer, source: "",
        graded_by: str = "",
        section: str = "prompts",
        title: str = "",
    ) -> None:
        """Opens the files.

        Args:
            sources: of the data, by name.
            settings: what becomes of a row; each source has columns of its own.
            wrong: says of an answer, and the source of its row, why no response could be right, and
                what to do; "" if one could.
            graded_by: field with a number that rows are graded by; "" for none.
            section: of the job that names the sources, for messages.
            title: source of a row that says none, of a source without a name.

        Raises:
            ConfigError: a source cannot be opened.
        """
        self._wrong, self._title = wrong, title
        self._settings = [
            (settings.model_copy(update={"columns": each.columns}), _columns_key(section, name))
            for name, each in sources.items()
        ]
        self.graded_by = graded_by
        self._leaves_out = settings.leaves_out
        self._names = list(sources)
        self.files = [path for each in sources.values() for path in paths_of(*each.path)]
        """Files that are read."""
        opened = [_opened(name, each.path) for name, each in sources.items()]
        self.sources = [
            Source(name, part.blocks, each.weight)
            for name, part, each in zip(self._names, opened, sources.values(), strict=True)
        ]
        """Sources as the order takes them."""
        self._ends = list(accumulate(map(len, opened)))
        self._rows = opened[0] if len(opened) == 1 else Joined(opened)
        self._bad: dict[int, ConfigError] = {}
        self._read, self._sizes = list[range](), array("q")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Record:
        """Raises:
        ConfigError: the row cannot be used.
        """
        row, source = self._rows[index], self._source_of(index)
        record = read_record(row, *self._settings[source])
        if self.graded_by:
            self._value(row)
        if not record.source:
            record = record._replace(source=self._names[source] or self._title)
        if said := self._wrong(record.answer, record.source):
            raise _AnswerError(f"{self.where(index)}: {said}, or remove the line")
        return record

    async def asked(self, index: int) -> Record:
        """Does as `records[index]`; the event loop turns while a file is read."""
        if read := fetch(self._rows, index):
            await asyncio.to_thread(read)
        return self[index]

    def columns(self, index: int) -> tuple[Columns, str]:
        """The names of the columns of a row, and the key of the job that says them."""
        settings, key = self._settings[self._source_of(index)]
        return settings.columns, key

    def has(self, index: int, column: str) -> bool:
        """Whether a row has a field that it may lack; raises as `records[index]`.

        Args:
            index: of the row.
            column: as `prompts.columns` calls it.
        """
        settings, key = self._settings[self._source_of(index)]
        record = read_record(self._rows[index], settings, key)
        media = {f"{source.modality}s" for source in record.media}
        return {"tools": record.tools is not None, "source": bool(record.source)}.get(
            column, column in media
        )

    def _source_of(self, index: int) -> int:
        return bisect_right(self._ends, index)

    def grades(self, rows: Iterable[int]) -> bytes:
        """The grade of each of some rows, among them.

        Raises:
            ConfigError: a row has no number to be graded by.
        """
        values = (self._value(self._rows[row]) for row in rows)
        return grades_of(np.fromiter(values, np.float64))

    def _value(self, row: Row) -> float:
        value = row.fields.get(self.graded_by)
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
            raise ConfigError(
                f"{row.where}: {self.graded_by} = {shown(value)}: must be a number, since "
                "prompts.curriculum names it; correct it, or remove the line"
            )
        return float(value)

    @property
    def bad(self) -> Mapping[int, ConfigError]:
        """Rows of which it is known already that they are skipped, and why."""
        return self._bad

    def where(self, index: int) -> str:
        """File and line, for messages."""
        return self._rows.where(index)

    def read(self) -> None:
        """Reads every row; of very many, stretches that lie evenly.

        Raises:
            ConfigError: one cannot be used, and may not be skipped; says how many there are, unless
                all are so.
        """
        self._read, self._sizes = _stretches(len(self), MOST_READ), array("q")
        num_wrong, first, what = 0, None, "answers"
        for index in chain(*self._read):
            size = 0
            try:
                size = self[index].size
            except ConfigError as error:
                if self._leaves_out(error):
                    self._bad[index] = error
                elif isinstance(error, MediumError):
                    raise
                else:
                    num_wrong, first = num_wrong + 1, first or error
                    what = what if isinstance(error, _AnswerError) else "rows"
            self._sizes.append(size)
            if num_wrong == len(self._sizes) == _SURELY_ALL:
                break
        if first:
            raise ConfigError(f"{first}{_counted(num_wrong, len(self._sizes), what)}")

    def sample(self, count: int) -> list[int]:
        """Chooses as `rows.sample`, of those that were read."""
        read = list(chain(*self._read))
        return [read[place] for place in rows.sample(self._sizes, count)]


def _columns_key(section: str, name: str) -> str:
    return f"{section}.sources.{name}.columns" if name else f"{section}.columns"


def _opened(name: str, paths: Sequence[Path]) -> rows.Rows:
    try:
        return open_rows(*paths)
    except ConfigError as error:
        if not name:
            raise
        raise ConfigError(f"source {name}: {error}") from None


def _counted(num_wrong: int, num_rows: int, what: str) -> str:
    """Says how many rows cannot be used, and what leaves them out where others can."""
    if num_wrong == num_rows:
        return ""
    count, them = f"{num_wrong:,} of {num_rows:,} {what} are so", "them"
    if num_wrong == 1:
        count, them = f"the only one of {num_rows:,}", "it"
    return f' ({count}; prompts.bad_rows = "skip" leaves {them} out)'


def _stretches(count: int, most: int) -> list[range]:
    """Rows to read, no more than `most` of `count`: parts that lie evenly, the ends among them."""
    if count <= most:
        return [range(count)]
    size = most // _STRETCHES
    starts = [(count - size) * n // (_STRETCHES - 1) for n in range(_STRETCHES)]
    return [range(start, start + size) for start in starts]
