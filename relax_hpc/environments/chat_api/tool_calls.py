"""Calls of tools in what a policy says, as Qwen writes them (Hermes):
`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

import json
import re
from typing import Any, NamedTuple

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_THOUGHT = "</think>"


class ToolCall(NamedTuple):
    """A call of a function."""

    name: str
    arguments: dict[str, Any]


class Parsed(NamedTuple):
    """A reply, taken apart."""

    content: str
    """The text without the calls; all of it where there is none."""
    calls: list[ToolCall]


def parse(text: str) -> Parsed:
    """Takes the calls out of a text; what cannot be read as one stays, and so do thoughts."""
    calls = list[ToolCall]()

    def taken(match: re.Match[str]) -> str:
        call = _read(match[1])
        if call is None:
            return match[0]
        calls.append(call)
        return ""

    thought, mark, said = text.rpartition(_THOUGHT)
    rest = _CALL.sub(taken, said)
    return Parsed((thought + mark + rest).strip() if calls else text, calls)


def _read(text: str) -> ToolCall | None:
    found = parsed_or_none(text)
    name = found.get("name") if found else None
    if found is None or not isinstance(name, str) or not name:
        return None
    arguments = found.get("arguments", found.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = parsed_or_none(arguments)
    return ToolCall(name, arguments) if isinstance(arguments, dict) else None


def parsed_or_none(text: str) -> dict[str, Any] | None:
    """The object that a text of JSON is; None of anything else. Line breaks in texts are fine."""
    try:
        found = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
