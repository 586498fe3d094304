"""Translates chat requests to session messages, and replies to OpenAI's form.

Each request field is obeyed, refused in a line, or irrelevant to tokens. Replies that agents send
back are recognised, and keep their sampled tokens.
"""

import contextlib
import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from relax_hpc.data import thoughts
from relax_hpc.data.conversation import Conversation
from relax_hpc.data.media.kinds import MODALITIES
from relax_hpc.data.template import Message
from relax_hpc.environments.session import Reply, Session
from relax_hpc.errors import show
from relax_hpc.schema import FinishReason

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


_OBEYED = frozenset({
    "max_completion_tokens", "max_tokens", "messages", "stop", "stream", "tool_choice", "tools",
})  # fmt: skip
_CHANGE_NOTHING = frozenset({
    "metadata", "model", "parallel_tool_calls", "prompt_cache_key", "safety_identifier",
    "service_tier", "store", "stream_options", "user",
})  # fmt: skip


class BadRequestError(Exception):
    """A refused request. The message names the field and the remedy."""


class ChatRequest(NamedTuple):
    """The checked fields of a request, without its messages."""

    messages: list[Any]
    tools: list[dict[str, Any]] | None
    """None means the prompt's."""
    callable_tools: list[dict[str, Any]]
    """Tools whose calls are parsed from the text."""
    max_new_tokens: int | None
    stop: list[str] | None
    """Texts that end the reply; None means the run's."""
    is_stream: bool
    with_usage: bool
    """Whether a stream ends with the token counts."""


def parse_request(body: object, session: Session) -> ChatRequest:
    """Checks the fields of a request.

    Args:
        body: the JSON.
        session: of the episode, whose settings the request must match.

    Raises:
        RefusedError: a field cannot be obeyed.
    """
    if not isinstance(body, dict):
        raise BadRequestError("the body is no JSON object; send one")
    fields = {name: value for name, value in body.items() if value is not None}
    _check_settings(fields, _settings(session))
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequestError(f"messages = {show(messages)}: is no list of messages; send some")
    tools = _tools(fields.get("tools"))
    if tools and not session.conversation.reads("tools"):
        raise BadRequestError("tools: the chat template tells the policy of none; leave them out")
    choice = fields.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        raise BadRequestError(
            f"tool_choice = {show(choice)}: nothing forces a call; use auto, none"
        )
    there = session.prompt.tools if tools is None else tools
    return ChatRequest(
        messages,
        tools,
        list(there or []) if choice == "auto" else [],
        _limit(fields),
        _stop(fields.get("stop")),
        _flag(fields, "stream"),
        _with_usage(fields.get("stream_options", {})),
    )


def _settings(session: Session) -> dict[str, Any]:
    """Fields with a fixed value in an episode."""
    how = session.how
    return {
        "temperature": how.temperature,
        "top_p": how.top_p,
        "top_k": how.top_k,
        "chat_template_kwargs": dict(session.prompt.template_args),
        "frequency_penalty": 0,
        "logit_bias": {},
        "logprobs": False,
        "min_p": 0,
        "modalities": ["text"],
        "n": 1,
        "presence_penalty": 0,
        "repetition_penalty": 1,
        "response_format": {"type": "text"},
        "top_logprobs": 0,
    }


def _check_settings(fields: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    for name, value in fields.items():
        if name in _OBEYED or name in _CHANGE_NOTHING:
            continue
        if name not in settings:
            raise BadRequestError(f"{name} = {show(value)}: is not known here; leave it out")
        if value != settings[name]:
            raise BadRequestError(
                f"{name} = {show(value)}: this episode has {show(settings[name])}; leave it out"
            )


def _tools(tools: object) -> list[dict[str, Any]] | None:
    if tools is not None and not (
        isinstance(tools, list)
        and all(
            isinstance(tool, dict)
            and tool.get("type") == "function"
            and isinstance(tool.get("function"), dict)
            for tool in tools
        )
    ):
        raise BadRequestError(
            f"tools = {show(tools)}: is no list of functions; write "
            '[{"type": "function", "function": {...}}]'
        )
    return tools


def _limit(fields: Mapping[str, Any]) -> int | None:
    said = {
        name: fields[name] for name in ("max_completion_tokens", "max_tokens") if name in fields
    }
    for name, value in said.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise BadRequestError(f"{name} = {show(value)}: is no number of tokens; use 1 or more")
    if len(set(said.values())) > 1:
        raise BadRequestError(f"max_tokens and max_completion_tokens differ: {said}; send one")
    return next(iter(said.values()), None)


def _stop(stop: object) -> list[str] | None:
    if stop is None:
        return None
    texts = [stop] if isinstance(stop, str) else stop
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise BadRequestError(f"stop = {show(stop)}: send a text or a list of texts, none empty")
    return texts


def _with_usage(options: object) -> bool:
    if not isinstance(options, dict):
        raise BadRequestError(f"stream_options = {show(options)}: is no object; leave it out")
    return _flag(options, "include_usage")


def _flag(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name, False)
    if not isinstance(value, bool):
        raise BadRequestError(f"{name} = {show(value)}: is neither true nor false")
    return value


_ROLES = ("system", "user", "assistant", "tool")
_SAYS_NOTHING: tuple[object, ...] = (None, "", [], {})


class History:
    """Recognises an episode's replies when an agent sends them back.

    An agent sees the text of a reply, or the calls in it, and sends it back with further messages;
    the session is given the original reply.
    """

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._given_out: dict[str, list[Reply]] = {}

    def give_out(self, reply: Reply, message: Message) -> None:
        """Records the form in which an agent sees a reply."""
        made = self._read("a reply", message)
        self._given_out.setdefault(_form(made), []).append(reply)

    def of(self, sent: Sequence[object]) -> list[Message]:
        """Returns the conversation that an agent sends.

        Raises:
            RefusedError: a message cannot be rendered as it was meant.
        """
        made = list[Message]()
        for number, message in enumerate(sent):
            where = f"messages[{number}]"
            read = self._read(where, message)
            reply = self._reply(read, made)
            if reply is None and "tool_calls" in read:
                self._check_read(where, "tool_calls")
            made.append(read if reply is None else reply.message)
        return made

    def _reply(self, message: Message, before: Sequence[Message]) -> Reply | None:
        """Returns the reply behind a message: the one to the messages before it, or the newest."""
        if message["role"] != "assistant":
            return None
        found = self._given_out.get(_form(message), [])
        same = [reply for reply in found if reply.asked == before]
        return next(reversed(same or found), None)

    def _read(self, where: str, message: object) -> Message:
        if not isinstance(message, dict) or message.get("role") not in _ROLES:
            role = message.get("role") if isinstance(message, dict) else message
            raise BadRequestError(f"{where}.role = {show(role)}: use one of {', '.join(_ROLES)}")
        role, content = message["role"], message.get("content")
        if role == "assistant" and content is None:
            content = ""
        made: Message = {"role": role, "content": _content(where, content)}
        for name, value in message.items():
            if name in made or value in _SAYS_NOTHING or (role, name) == ("tool", "name"):
                continue
            if name == "tool_calls" and role == "assistant":
                made[name] = _tool_calls(where, value)
            elif name == "tool_call_id" and role == "tool":
                made[name] = value
            else:
                self._check_read(where, name)
                made[name] = value
        return made

    def _check_read(self, where: str, name: str) -> None:
        # "name" is in every template that knows tools, and not of messages.
        if name == "name" or not self._conversation.reads(name):
            raise BadRequestError(
                f"{where}.{name}: the chat template does not show it; leave it out"
            )


def _content(where: str, content: object) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise BadRequestError(
            f"{where}.content = {show(content)}: is no text, and no list of parts"
        )
    parts = [_part(f"{where}.content[{number}]", part) for number, part in enumerate(content)]
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _part(where: str, part: object) -> dict[str, Any]:
    match part:
        case {"type": "text", "text": str(text)}:
            return {"type": "text", "text": text}
        case {"type": "image_url", "image_url": {"url": str(url)}} if url.startswith("data:"):
            return {"type": "image", "image": url}
        case {"type": str(kind), **rest} if kind in MODALITIES and not rest:  # as prompts have it
            return {"type": kind}
    raise BadRequestError(f"{where} = {show(part)}: send text, or an image_url that is a data: URL")


def _tool_calls(where: str, calls: object) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise BadRequestError(f"{where}.tool_calls = {show(calls)}: is no list")
    return [_tool_call(f"{where}.tool_calls[{n}]", call) for n, call in enumerate(calls)]


def _tool_call(where: str, call: object) -> dict[str, Any]:
    match call:
        case {"function": {"name": str(name), "arguments": str() | dict() as arguments}, **rest}:
            found = parse_or_none(arguments) if isinstance(arguments, str) else arguments
            made = {"name": name, "arguments": arguments if found is None else found}
            return {"id": rest.get("id"), "type": "function", "function": made}
    raise BadRequestError(f"{where} = {show(call)}: is no call of a function with arguments")


def _form(message: Message) -> str:
    """Returns the words of a message, the same in every form that agents send."""
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return json.dumps(message | {"tool_calls": calls}, sort_keys=True)


MODEL = "policy"
"""Name of the model; an agent's own name is ignored."""

Completion = dict[str, Any]


def completion(
    number: int, reply: Reply, *, tools: Sequence[Tool], stop: Sequence[str] | None
) -> Completion:
    """Returns a reply in OpenAI's form.

    Args:
        number: of the reply in its episode; makes call ids reproducible.
        tools: whose calls are parsed from the text; without any, it stays text.
        stop: texts before which the agent's reply ends; the conversation keeps them.
    """
    text = _before(reply.text, stop or ())
    found = parse(text, tools) if tools else Parsed(text, [])
    given, sampled = len(reply.call.given), len(reply.call.draft.token_ids)
    return {
        "id": f"chatcmpl-{number}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "message": _message(number, found),
                "logprobs": None,
                "finish_reason": _reason(reply, found.calls),
            }
        ],
        "usage": {
            "prompt_tokens": given,
            "completion_tokens": sampled,
            "total_tokens": given + sampled,
        },
    }


def message_of(made: Completion) -> Message:
    message: Message = made["choices"][0]["message"]
    return message


def events(made: Completion, *, with_usage: bool) -> Iterator[bytes]:
    """Returns the events of a stream with the whole reply in one chunk."""
    head = {**made, "object": "chat.completion.chunk"}
    usage = head.pop("usage")
    [choice] = made["choices"]
    delta = dict(choice["message"])
    if calls := delta.get("tool_calls"):
        delta["tool_calls"] = [{"index": n, **call} for n, call in enumerate(calls)]
    rest = {"index": 0, "logprobs": None}
    yield event({**head, "choices": [{**rest, "delta": delta, "finish_reason": None}]})
    end = {**rest, "delta": {}, "finish_reason": choice["finish_reason"]}
    yield event({**head, "choices": [end]})
    if with_usage:
        yield event({**head, "choices": [], "usage": usage})
    yield b"data: [DONE]\n\n"


def event(content: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(content)}\n\n".encode()


def _message(number: int, found: Parsed) -> Message:
    message: Message = {"role": "assistant", "content": found.content}
    if not found.calls:
        return message
    calls = [
        {
            "id": f"call_{number}_{place}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
        }
        for place, call in enumerate(found.calls)
    ]
    return message | {"content": found.content or None, "tool_calls": calls}


def _reason(reply: Reply, calls: Sequence[ToolCall]) -> str:
    if reply.finish is FinishReason.LENGTH:
        return "length"
    return "tool_calls" if calls else "stop"


def _before(text: str, stop: Sequence[str]) -> str:
    places = [place for each in stop if (place := text.find(each)) >= 0]
    return text[: min(places)] if places else text
