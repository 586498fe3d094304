"""Messages as agents send them, made into those of a session, with replies as they were sampled."""

import json
from collections.abc import Sequence
from typing import Any

from relax_hpc.environments.chat_api.fields import RefusedError
from relax_hpc.environments.chat_api.tool_calls import parsed_or_none
from relax_hpc.environments.session import Reply
from relax_hpc.errors import shown
from relax_hpc.media.kinds import MODALITIES
from relax_hpc.prompts.conversation import Conversation
from relax_hpc.prompts.template import Message

_ROLES = ("system", "user", "assistant", "tool")
_SAYS_NOTHING: tuple[object, ...] = (None, "", [], {})


class History:
    """The replies of an episode as they were given out, to be known again in what is sent back.

    An agent sees the text of a reply, or the calls in it, and sends it back with further messages;
    the session is given the reply that it was.
    """

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._given_out: dict[str, list[Reply]] = {}

    def give_out(self, reply: Reply, message: Message) -> None:
        """Remembers in which form an agent sees a reply."""
        made = self._read("a reply", message)
        self._given_out.setdefault(_form(made), []).append(reply)

    def of(self, sent: Sequence[object]) -> list[Message]:
        """The conversation that an agent sends.

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
        """The reply that a message is: the one to what is before it, or the newest."""
        if message["role"] != "assistant":
            return None
        found = self._given_out.get(_form(message), [])
        same = [reply for reply in found if reply.asked == before]
        return next(reversed(same or found), None)

    def _read(self, where: str, message: object) -> Message:
        if not isinstance(message, dict) or message.get("role") not in _ROLES:
            role = message.get("role") if isinstance(message, dict) else message
            raise RefusedError(f"{where}.role = {shown(role)}: use one of {', '.join(_ROLES)}")
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
            raise RefusedError(f"{where}.{name}: the chat template does not show it; leave it out")


def _content(where: str, content: object) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise RefusedError(f"{where}.content = {shown(content)}: is no text, and no list of parts")
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
    raise RefusedError(f"{where} = {shown(part)}: send text, or an image_url that is a data: URL")


def _tool_calls(where: str, calls: object) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise RefusedError(f"{where}.tool_calls = {shown(calls)}: is no list")
    return [_tool_call(f"{where}.tool_calls[{n}]", call) for n, call in enumerate(calls)]


def _tool_call(where: str, call: object) -> dict[str, Any]:
    """A call as templates take it, whose arguments are an object."""
    match call:
        case {"function": {"name": str(name), "arguments": str() | dict() as arguments}, **rest}:
            found = parsed_or_none(arguments) if isinstance(arguments, str) else arguments
            made = {"name": name, "arguments": arguments if found is None else found}
            return {"id": rest.get("id"), "type": "function", "function": made}
    raise RefusedError(f"{where} = {shown(call)}: is no call of a function with arguments")


def _form(message: Message) -> str:
    """The words of a message, the same in whichever of its forms an agent sends them."""
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return json.dumps(message | {"tool_calls": calls}, sort_keys=True)
