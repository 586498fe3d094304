"""A row of data -> what is asked, and what is known of it."""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from relax_hpc.config.prompts import TAKEN, PromptsConfig
from relax_hpc.errors import ConfigError, shown
from relax_hpc.media.source import Source
from relax_hpc.prompts.parts import around, is_content, num_markers, shown_in, text_of
from relax_hpc.prompts.rows import Row, is_list_of_objects
from relax_hpc.prompts.template import Message

TEMPLATE_ARGS = "template_args"
_MOST_NAMES = 20
_MISSING = object()


class Record(NamedTuple):
    """A row as a prompt, before it is tokenized."""

    prompt: str | list[Message]
    """Text, or a conversation; with `prompts.user` and `prompts.system`."""
    answer: str
    tools: list[Message] | None = None
    """Tools in the form that chat templates take."""
    source: str = ""
    """Name of the data set that it is from, of several."""
    metadata: Mapping[str, Any] = {}
    """The further fields."""
    template_args: Mapping[str, Any] = {}
    """Arguments of the chat template: the job's, and above them the row's."""
    media: tuple[Source, ...] = ()
    """Images, videos and sounds, by their places in the prompt."""
    num_unfilled: int = 0
    """Markers of media in the text of a row that has none."""

    @property
    def size(self) -> int:
        """Characters of the prompt."""
        if isinstance(self.prompt, str):
            return len(self.prompt)
        return sum(len(text_of(message["content"])) for message in self.prompt)


def read_record(row: Row, settings: PromptsConfig, key: str = "prompts.columns") -> Record:
    """Makes a record of a row.

    Args:
        row: of the data.
        settings: what becomes of it, with the names of its columns.
        key: of the job that says these names, for messages.

    Raises:
        ConfigError: a field is missing or of a wrong type, or the prompt is empty; names file, line
            and field.
    """
    where, fields, columns = row.where, row.fields, settings.columns
    prompt, answer = (
        _needed(row, f"{key}.{name}", getattr(columns, name)) for name in ("prompt", "answer")
    )
    prompt = [*map(_with_content, prompt)] if isinstance(prompt, list) else prompt
    if not (isinstance(prompt, str) or _is_chat(prompt)):
        raise ConfigError(
            f"{where}: {columns.prompt} = {shown(prompt)}: must be text, or messages of role and "
            "content"
        )
    if isinstance(answer, int) and not isinstance(answer, bool):
        answer = str(answer)  # a float has several texts
    if not isinstance(answer, str):
        quoted = f'write "{answer}"' if isinstance(answer, int | float) else "write it as text"
        raise ConfigError(f"{where}: {columns.answer} = {shown(answer)}: must be text; {quoted}")
    tools, source = (_field(fields, name) for name in (columns.tools, columns.source))
    tools = None if tools is _MISSING else tools
    source = "" if source is _MISSING or source is None else source
    if not (tools is None or is_list_of_objects(tools)):
        raise ConfigError(f"{where}: {columns.tools} = {shown(tools)}: must be a list of objects")
    if not isinstance(source, str):
        raise ConfigError(f"{where}: {columns.source} = {shown(source)}: must be text")
    contents = [prompt] if isinstance(prompt, str) else [m["content"] for m in prompt]
    if not any(not isinstance(content, str) or content.strip() for content in contents):
        raise ConfigError(f"{where}: the prompt is empty; write one, or remove the line")
    used = {columns.prompt, columns.answer, columns.tools, columns.source, TEMPLATE_ARGS}
    asked = _asked(prompt, settings)
    found = shown_in(row, as_messages(asked), settings)
    if found:
        asked = found.messages
        used |= {columns.images, columns.videos, columns.audios}
    metadata = {key: value for key, value in fields.items() if key not in used}
    return Record(
        asked,
        answer,
        tools,
        source,
        metadata,
        _template_args(row, settings),
        media=found.media if found else (),
        num_unfilled=0 if found else num_markers(as_messages(asked)),
    )


def as_messages(prompt: str | list[Message]) -> list[Message]:
    """A prompt as a conversation: text is the user's."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)


def nearest(column: str, names: Sequence[str]) -> str:
    """Asks whether the field that is called nearly as a column was meant; "" if there is none."""
    close = difflib.get_close_matches(column, names, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _needed(row: Row, key: str, column: str) -> Any:  # noqa: ANN401
    found = _field(row.fields, column)
    if found is _MISSING and _field(row.given or {}, column) is None:
        raise ConfigError(f"{row.where}: {column} has no value; write one, or remove the row")
    if found is _MISSING:
        names = list(_names(row.fields))
        more = ", ..." if names[_MOST_NAMES:] else ""
        there = ", ".join(names[:_MOST_NAMES]) + more or "nothing"
        raise ConfigError(
            f"{row.where}: has no {column}; it has {there}; set {key} to the field that is the "
            f"{key.rpartition('.')[2]}{nearest(column, names)}"
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


def _asked(prompt: str | list[Message], settings: PromptsConfig) -> str | list[Message]:
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


def _template_args(row: Row, settings: PromptsConfig) -> Mapping[str, Any]:
    given = row.fields.get(TEMPLATE_ARGS)
    given = {} if given is None else given
    if not isinstance(given, dict):
        raise ConfigError(f"{row.where}: {TEMPLATE_ARGS} = {shown(given)}: must be an object")
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
    """Gives a message that has tool calls and no text an empty one."""
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
