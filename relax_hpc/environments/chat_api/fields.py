"""Fields of a request: each is obeyed, refused in a line, or changes no token."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from relax_hpc.environments.session import Session
from relax_hpc.errors import shown

_OBEYED = frozenset({
    "max_completion_tokens", "max_tokens", "messages", "stop", "stream", "tool_choice", "tools",
})  # fmt: skip
_CHANGE_NOTHING = frozenset({
    "metadata", "model", "parallel_tool_calls", "prompt_cache_key", "safety_identifier",
    "service_tier", "store", "stream_options", "user",
})  # fmt: skip


class RefusedError(Exception):
    """A request that is not obeyed. The message says which field, and what to do."""


class Asked(NamedTuple):
    """A request, looked through; its messages are not."""

    messages: list[Any]
    tools: list[dict[str, Any]] | None
    """None are those of the prompt."""
    callable_tools: list[dict[str, Any]]
    """Tools whose calls are told from the text."""
    max_new_tokens: int | None
    stop: list[str] | None
    """Texts that end the reply; None are the run's."""
    is_stream: bool
    with_usage: bool
    """Whether a stream ends with the numbers of tokens."""


def asked_of(body: object, session: Session) -> Asked:
    """Looks through the fields of a request.

    Args:
        body: JSON that was sent.
        session: of the episode, whose settings those of the request have to be.

    Raises:
        RefusedError: a field cannot be obeyed.
    """
    if not isinstance(body, dict):
        raise RefusedError("the body is no JSON object; send one")
    fields = {name: value for name, value in body.items() if value is not None}
    _check_settings(fields, _settings(session))
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RefusedError(f"messages = {shown(messages)}: is no list of messages; send some")
    tools = _tools(fields.get("tools"))
    if tools and not session.conversation.reads("tools"):
        raise RefusedError("tools: the chat template tells the policy of none; leave them out")
    choice = fields.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        raise RefusedError(f"tool_choice = {shown(choice)}: nothing forces a call; use auto, none")
    there = session.prompt.tools if tools is None else tools
    return Asked(
        messages,
        tools,
        list(there or []) if choice == "auto" else [],
        _limit(fields),
        _stop(fields.get("stop")),
        _flag(fields, "stream"),
        _with_usage(fields.get("stream_options", {})),
    )


def _settings(session: Session) -> dict[str, Any]:
    """Fields that have one value in an episode."""
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
            raise RefusedError(f"{name} = {shown(value)}: is not known here; leave it out")
        if value != settings[name]:
            raise RefusedError(
                f"{name} = {shown(value)}: this episode has {shown(settings[name])}; leave it out"
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
        raise RefusedError(
            f"tools = {shown(tools)}: is no list of functions; write "
            '[{"type": "function", "function": {...}}]'
        )
    return tools


def _limit(fields: Mapping[str, Any]) -> int | None:
    said = {
        name: fields[name] for name in ("max_completion_tokens", "max_tokens") if name in fields
    }
    for name, value in said.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise RefusedError(f"{name} = {shown(value)}: is no number of tokens; use 1 or more")
    if len(set(said.values())) > 1:
        raise RefusedError(f"max_tokens and max_completion_tokens differ: {said}; send one")
    return next(iter(said.values()), None)


def _stop(stop: object) -> list[str] | None:
    if stop is None:
        return None
    texts = [stop] if isinstance(stop, str) else stop
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise RefusedError(f"stop = {shown(stop)}: send a text or a list of texts, none empty")
    return texts


def _with_usage(options: object) -> bool:
    if not isinstance(options, dict):
        raise RefusedError(f"stream_options = {shown(options)}: is no object; leave it out")
    return _flag(options, "include_usage")


def _flag(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name, False)
    if not isinstance(value, bool):
        raise RefusedError(f"{name} = {shown(value)}: is neither true nor false")
    return value
