"""Replies as agents are given them: a chat completion of OpenAI's, or the chunks of a stream."""

import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

from relax_hpc.environments.chat_api.tool_calls import Parsed, Tool, ToolCall, parse
from relax_hpc.environments.session import Reply
from relax_hpc.prompts.template import Message
from relax_hpc.schema import FinishReason

MODEL = "policy"
"""Name of the model, whatever an agent calls it."""

Completion = dict[str, Any]


def completion(
    number: int, reply: Reply, *, tools: Sequence[Tool], stop: Sequence[str] | None
) -> Completion:
    """A reply in OpenAI's form.

    Args:
        number: of the reply in its episode; names of calls are of it, the same in every try.
        reply: of the policy.
        tools: whose calls are told from the text; where there are none it stays one.
        stop: texts that the agent wants a reply to end before; in the conversation they stay.
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
    """The events of a stream that has all of a reply in one chunk."""
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
    """An event of a stream."""
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
