"""Reads rows of the data one at a time as prompts with answer, metadata and media, as the job's
`prompts` say.

Media are found by markers in text, or in content in parts.
"""

import asyncio
import math
import re
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from relax_hpc.config.prompts import TAKEN, Columns, PromptsConfig, SourceConfig
from relax_hpc.data import rows
from relax_hpc.data.media.kinds import MODALITIES, Modality
from relax_hpc.data.media.source import MediaSource, source_of
from relax_hpc.data.order import DataSource, grades_of
from relax_hpc.data.rows import DataRow, Joined, is_list_of_objects, open_rows, paths_of
from relax_hpc.data.template import Message
from relax_hpc.errors import ConfigError, MediumError, nearest, show

MOST_READ = 200_000
"""Most rows read at submission."""
_STRETCHES = 64
_SURELY_ALL = 1000
"""If none of this many first rows is usable, no further one is read."""
TEMPLATE_ARGS = "template_args"
_MOST_NAMES = 20
_MISSING = object()


class PromptRecord(NamedTuple):
    """A row as a prompt, before it is tokenized."""

    prompt: str | list[Message]
    """Text, or a conversation; with `prompts.user` and `prompts.system`."""
    answer: str
    tools: list[Message] | None = None
    """In the form that chat templates take."""
    source: str = ""
    """Name of the data set, if there are several."""
    metadata: Mapping[str, Any] = {}
    """The further fields."""
    template_args: Mapping[str, Any] = {}
    """Arguments of the chat template: the job's, overridden by the row's."""
    media: tuple[MediaSource, ...] = ()
    """Images, videos and sounds, by their places in the prompt."""
    num_unfilled: int = 0
    """Media markers in the text of a row without media."""

    @property
    def size(self) -> int:
        if isinstance(self.prompt, str):
            return len(self.prompt)
        return sum(len(text_of(message["content"])) for message in self.prompt)


def read_record(
    row: DataRow, settings: PromptsConfig, key: str = "prompts.columns"
) -> PromptRecord:
    """Makes a record of a row.

    Args:
        settings: how to read it, with the names of its columns.
        key: job key with these names, for messages.

    Raises:
        ConfigError: a field is missing or of a wrong type, or the prompt is empty; names file, line
            and field.
    """
    where, fields, columns = row.where, row.fields, settings.columns
    prompt, answer = (
        _require(row, f"{key}.{name}", getattr(columns, name)) for name in ("prompt", "answer")
    )
    prompt = [*map(_with_content, prompt)] if isinstance(prompt, list) else prompt
    if not (isinstance(prompt, str) or _is_chat(prompt)):
        raise ConfigError(
            f"{where}: {columns.prompt} = {show(prompt)}: must be text, or messages of role and "
            "content"
        )
    said = _text_of_answer(answer)
    if said is None:
        raise ConfigError(
            f"{where}: {columns.answer} = {show(answer)}: must be text, a number or a list of "
            "one; write it as text"
        )
    tools, source = (_field(fields, name) for name in (columns.tools, columns.source))
    tools = None if tools is _MISSING else tools
    source = "" if source is _MISSING or source is None else source
    if not (tools is None or is_list_of_objects(tools)):
        raise ConfigError(f"{where}: {columns.tools} = {show(tools)}: must be a list of objects")
    if not isinstance(source, str):
        raise ConfigError(f"{where}: {columns.source} = {show(source)}: must be text")
    contents = [prompt] if isinstance(prompt, str) else [m["content"] for m in prompt]
    if not any(not isinstance(content, str) or content.strip() for content in contents):
        raise ConfigError(f"{where}: the prompt is empty; write one, or remove the line")
    used = {columns.prompt, columns.answer, columns.tools, columns.source, TEMPLATE_ARGS}
    asked = _make_messages(prompt, settings)
    media: tuple[MediaSource, ...] = ()
    num_unfilled = num_markers(as_messages(asked))
    if found := find_media(row, as_messages(asked), settings):
        (asked, media), num_unfilled = found, 0
        used |= {columns.images, columns.videos, columns.audios}
    metadata = {key: value for key, value in fields.items() if key not in used}
    return PromptRecord(
        asked,
        said,
        tools,
        source,
        metadata,
        _template_args(row, settings),
        media,
        num_unfilled,
    )


def _text_of_answer(answer: Any) -> str | None:  # noqa: ANN401
    """Normalises answers of public sets: 27.0 is 27, ["5"] is 5; None for anything else."""
    if isinstance(answer, list) and len(answer) == 1:
        (answer,) = answer
    if isinstance(answer, float | Decimal) and math.isfinite(answer) and answer == int(answer):
        answer = int(answer)
    if isinstance(answer, int | float | Decimal) and not isinstance(answer, bool):
        return str(answer) if math.isfinite(answer) else None
    return answer if isinstance(answer, str) else None


def as_messages(prompt: str | list[Message]) -> list[Message]:
    """Returns a prompt as a conversation: text is the user's."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)


def _require(row: DataRow, key: str, column: str) -> Any:  # noqa: ANN401
    found = _field(row.fields, column)
    if found is _MISSING and _field(row.given or {}, column) is None:
        raise ConfigError(f"{row.where}: {column} has no value; write one, or remove the row")
    if found is _MISSING:
        names = list(_names(row.fields))
        more = ", ..." if names[_MOST_NAMES:] else ""
        there = ", ".join(names[:_MOST_NAMES]) + more or "nothing"
        close = nearest(column, names)
        raise ConfigError(
            f"{row.where}: has no {column}; it has {there}; set {key} to the field that is the "
            f"{key.rpartition('.')[2]}{close and f'; {close}'}"
        )
    return found


def _field(fields: Mapping[str, Any], column: str) -> Any:  # noqa: ANN401
    if column in fields:
        return fields[column]
    found: Any = fields
    for name in column.split("."):
        if not isinstance(found, Mapping) or name not in found:
            return _MISSING
        found = found[name]
    return found


def _names(fields: Mapping[str, Any]) -> Iterator[str]:
    for key, value in fields.items():
        yield from [f"{key}.{inner}" for inner in value] if isinstance(value, dict) else [key]


def _make_messages(prompt: str | list[Message], settings: PromptsConfig) -> str | list[Message]:
    if isinstance(prompt, str):
        text = settings.user.replace("{prompt}", prompt)
        if not settings.system:
            return text
        messages: list[Message] = [{"role": "user", "content": text}]
    else:
        messages = list(prompt)
        last = max((n for n, each in enumerate(messages) if each["role"] == "user"), default=None)
        if last is not None:
            content = around(messages[last]["content"], settings.user)
            messages[last] = messages[last] | {"content": content}
    has_own = any(message["role"] == "system" for message in messages)
    if settings.system and not has_own:
        messages.insert(0, {"role": "system", "content": settings.system})
    return messages


def _template_args(row: DataRow, settings: PromptsConfig) -> Mapping[str, Any]:
    given = row.fields.get(TEMPLATE_ARGS)
    given = {} if given is None else given
    if not isinstance(given, dict):
        raise ConfigError(f"{row.where}: {TEMPLATE_ARGS} = {show(given)}: must be an object")
    if taken := sorted(TAKEN & given.keys()):
        raise ConfigError(
            f"{row.where}: {TEMPLATE_ARGS}.{taken[0]}: is said by the run itself; remove it"
        )
    if given and not settings.chat_template:
        raise ConfigError(
            f"{row.where}: {TEMPLATE_ARGS} needs prompts.chat_template = true; set it, or remove "
            "the field"
        )
    return {**settings.template_args, **given}


def _with_content(message: object) -> object:
    """Gives a message with tool calls and no text an empty one."""
    if isinstance(message, dict) and message.get("content") is None and message.get("tool_calls"):
        return message | {"content": ""}
    return message


def _is_chat(prompt: object) -> bool:
    return (
        isinstance(prompt, list)
        and len(prompt) > 0
        and all(isinstance(m, dict) and isinstance(m.get("role"), str)
                and is_content(m.get("content")) for m in prompt)
    )  # fmt: skip


Part = dict[str, Any]
"""{type: text, text}, or {type: image | video | audio}, which may hold the medium itself."""

_MARKER = re.compile(r"<(image|video|audio)>")


def is_content(content: object) -> bool:
    """Whether it is text, or parts."""
    return isinstance(content, str) or (
        isinstance(content, list)
        and len(content) > 0
        and all(
            isinstance(part, dict)
            and (isinstance(part.get("text"), str) or part.get("type") in MODALITIES)
            for part in content
        )
    )


def text_of(content: str | Sequence[Part]) -> str:
    """Returns the text of a content, without its media."""
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content)


def around(content: str | list[Part], text: str) -> str | list[Part]:
    """Replaces {prompt} in a text by a content."""
    if isinstance(content, str):
        return text.replace("{prompt}", content)
    before, *more = text.split("{prompt}")
    found = _texts(before)
    for after in more:
        found += [*content, *_texts(after)]
    return found


def num_markers(messages: Iterable[Message]) -> int:
    texts = (m["content"] for m in messages if isinstance(m["content"], str))
    return sum(len(_MARKER.findall(text)) for text in texts)


def find_media(
    row: DataRow, messages: Sequence[Message], settings: PromptsConfig
) -> tuple[list[Message], tuple[MediaSource, ...]] | None:
    """Finds the media of a row, and their places.

    Args:
        settings: the columns of media, and the folder of their files.

    Returns:
        Messages, and their media in order of place; None if the row has no media and all contents
        are text: then markers are text, too.

    Raises:
        ConfigError: the numbers of places and media differ, or a medium is named in an unknown way.
    """
    columns = {modality: _values(row, modality, settings) for modality in MODALITIES}
    if not any(columns.values()) and all(isinstance(m["content"], str) for m in messages):
        return None
    placed: list[tuple[Modality, Any]] = []
    rest = {modality: iter(values) for modality, values in columns.items()}
    made = []
    for message in messages:
        content = _in_parts(message["content"])
        for part in content:
            if part["type"] != "text":
                modality = part["type"]
                value = part.get(modality)
                placed.append((modality, next(rest[modality], None) if value is None else value))
        made.append(message | {"content": _join([_plain(part) for part in content])})
    _check_counts(row, columns, placed, settings, rest)
    return made, tuple(_sources(row, placed, settings))


def plain(messages: Sequence[Message]) -> list[Message]:
    """Returns messages as a template takes them: parts name only the type of a medium."""
    return [
        message
        if isinstance(message["content"], str)
        else message | {"content": [_plain(part) for part in message["content"]]}
        for message in messages
    ]


def find_added_media(
    where: str, messages: Sequence[Message], settings: PromptsConfig
) -> tuple[MediaSource, ...]:
    """Returns the media in messages from an environment, whose text has no markers.

    Args:
        where: file and line of the prompt, for messages.
        messages: contents are text, or parts that hold their media.
        settings: of the job, with the folder of files.

    Raises:
        ConfigError: a part holds no medium, or one is named in an unknown way.
    """
    placed = [
        (part["type"], part.get(part["type"]))
        for message in messages
        if not isinstance(message["content"], str)
        for part in message["content"]
        if part.get("type") in MODALITIES
    ]
    row = DataRow(f"{where}, a message of the environment", {})
    for modality, value in placed:
        if value is None:
            raise ConfigError(
                f"{row.where}: a part of {modality} holds none; write "
                f'{{"type": "{modality}", "{modality}": ...}}, with bytes or a path'
            )
    return tuple(_sources(row, placed, settings))


def _plain(part: Part) -> Part:
    if part.get("type") in MODALITIES:
        return {"type": part["type"]}
    return {"type": "text", "text": part["text"]}


def _values(row: DataRow, modality: Modality, settings: PromptsConfig) -> list[Any]:
    value = row.fields.get(getattr(settings.columns, f"{modality}s"))
    if value is None or value == []:
        return []
    return value if isinstance(value, list) else [value]


def _in_parts(content: str | Sequence[Part]) -> list[Part]:
    if isinstance(content, str):
        return _texts(content, with_markers=True)
    return [part | {"type": part.get("type", "text")} for part in content]


def _texts(text: str, *, with_markers: bool = False) -> list[Part]:
    pieces = _MARKER.split(text) if with_markers else [text]
    parts: list[Part] = []
    for number, piece in enumerate(pieces):  # every second one is what a marker names
        if number % 2:
            parts.append({"type": piece})
        elif piece:
            parts.append({"type": "text", "text": piece})
    return parts


def _join(parts: list[Part]) -> str | list[Part]:
    """Joins parts to text if there is no medium among them."""
    is_text = all(part["type"] == "text" for part in parts)
    return "".join(part["text"] for part in parts) if is_text else parts


def _check_counts(
    row: DataRow,
    columns: Mapping[Modality, Sequence[Any]],
    placed: Sequence[tuple[Modality, Any]],
    settings: PromptsConfig,
    rest: Mapping[Modality, Iterator[Any]],
) -> None:
    for modality, values in columns.items():
        lacking = sum(1 for kind, value in placed if kind == modality and value is None)
        over = sum(1 for _ in rest[modality])
        if not lacking and not over:
            continue
        column = getattr(settings.columns, f"{modality}s")
        places = len(values) + lacking - over
        raise ConfigError(
            f"{row.where}: {column} holds {len(values)}, and the prompt has {places} places for "
            f"them; write <{modality}> where each belongs, e.g. prompts.user = "
            f'"<{modality}>{{prompt}}"'
        )


def _sources(
    row: DataRow, placed: Sequence[tuple[Modality, Any]], settings: PromptsConfig
) -> Iterator[MediaSource]:
    folder = settings.media.advanced.folder or row.folder
    counts = dict.fromkeys(MODALITIES, 0)
    for modality, value in placed:
        counts[modality] += 1
        place = f"{row.where}: {modality} {counts[modality]}"
        if folder is None and isinstance(value, str) and not _is_whole(value):
            raise ConfigError(
                f"{place} is {show(value)}: its data are in no folder; set "
                "prompts.media.advanced.folder"
            )
        inside = settings.media.advanced.folder is not None
        base = (folder or Path("/")).absolute()
        yield source_of(place, modality, value, folder=base, inside=inside)


def _is_whole(value: str) -> bool:
    return value.startswith(("/", "data:")) or "://" in value


class _AnswerError(ConfigError):
    """No response could ever have the answer."""


class Records:
    """Rows of one or several sources, one after the other.

    Nothing is cached: a row is read on access.
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
            sources: of the data, by name, each with its columns.
            settings: how to read a row.
            wrong: explains why an answer, for the row's source, can never be right; "" if it can.
            graded_by: field with the number for a curriculum; "" for none.
            section: job section of the sources, for messages.
            title: source of rows without one, for an unnamed source.

        Raises:
            ConfigError: a source cannot be opened.
        """
        self._wrong, self._title = wrong, title
        self._settings = [
            (
                settings.model_copy(update={"columns": each.columns}),
                f"{section}.sources.{name}.columns" if name else f"{section}.columns",
            )
            for name, each in sources.items()
        ]
        self.graded_by = graded_by
        self._leaves_out = settings.leaves_out
        self._names = list(sources)
        self.files = [path for each in sources.values() for path in paths_of(*each.path)]
        opened = [_open(name, each.path) for name, each in sources.items()]
        self.sources = [
            DataSource(name, part.blocks, each.weight)
            for name, part, each in zip(self._names, opened, sources.values(), strict=True)
        ]
        """In the form the order takes."""
        self._ends = list(accumulate(map(len, opened)))
        self._rows = opened[0] if len(opened) == 1 else Joined(opened)
        self._bad: dict[int, ConfigError] = {}
        self._read, self._sizes = list[range](), array("q")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> PromptRecord:
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

    async def fetch(self, index: int) -> PromptRecord:
        """Returns `records[index]` without blocking the event loop."""
        if read := self._rows.fetch(index):
            await asyncio.to_thread(read)
        return self[index]

    def columns(self, index: int) -> tuple[Columns, str]:
        """Returns the column names of a row, and the job key that sets them."""
        settings, key = self._settings[self._source_of(index)]
        return settings.columns, key

    def has(self, index: int, column: str) -> bool:
        """Whether a row has an optional field; raises as `records[index]`.

        Args:
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
        """Grades some rows relative to each other.

        Raises:
            ConfigError: a row has no number to grade by.
        """
        values = (self._value(self._rows[row]) for row in rows)
        return grades_of(np.fromiter(values, np.float64))

    def _value(self, row: DataRow) -> float:
        value = row.fields.get(self.graded_by)
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
            raise ConfigError(
                f"{row.where}: {self.graded_by} = {show(value)}: must be a number, since "
                "prompts.curriculum names it; correct it, or remove the line"
            )
        return float(value)

    @property
    def bad(self) -> Mapping[int, ConfigError]:
        """Rows already known to be skipped, and why."""
        return self._bad

    def where(self, index: int) -> str:
        return self._rows.where(index)

    def read(self) -> None:
        """Reads every row; evenly spread ranges if there are very many.

        Raises:
            ConfigError: one cannot be used, and may not be skipped; says how many there are, unless
                all are unusable.
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
            raise ConfigError(f"{first}{_count_wrong(num_wrong, len(self._sizes), what)}")

    def sample(self, count: int) -> list[int]:
        """Chooses as `rows.sample`, among the rows read."""
        read = list(chain(*self._read))
        return [read[place] for place in rows.sample(self._sizes, count)]


def _open(name: str, paths: Sequence[Path]) -> rows.DataRows:
    try:
        return open_rows(*paths)
    except ConfigError as error:
        if not name:
            raise
        raise ConfigError(f"source {name}: {error}") from None


def _count_wrong(num_wrong: int, num_rows: int, what: str) -> str:
    """Says how many rows cannot be used, and how to skip them if others can."""
    if num_wrong == num_rows:
        return ""
    count, them = f"{num_wrong:,} of {num_rows:,} {what} are so", "them"
    if num_wrong == 1:
        count, them = f"the only one of {num_rows:,}", "it"
    return f' ({count}; prompts.bad_rows = "skip" leaves {them} out)'


def _stretches(count: int, most: int) -> list[range]:
    """Returns at most `most` of `count` rows: even ranges, both ends included."""
    if count <= most:
        return [range(count)]
    size = most // _STRETCHES
    starts = [(count - size) * n // (_STRETCHES - 1) for n in range(_STRETCHES)]
    return [range(start, start + size) for start in starts]
