"""Messages with media: markers in text, or content in parts, and the media that they show."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from relax_hpc.config.prompts import PromptsConfig
from relax_hpc.errors import ConfigError, shown
from relax_hpc.media.kinds import MODALITIES, Modality
from relax_hpc.media.source import Source, source_of
from relax_hpc.prompts.rows import Row
from relax_hpc.prompts.template import Message

Part = dict[str, Any]
"""{type: text, text}, or {type: image | video | audio}, which may hold the medium itself."""

_MARKER = re.compile(r"<(image|video|audio)>")


class Shown(NamedTuple):
    """Messages, and the media in them, by their places."""

    messages: list[Message]
    media: tuple[Source, ...]


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
    """The text of a content, without its media."""
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content)


def around(content: str | list[Part], text: str) -> str | list[Part]:
    """Puts a content into a text, in the place of {prompt}."""
    if isinstance(content, str):
        return text.replace("{prompt}", content)
    before, *more = text.split("{prompt}")
    found = _texts(before)
    for after in more:
        found += [*content, *_texts(after)]
    return found


def num_markers(messages: Iterable[Message]) -> int:
    """Counts the markers in messages that are text."""
    texts = (m["content"] for m in messages if isinstance(m["content"], str))
    return sum(len(_MARKER.findall(text)) for text in texts)


def shown_in(row: Row, messages: Sequence[Message], settings: PromptsConfig) -> Shown | None:
    """Finds the media of a row, and their places.

    Args:
        row: of the data.
        messages: of its prompt.
        settings: which columns media are in, and the folder of their files.

    Returns:
        None where the row has no media and all contents are text: then markers are text, too.

    Raises:
        ConfigError: there are more or fewer places than media, or one is named in no known way.
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
        made.append(message | {"content": _joined([_plain(part) for part in content])})
    _check_counts(row, columns, placed, settings, rest)
    return Shown(made, tuple(_sources(row, placed, settings)))


def plain(messages: Sequence[Message]) -> list[Message]:
    """Messages as a template takes them: parts say what a medium is, and not which."""
    return [
        message
        if isinstance(message["content"], str)
        else message | {"content": [_plain(part) for part in message["content"]]}
        for message in messages
    ]


def added_by(
    where: str, messages: Sequence[Message], settings: PromptsConfig
) -> tuple[Source, ...]:
    """The media in messages that an environment adds; text is text there, and has no markers.

    Args:
        where: file and line of the prompt, for messages.
        messages: with contents of text, or of parts that hold their media.
        settings: of the job, with the folder of files.

    Raises:
        ConfigError: a part holds no medium, or one is named in no known way.
    """
    placed = [
        (part["type"], part.get(part["type"]))
        for message in messages
        if not isinstance(message["content"], str)
        for part in message["content"]
        if part.get("type") in MODALITIES
    ]
    row = Row(f"{where}, a message of the environment", {})
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


def _values(row: Row, modality: Modality, settings: PromptsConfig) -> list[Any]:
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


def _joined(parts: list[Part]) -> str | list[Part]:
    """Text, where there is no medium among the parts."""
    is_text = all(part["type"] == "text" for part in parts)
    return "".join(part["text"] for part in parts) if is_text else parts


def _check_counts(
    row: Row,
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
    row: Row, placed: Sequence[tuple[Modality, Any]], settings: PromptsConfig
) -> Iterator[Source]:
    folder = settings.media.folder or row.folder
    counts = dict.fromkeys(MODALITIES, 0)
    for modality, value in placed:
        counts[modality] += 1
        place = f"{row.where}: {modality} {counts[modality]}"
        if folder is None and isinstance(value, str) and not _is_whole(value):
            raise ConfigError(
                f"{place} is {shown(value)}: its data are in no folder; set prompts.media.folder"
            )
        inside = settings.media.folder is not None
        base = (folder or Path("/")).absolute()
        yield source_of(place, modality, value, folder=base, inside=inside)


def _is_whole(value: str) -> bool:
    return value.startswith(("/", "data:")) or "://" in value
