"""Calls of tools in what a policy says, in the forms of the families that are trained.

Qwen, in text (Hermes): `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. Qwen3-Coder:
`<tool_call><function=...><parameter=...>...</parameter></function></tool_call>`. Llama and Mistral:
a reply that is nothing but JSON, `{"name": ..., "parameters": {...}}` or a list of such.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Tool = Mapping[str, Any]
_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_FUNCTION = re.compile(r"<function=([^>\n]+)>(.*?)(?:</function>)?", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_THOUGHT = "</think>"
_ARGUMENTS = ("arguments", "parameters")


class ToolCall(NamedTuple):
    """A call of a function."""

    name: str
    arguments: dict[str, Any]


class Parsed(NamedTuple):
    """A reply, taken apart."""

    content: str
    """The text without the calls; all of it where there is none."""
    calls: list[ToolCall]


def parse(text: str, tools: Sequence[Tool]) -> Parsed:
    """Takes the calls out of a text; what cannot be read as one stays, and so do thoughts.

    Args:
        text: of the reply.
        tools: that the policy was told of, as OpenAI has them. A reply of JSON alone is a call only
            if one of them has the name.
    """
    calls, known = list[ToolCall](), {each.get("name"): each for each in map(_function, tools)}

    def taken(match: re.Match[str]) -> str:
        call = _named(parsed_or_none(match[1])) or _tagged(match[1].strip(), known)
        if call is None:
            return match[0]
        calls.append(call)
        return ""

    thought, mark, said = text.rpartition(_THOUGHT)
    rest = _CALL.sub(taken, said)
    if not calls and (alone := _alone(said, known)):
        calls, rest = alone, ""
    return Parsed((thought + mark + rest).strip() if calls else text, calls)


def _function(tool: Tool) -> Tool:
    found = tool.get("function", tool)
    return found if isinstance(found, Mapping) else {}


def _alone(text: str, known: Mapping[Any, Tool]) -> list[ToolCall]:
    """The calls that are all of a text; none where it is anything else."""
    try:
        found = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return []
    calls = list[ToolCall]()
    for each in found if isinstance(found, list) else [found]:
        call = _named(each)
        if call is None or call.name not in known or each.keys().isdisjoint(_ARGUMENTS):
            return []
        calls.append(call)
    return calls


def _named(found: object) -> ToolCall | None:
    name = found.get("name") if isinstance(found, dict) else None
    if not isinstance(found, dict) or not isinstance(name, str) or not name:
        return None
    arguments: object = next((found[key] for key in _ARGUMENTS if key in found), {})
    if isinstance(arguments, str):
        arguments = parsed_or_none(arguments)
    return ToolCall(name, arguments) if isinstance(arguments, dict) else None


def _tagged(text: str, known: Mapping[Any, Tool]) -> ToolCall | None:
    """A call whose parameters are text between tags; the tool says which are anything else."""
    if (found := _FUNCTION.fullmatch(text)) is None:
        return None
    name, body = found[1].strip(), found[2]
    schema = known.get(name, {}).get("parameters") or {}
    kinds = schema.get("properties", {}) if isinstance(schema, Mapping) else {}
    said = {key.strip(): value for key, value in _PARAMETER.findall(body)}
    return ToolCall(name, {key: _value(text, kinds.get(key)) for key, text in said.items()})


def _value(text: str, schema: object) -> Any:  # noqa: ANN401
    kind = schema.get("type", "string") if isinstance(schema, Mapping) else "string"
    if kind == "string":
        return text
    try:
        return json.loads(text.strip().lower() if kind == "boolean" else text, strict=False)
    except (ValueError, RecursionError):
        return text


def parsed_or_none(text: str) -> dict[str, Any] | None:
    """The object that a text of JSON is; None of anything else. Line breaks in texts are fine."""
    try:
        found = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
