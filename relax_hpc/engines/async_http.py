"""HTTP to one engine for an event loop, with streams; see `http`."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
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
            silence_s: longest wait for the next bytes of a reply.
        """
        self.url, self._silence_s = url, silence_s
        self._headers = {**authorization(token), "Content-Type": "application/json"}
        self._session: aiohttp.ClientSession | None = None
        self._answering: set[aiohttp.ClientResponse] = set()
        """Replies that are being read."""
        self._closed = False

    async def aclose(self) -> None:
        """Cuts all connections: exchanges under way end with an EngineLostError."""
        self._closed = True
        for response in self._answering:  # whose readers a session that closes leaves waiting
            response.close()
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
            async with self._opened().request(
                method, asked, data=content, allow_redirects=False
            ) as response:
                self._answering.add(response)
                try:
                    if response.status != HTTPStatus.OK:
                        raise refusal(asked, response.status, await response.read())
                    async for piece in response.content.iter_any():
                        yield piece
                finally:
                    self._answering.discard(response)
        except ConnectionTimeoutError:
            raise EngineLostError(f"{asked}: no connection within {_CONNECT_S:g} s") from None
        except TimeoutError:
            raise EngineLostError(f"{asked}: silent for {self._silence_s:g} s") from None
        except (ClientError, OSError) as error:
            raise EngineLostError(f"{asked}: {error!r}") from error

    def _opened(self) -> "aiohttp.ClientSession":
        if self._closed:
            raise EngineLostError(f"{self.url}: this client was closed")
        if self._session is None:
            import aiohttp

            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_REUSE_S),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers=self._headers,
                skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent"),
                timeout=aiohttp.ClientTimeout(
                    total=None, sock_connect=_CONNECT_S, sock_read=self._silence_s
                ),
            )
        return self._session
