"""A client of our own on h11, which aiohttp replaced: `http_clients` compares them.

Some clients look through all their connections whenever one is taken or given back, which costs
more than the exchange once there are a thousand. Here the idle ones are a stack.
"""

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import h11

from relax_hpc.engines.http import refusal
from relax_hpc.errors import EngineLostError

_READ_BYTES = 1 << 16
_REUSE_S = 2.0
"""Idle connections are dropped before the server does so (uvicorn: 5 s), which is a race."""
_CONNECT_S = 30.0


class Connections:
    """Exchanges with one server; each has a connection of its own while it lasts."""

    def __init__(self, url: str, token: str, *, silence_s: float) -> None:
        """Connects lazily.

        Args:
            url: "http://host:port".
            token: bearer token.
            silence_s: longest wait for the next bytes of a reply.
        """
        parts = urlsplit(url)
        self.url, self._silence_s = url, silence_s
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._headers = [
            ("Host", parts.netloc),
            ("Authorization", f"Bearer {token}"),
            ("Content-Type", "application/json"),
        ]
        self._idle: list[_Connection] = []
        self._busy = set[_Connection]()
        self._closed = False

    def close(self) -> None:
        """Cuts all connections: exchanges under way end with an EngineLostError."""
        self._closed = True
        for connection in [*self._idle, *self._busy]:
            connection.close()
        self._idle.clear()

    async def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """One request and its whole reply: JSON, or None if it is not JSON.

        Raises:
            EngineError: refused.
            EngineLostError: no answer.
        """
        async with aclosing(self.stream(method, path, body)) as pieces:
            content = b"".join([piece async for piece in pieces])
        try:
            return json.loads(content)
        except ValueError:
            return None

    async def stream(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> AsyncGenerator[bytes, None]:
        """The pieces of a reply as they arrive. Leaving it early cuts the connection.

        Raises:
            EngineError: refused.
            EngineLostError: no answer, or it broke off.
        """
        asked = f"{self.url}{path}"
        connection: _Connection | None = None
        try:
            connection, head = await self._begin(method, path, body)
            if head.status_code != HTTPStatus.OK:
                content = b"".join([piece async for piece in connection.pieces(self._silence_s)])
                raise refusal(asked, head.status_code, content)
            async for piece in connection.pieces(self._silence_s):
                yield piece
            self._give_back(connection)
        except TimeoutError:
            raise EngineLostError(f"{asked}: silent for {self._silence_s:g} s") from None
        except (OSError, EOFError, h11.ProtocolError) as error:
            raise EngineLostError(f"{asked}: {error!r}") from error
        finally:
            if connection is not None and connection in self._busy:
                self._drop(connection)

    async def _begin(
        self, method: str, path: str, body: dict[str, Any] | None
    ) -> tuple["_Connection", h11.Response]:
        """Sends a request and waits for the head of its reply."""
        content = b"" if body is None else json.dumps(body, separators=(",", ":")).encode()
        headers = [*self._headers, ("Content-Length", str(len(content)))]
        request = h11.Request(method=method, target=path, headers=headers)
        while True:
            connection = await self._take()
            try:
                return connection, await connection.begin(request, content, self._silence_s)
            except (ConnectionError, EOFError):
                self._drop(connection)
                if not connection.idle_since:  # else the server had just closed it: not our turn
                    raise
            except BaseException:
                self._drop(connection)
                raise

    async def _take(self) -> "_Connection":
        if self._closed:
            raise EOFError("this client was closed")
        while self._idle:
            connection = self._idle.pop()
            if time.monotonic() - connection.idle_since < _REUSE_S and connection.open:
                self._busy.add(connection)
                return connection
            connection.close()
        async with asyncio.timeout(_CONNECT_S):
            connection = _Connection(*await asyncio.open_connection(self._host, self._port))
        self._busy.add(connection)
        return connection

    def _drop(self, connection: "_Connection") -> None:
        self._busy.discard(connection)
        connection.close()

    def _give_back(self, connection: "_Connection") -> None:
        self._busy.discard(connection)
        if not self._closed and connection.start_again():
            self._idle.append(connection)
        else:
            connection.close()


class _Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._http = h11.Connection(h11.CLIENT)
        self.idle_since = 0.0

    @property
    def open(self) -> bool:
        return not self._reader.at_eof() and not self._writer.is_closing()

    def close(self) -> None:
        self._writer.close()

    def start_again(self) -> bool:
        """Makes it ready for another exchange; False if the server does not want one."""
        if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
            return False
        self._http.start_next_cycle()
        self.idle_since = time.monotonic()
        return True

    async def begin(self, request: h11.Request, content: bytes, silence_s: float) -> h11.Response:
        events = (request, h11.Data(data=content), h11.EndOfMessage())
        self._writer.write(b"".join(self._http.send(event) or b"" for event in events))
        await self._writer.drain()
        while not isinstance(event := await self._event(silence_s), h11.Response):
            if not isinstance(event, h11.InformationalResponse):
                raise EOFError("the connection was closed without an answer")
        return event

    async def pieces(self, silence_s: float) -> AsyncGenerator[bytes, None]:
        while not isinstance(event := await self._event(silence_s), h11.EndOfMessage):
            if not isinstance(event, h11.Data):
                raise EOFError("the connection was closed in the middle of an answer")
            yield bytes(event.data)

    async def _event(self, silence_s: float) -> Any:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            async with asyncio.timeout(silence_s):
                self._http.receive_data(await self._reader.read(_READ_BYTES))
        return event
