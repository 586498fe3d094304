"""An endpoint on the loopback interface, for all episodes of an event loop that want one."""

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from relax_hpc.environments.chat_api.fields import Asked, RefusedError, asked_of
from relax_hpc.environments.chat_api.messages import History
from relax_hpc.environments.chat_api.replies import (
    MODEL,
    Completion,
    completion,
    event,
    events,
    message_of,
)
from relax_hpc.environments.session import Session
from relax_hpc.errors import RelaxError, first_line

if TYPE_CHECKING:
    from aiohttp import web

HEARTBEAT_S = 10.0
"""Time between signs of life in a stream whose reply is not there yet."""
_MOST_BODY_BYTES = 1 << 30
_CLOSE_S = 0.1


class Served:
    """An episode's place at the endpoint."""

    def __init__(self, base_url: str, session: Session) -> None:
        self.base_url, self.api_key = base_url, secrets.token_urlsafe(32)
        self.num_replies = 0
        """Replies that were given."""
        self.is_over = False
        """Whether nothing more is answered."""
        self.session = session
        self._history = History(session.conversation)
        self._turn = asyncio.Lock()
        self._open = set[asyncio.Task[Completion]]()
        self._kept: dict[bytes, tuple[web.Request, asyncio.Task[Completion]]] = {}

    @property
    def is_asked(self) -> bool:
        """Whether an agent waits for a reply."""
        return bool(self._open)

    def ask(self, request: "web.Request", body: bytes, asked: Asked) -> "asyncio.Task[Completion]":
        """The reply to a request.

        One that is sent again since nobody listens to its reply any more, as clients do after a
        timeout, is the same request.
        """
        if body in self._kept:
            before, task = self._kept[body]
            if before.transport is None:
                self._kept[body] = request, task
                return task
        task = asyncio.create_task(self._reply(asked))
        self._open.add(task)
        task.add_done_callback(self._open.discard)
        self._kept[body] = request, task
        return task

    def delivered(self, request: "web.Request", body: bytes) -> None:
        """Forgets a request whose reply was sent to somebody who was there."""
        if request.transport is not None and self._kept.get(body, (None,))[0] is request:
            del self._kept[body]

    async def end(self) -> None:
        """Breaks off what is under way, and answers nothing more."""
        self.is_over = True
        left = [*self._open]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    async def _reply(self, asked: Asked) -> Completion:
        async with self._turn:
            reply = await self.session.chat(
                self._history.of(asked.messages),
                max_new_tokens=asked.max_new_tokens,
                stop=asked.stop,
                tools=asked.tools,
            )
            made = completion(self.num_replies, reply, tools=asked.callable_tools, stop=asked.stop)
            self._history.give_out(reply, message_of(made))
            self.num_replies += 1
        return made


class _Server:
    """Listens while there is an episode."""

    def __init__(self) -> None:
        self._episodes: dict[str, Served] = {}
        self._runner: web.AppRunner | None = None
        self._starting = asyncio.Lock()

    async def enter(self, session: Session) -> Served:
        async with self._starting:
            if self._runner is None:
                self._runner = await self._started()
            host, port = self._runner.addresses[0][:2]
            served = Served(f"http://{host}:{port}/v1", session)
            self._episodes[served.api_key] = served
        return served

    async def leave(self, served: Served) -> None:
        del self._episodes[served.api_key]
        try:
            await served.end()
        finally:
            if not self._episodes and self._runner is not None:
                runner, self._runner = self._runner, None
                await runner.cleanup()

    async def _started(self) -> "web.AppRunner":
        from aiohttp import web

        app = web.Application(client_max_size=_MOST_BODY_BYTES)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/v1/models", self._models)
        app.router.add_route("*", "/{path:.*}", self._nothing)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=_CLOSE_S)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner

    def _episode_of(self, request: "web.Request") -> Served | None:
        kind, _, key = request.headers.get("Authorization", "").partition(" ")
        served = self._episodes.get(key.strip()) if kind.lower() == "bearer" else None
        return None if served is None or served.is_over else served

    async def _models(self, request: "web.Request") -> "web.Response":
        if self._episode_of(request) is None:
            return _unknown_key()
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "relax-hpc"}
        return _json(200, {"object": "list", "data": [model]})

    async def _nothing(self, request: "web.Request") -> "web.Response":
        if self._episode_of(request) is None:
            return _unknown_key()
        there = "POST /v1/chat/completions and GET /v1/models"
        return _error(404, f"{request.method} {request.path}: is not there; use {there}")

    async def _chat(self, request: "web.Request") -> "web.StreamResponse":
        served = self._episode_of(request)
        if served is None:  # nothing of its body is read
            return _unknown_key()
        body = await request.read()
        if served.is_over:  # meanwhile
            return _unknown_key()
        try:
            asked = asked_of(_parsed(body), served.session)
        except RefusedError as error:
            return _error(400, str(error))
        task = served.ask(request, body, asked)
        stream = await _begun(request, task) if asked.is_stream else None
        try:
            made = await asyncio.shield(task)
        except (RefusedError, RelaxError) as error:
            failed = isinstance(error, RelaxError) and served.session.failure is not None
            said = _error(503 if failed else 400, first_line(error))
            return said if stream is None else await _sent(stream, [_event_of(said)])
        finally:
            served.delivered(request, body)
        if not asked.is_stream:
            return _json(200, made)
        if stream is None:
            stream = await _opened(request)
        return await _sent(stream, events(made, with_usage=asked.with_usage))


async def _begun(
    request: "web.Request", task: "asyncio.Task[Completion]"
) -> "web.StreamResponse | None":
    """Waits for a reply, with comments for who listens; None where none was needed."""
    stream = None
    while not (await asyncio.wait([task], timeout=HEARTBEAT_S))[0]:
        stream = stream or await _opened(request)
        await _sent(stream, [b": sampling\n\n"])
    return stream


async def _opened(request: "web.Request") -> "web.StreamResponse":
    from aiohttp import web

    headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
    stream = web.StreamResponse(headers=headers)
    with suppress(ConnectionError):  # who asked has left
        await stream.prepare(request)
    return stream


async def _sent(stream: "web.StreamResponse", pieces: Iterable[bytes]) -> "web.StreamResponse":
    with suppress(ConnectionError):
        for piece in pieces:
            await stream.write(piece)
    return stream


def _parsed(body: bytes) -> object:
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RefusedError(f"the body is no JSON: {first_line(error)}") from None


def _unknown_key() -> "web.Response":
    return _error(401, "the key is of no episode that is under way")


def _error(status: int, message: str) -> "web.Response":
    kind = "invalid_request_error" if status < 500 else "server_error"
    said = {"message": message, "type": kind, "param": None, "code": None}
    return _json(status, {"error": said})


def _event_of(said: "web.Response") -> bytes:
    return event(json.loads(said.body))


def _json(status: int, content: dict[str, Any]) -> "web.Response":
    from aiohttp import web

    return web.json_response(content, status=status)


_SERVERS: "WeakKeyDictionary[asyncio.AbstractEventLoop, _Server]" = WeakKeyDictionary()


@asynccontextmanager
async def serving(session: Session) -> AsyncIterator[Served]:
    """Serves an episode's policy to programs of this node.

    Yields:
        `base_url` and `api_key`, as clients of OpenAI take them. Who has the key asks the session,
        one after another; afterwards it opens nothing any more.
    """
    server = _SERVERS.setdefault(asyncio.get_running_loop(), _Server())
    served = await server.enter(session)
    try:
        yield served
    finally:
        await server.leave(served)
