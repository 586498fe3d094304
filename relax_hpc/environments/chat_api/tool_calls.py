"""Parses tool calls in a policy's text, in the forms of the supported model families.

Qwen (Hermes): `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. Qwen3-Coder:
`<tool_call><function=...><parameter=...>...</parameter></function></tool_call>`. Llama and Mistral:
a reply that is nothing but JSON, `{"name": ..., "parameters": {...}}` or a list of such.
"""

import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from relax_hpc.data import thoughts

Tool = Mapping[str, Any]
_BEGIN = re.compile(r"<tool_call>\s*")
_END = re.compile(r"\s*(?:</tool_call>|\Z)")
_CALL = re.compile(r"(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_FUNCTION = re.compile(r"<function=([^>\n]+)>(.*?)(?:</function>)?", re.DOTALL)
_NAMED = re.compile(r"\s*<function=([^>\n]+)>")
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_OPENED = re.compile(r"\s*<parameter=([^>\n]+)>\n?")
_CLOSE = "</parameter>"
_FOLLOWS = re.compile(r"\s*(?:<parameter=|</function>|</tool_call>|\Z)")
"""Must follow a parameter's end tag; other end tags are text in it."""
_ENDED = re.compile(r"\s*(?:</function>)?\s*(?:</tool_call>|\Z)")
_ARGUMENTS = ("arguments", "parameters")
_JSON = json.JSONDecoder(strict=False)


class ToolCall(NamedTuple):
    name: str
    arguments: dict[str, Any]


class Parsed(NamedTuple):
    content: str
    """The text without the calls."""
    calls: list[ToolCall]


def parse(text: str, tools: Sequence[Tool]) -> Parsed:
    """Takes the calls out of a text; unreadable calls and thoughts stay.

    Args:
        tools: known to the policy, in OpenAI's form. A reply of JSON alone is a call only if one of
            them has the name.
    """
    known = {each.get("name"): each for each in map(_function, tools)}
    if alone := _alone(text, known):
        return Parsed("", alone)
    found = [*_find_calls(text, known)]
    begin = thoughts.strip_thoughts(text, data=[span for span, _ in found]).begin
    if alone := _alone(text[begin:], known):
        return Parsed(text[:begin].strip(), alone)
    rest, done, calls = text[:begin], begin, list[ToolCall]()
    for (start, end), call in found:
        if start >= begin:
            rest, done = rest + text[done:start], end
            calls.append(call)
    return Parsed((rest + text[done:]).strip() if calls else text, calls)


def _find_calls(text: str, known: Mapping[Any, Tool]) -> Iterator[tuple[tuple[int, int], ToolCall]]:
    """Yields the calls between tags, and their places; tags in their arguments are data."""
    place = 0
    while begin := _BEGIN.search(text, place):
        call, place = _read(text, begin.end(), known)
        if call is not None:
            yield (begin.start(), place), call


def _read(text: str, start: int, known: Mapping[Any, Tool]) -> tuple[ToolCall | None, int]:
    """Reads a call that begins there, if possible, and returns where to continue."""
    with contextlib.suppress(ValueError, RecursionError):
        found, place = (
            _JSON.raw_decode(text, start) if text[start : start + 1] == "{" else (None, -1)
        )
        if place >= 0 and (end := _END.match(text, place)):
            return _parse_named(found), end.end()
    if (whole := _parse_tagged_whole(text, start, known)) is not None:
        return whole
    if (match := _NAMED.match(text, start) and _CALL.match(text, start)) is None:
        return None, start
    return _parse_tagged(match[1].strip(), known), match.end()


def _parse_tagged_whole(
    text: str, start: int, known: Mapping[Any, Tool]
) -> tuple[ToolCall, int] | None:
    """Reads a call of nothing but parameters, whose texts may hold any tag, and returns its end."""
    if (function := _NAMED.match(text, start)) is None:
        return None
    said, place = list[tuple[str, str]](), function.end()
    while opened := _OPENED.match(text, place):
        close = text.find(_CLOSE, opened.end())
        while close >= 0 and not _FOLLOWS.match(text, close + len(_CLOSE)):
            close = text.find(_CLOSE, close + 1)
        if close < 0:
            return None
        said.append((opened[1], text[opened.end() : close].removesuffix("\n")))
        place = close + len(_CLOSE)
    if (end := _ENDED.match(text, place)) is None:
        return None
    return _convert_arguments(function[1].strip(), said, known), end.end()


def _function(tool: Tool) -> Tool:
    found = tool.get("function", tool)
    return found if isinstance(found, Mapping) else {}


def _alone(text: str, known: Mapping[Any, Tool]) -> list[ToolCall]:
    """Reads a text that is nothing but calls; empty otherwise."""
    try:
        found = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return []
    calls = list[ToolCall]()
    for each in found if isinstance(found, list) else [found]:
        call = _parse_named(each)
        if call is None or call.name not in known or each.keys().isdisjoint(_ARGUMENTS):
            return []
        calls.append(call)
    return calls


def _parse_named(found: object) -> ToolCall | None:
    name = found.get("name") if isinstance(found, dict) else None
    if not isinstance(found, dict) or not isinstance(name, str) or not name:
        return None
    arguments: object = next((found[key] for key in _ARGUMENTS if key in found), {})
    if isinstance(arguments, str):
        arguments = parse_or_none(arguments)
    return ToolCall(name, arguments) if isinstance(arguments, dict) else None


def _parse_tagged(text: str, known: Mapping[Any, Tool]) -> ToolCall | None:
    """Reads a call whose parameters are text between tags, ignoring other text."""
    if (found := _FUNCTION.fullmatch(text)) is None:
        return None
    return _convert_arguments(found[1].strip(), _PARAMETER.findall(found[2]), known)


def _convert_arguments(
    name: str, said: Iterable[tuple[str, str]], known: Mapping[Any, Tool]
) -> ToolCall:
    """Converts parameters to the types that the tool declares; default is text."""
    schema = known.get(name, {}).get("parameters") or {}
    kinds = schema.get("properties", {}) if isinstance(schema, Mapping) else {}
    texts = {key.strip(): value for key, value in said}
    return ToolCall(name, {key: _value(text, kinds.get(key)) for key, text in texts.items()})


def _value(text: str, schema: object) -> Any:  # noqa: ANN401
    kind = schema.get("type", "string") if isinstance(schema, Mapping) else "string"
    if kind == "string":
        return text
    try:
        return json.loads(text.strip().lower() if kind == "boolean" else text, strict=False)
    except (ValueError, RecursionError):
        return text


def parse_or_none(text: str) -> dict[str, Any] | None:
    """Parses a JSON object; None otherwise. Allows line breaks in strings."""
    try:
        found = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
