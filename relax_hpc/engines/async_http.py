"""HTTP to one engine for an event loop, with streams; see `http`."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager, suppress
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from relax_hpc.engines.http import authorization, parsed, refusal
from relax_hpc.errors import EngineLostError

if TYPE_CHECKING:
    import aiohttp

_REUSE_S = 2.0
"""Idle connections are dropped before the server does so (uvicorn: 5 s), which is a race."""
_CONNECT_S = 30.0
_CLOSE_S = 5.0
"""Time for connections to end in an orderly way."""


class AsyncHttp:
    """Exchanges of an event loop with one engine, thousands at a time."""

    def __init__(self, url: str, token: str, *, silence_s: float) -> None:
        """Connects lazily.

        Args:
            url: "http://host:port".
            token: bearer token.
            silence_s: longest wait for a request to be taken, and then for the next bytes of the
                reply.
        """
        self.url, self._silence_s = url, silence_s
        self._headers = {**authorization(token), "Content-Type": "application/json"}
        self._session: aiohttp.ClientSession | None = None
        self._waits = set[asyncio.Timeout]()
        """Waits of exchanges under way."""
        self._closed = False

    async def aclose(self) -> None:
        """Cuts all connections: exchanges under way end with an EngineLostError."""
        self._closed = True
        for wait in self._waits:  # which do not all end with the session
            if not wait.expired():
                wait.reschedule(asyncio.get_running_loop().time())
        if self._session is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_S):
                    await self._session.close()

    async def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:  # noqa: ANN401
        """The JSON of a reply; None if it is not JSON.

        Raises:
            EngineError: refused.
            EngineLostError: no answer.
        """
        async with aclosing(self.stream(method, path, body)) as pieces:
            content = b"".join([piece async for piece in pieces])
        return parsed(f"{self.url}{path}", HTTPStatus.OK, content)

    async def stream(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> AsyncGenerator[bytes, None]:
        """The pieces of a reply as they arrive. Leaving it early cuts the connection.

        Raises:
            EngineError: refused.
            EngineLostError: no answer, or it broke off.
        """
        from aiohttp import ClientError, ConnectionTimeoutError

        asked = f"{self.url}{path}"
        content = None if body is None else json.dumps(body, separators=(",", ":")).encode()
        try:
            async with self._patience():
                request = self._opened().request(method, asked, data=content, allow_redirects=False)
                response = await request
            async with response:
                if response.status != HTTPStatus.OK:
                    async with self._patience():
                        said = await response.read()
                    raise refusal(asked, response.status, said)
                while True:
                    async with self._patience():
                        piece = await response.content.readany()
                    if not piece:
                        break
                    yield piece
        except ConnectionTimeoutError:
            raise EngineLostError(f"{asked}: no connection within {_CONNECT_S:g} s") from None
        except TimeoutError:
            why = "this client was closed" if self._closed else f"silent for {self._silence_s:g} s"
            raise EngineLostError(f"{asked}: {why}") from None
        except (ClientError, OSError) as error:
            raise EngineLostError(f"{asked}: {error!r}") from error

    @asynccontextmanager
    async def _patience(self) -> AsyncGenerator[None, None]:
        """Ends what is awaited in the block when it takes too long, or this client is closed."""
        if self._closed:
            raise TimeoutError
        async with asyncio.timeout(self._silence_s) as wait:
            self._waits.add(wait)
            try:
                yield
            finally:
                self._waits.discard(wait)

    def _opened(self) -> "aiohttp.ClientSession":
        if self._session is None:
            import aiohttp

            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_REUSE_S),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers=self._headers,
                skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent"),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
            )
        return self._session
