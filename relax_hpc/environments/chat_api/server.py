"""Serves the chat API on the loopback interface, for all episodes of an event loop."""

import asyncio
import json
import secrets
import socket
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from relax_hpc.environments.chat_api.messages import (
    MODEL,
    BadRequestError,
    ChatRequest,
    Completion,
    History,
    completion,
    event,
    events,
    message_of,
    parse_request,
)
from relax_hpc.environments.session import Session
from relax_hpc.errors import RelaxError, first_line
from relax_hpc.runtime.comm.door import Door, reply

if TYPE_CHECKING:
    from aiohttp import web

HEARTBEAT_S = 10.0
"""Seconds between comments in a stream whose reply is pending."""
_MOST_BODY_BYTES = 1 << 30
_BACKLOG = 1024
_CLOSE_S = 0.1
_UNKNOWN_KEY = "the key is of no episode that is under way"


class Served:
    def __init__(self, base_url: str, session: Session) -> None:
        self.base_url, self.api_key = base_url, secrets.token_urlsafe(32)
        self.num_replies = 0
        self.is_over = False
        self.session = session
        self._history = History(session.conversation)
        self._turn = asyncio.Lock()
        self._open = set[asyncio.Task[Completion]]()
        self._kept: dict[bytes, tuple[web.Request, asyncio.Task[Completion]]] = {}

    @property
    def is_asked(self) -> bool:
        return bool(self._open)

    def ask(
        self, request: "web.Request", body: bytes, asked: ChatRequest
    ) -> "asyncio.Task[Completion]":
        """Returns the task for the reply to a request.

        A client that resends a request after a timeout gets the same task.
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

    def forget(self, request: "web.Request", body: bytes) -> None:
        """Forgets a request whose reply was delivered."""
        if request.transport is not None and self._kept.get(body, (None,))[0] is request:
            del self._kept[body]

    async def end(self) -> None:
        """Cancels pending replies, and answers nothing more."""
        self.is_over = True
        left = [*self._open]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    async def _reply(self, asked: ChatRequest) -> Completion:
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
        self._door: Door | None = None
        self._starting = asyncio.Lock()

    async def enter(self, session: Session) -> Served:
        async with self._starting:
            if self._door is None:
                self._door = await self._start()
            host, port = self._door.address
            served = Served(f"http://{host}:{port}/v1", session)
            self._episodes[served.api_key] = served
        return served

    async def leave(self, served: Served) -> None:
        del self._episodes[served.api_key]
        try:
            await served.end()
        finally:
            if not self._episodes and self._runner is not None and self._door is not None:
                runner, door = self._runner, self._door
                self._runner = self._door = None
                door.close()
                await runner.cleanup()

    async def _start(self) -> Door:
        from aiohttp import web

        app = web.Application(client_max_size=_MOST_BODY_BYTES)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/v1/models", self._models)
        app.router.add_route("*", "/{path:.*}", self._nothing)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=_CLOSE_S)
        await self._runner.setup()
        make = self._runner.server
        assert make is not None, "it was set up"
        refusal = reply(HTTPStatus.UNAUTHORIZED, json.dumps(_make_error(401, _UNKNOWN_KEY)))
        listener = socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG)
        door = Door("chat API", listener, self._admits, refusal)
        door.open(make)
        return door

    def _admits(self, given: bytes) -> bool:
        return self._find_episode(given.decode("latin-1")) is not None

    def _find_episode(self, given: str) -> Served | None:
        """Returns the episode of the key in an Authorization header."""
        kind, _, key = given.partition(" ")
        served = self._episodes.get(key.strip()) if kind.lower() == "bearer" else None
        return None if served is None or served.is_over else served

    def _episode_of(self, request: "web.Request") -> Served | None:
        return self._find_episode(request.headers.get("Authorization", ""))

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
            asked = parse_request(_parse(body), served.session)
        except BadRequestError as error:
            return _error(400, str(error))
        task = served.ask(request, body, asked)
        stream = await _wait_with_comments(request, task) if asked.is_stream else None
        try:
            made = await asyncio.shield(task)
        except (BadRequestError, RelaxError) as error:
            failed = isinstance(error, RelaxError) and served.session.failure is not None
            said = _error(503 if failed else 400, first_line(error))
            return said if stream is None else await _send(stream, [_event_of(said)])
        finally:
            served.forget(request, body)
        if not asked.is_stream:
            return _json(200, made)
        if stream is None:
            stream = await _open_stream(request)
        return await _send(stream, events(made, with_usage=asked.with_usage))


async def _wait_with_comments(
    request: "web.Request", task: "asyncio.Task[Completion]"
) -> "web.StreamResponse | None":
    """Waits for a reply, sending comments to a listening client; None if none was needed."""
    stream = None
    while not (await asyncio.wait([task], timeout=HEARTBEAT_S))[0]:
        stream = stream or await _open_stream(request)
        await _send(stream, [b": sampling\n\n"])
    return stream


async def _open_stream(request: "web.Request") -> "web.StreamResponse":
    from aiohttp import web

    headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
    stream = web.StreamResponse(headers=headers)
    with suppress(ConnectionError):  # who asked has left
        await stream.prepare(request)
    return stream


async def _send(stream: "web.StreamResponse", pieces: Iterable[bytes]) -> "web.StreamResponse":
    with suppress(ConnectionError):
        for piece in pieces:
            await stream.write(piece)
    return stream


def _parse(body: bytes) -> object:
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"the body is no JSON: {first_line(error)}") from None


def _unknown_key() -> "web.Response":
    return _error(401, _UNKNOWN_KEY)


def _error(status: int, message: str) -> "web.Response":
    return _json(status, _make_error(status, message))


def _make_error(status: int, message: str) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


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
        `base_url` and `api_key`, as clients of OpenAI take them. Requests with the key go to the
            session
        one after another; after the block the key is invalid.
    """
    server = _SERVERS.setdefault(asyncio.get_running_loop(), _Server())
    served = await server.enter(session)
    try:
        yield served
    finally:
        await server.leave(served)
