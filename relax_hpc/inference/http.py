"""HTTP to one engine: `Http` for threads, `AsyncHttp` with streams for event loops.

Both fail in one way: an EngineError that names URL and endpoint, an EngineLostError if the engine
gave no answer or failed by itself. Neither uses a site's HTTP proxy, which must not see traffic
between our own nodes.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Self

import httpx

from relax_hpc.errors import EngineError, EngineFaultError, EngineLostError, ends_of

if TYPE_CHECKING:
    import aiohttp

_SHOWN_CHARACTERS = 500
_ABSENT = (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED)


class Closing:
    """Is closed at the end of a `with` block."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Http(Closing):
    """Blocking requests to one engine, for threads."""

    def __init__(self, url: str, token: str, *, timeout_s: float) -> None:
        self.url = url
        self._http = httpx.Client(
            base_url=url, headers=authorization(token), timeout=timeout_s, trust_env=False
        )

    def close(self) -> None:
        self._http.close()

    def ask(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        optional: bool = False,
        timeout_s: float | None = None,
    ) -> Any:  # noqa: ANN401
        """Returns the JSON of a reply; None if it is not JSON, or the endpoint is missing
        (`optional`).

        Raises:
            EngineError: refused.
            EngineLostError: no answer.
        """
        response = self._request(method, path, body, timeout_s)
        if optional and response.status_code in _ABSENT:
            return None
        return parse(f"{self.url}{path}", response.status_code, response.content)

    def status(self, method: str, path: str, *, timeout_s: float | None = None) -> int:
        """Returns the status of a reply, whatever it is.

        Raises:
            EngineLostError: no answer.
        """
        return self._request(method, path, None, timeout_s).status_code

    def _request(
        self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float | None
    ) -> httpx.Response:
        timeout = httpx.USE_CLIENT_DEFAULT if timeout_s is None else timeout_s
        try:
            return self._http.request(method, path, json=body, timeout=timeout)
        except httpx.HTTPError as error:
            raise EngineLostError(f"{self.url}{path}: {error!r}") from error


def parse_version(reply: dict[str, Any]) -> int:
    """Returns `weight_version` of a reply; SGLang has "default" if none was ever set."""
    version = reply["weight_version"]
    return 0 if version == "default" else int(version)


@contextmanager
def reading(asked: str) -> Iterator[None]:
    """Names the request if its reply lacks a field.

    Raises:
        EngineFaultError: another engine, or the same later, may do better.
    """
    try:
        yield
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise EngineFaultError(f"{asked}: a reply that cannot be read: {error!r}") from error


def cut(text: object) -> str:
    """Returns the beginning and the end of an engine's text, for an error message."""
    return ends_of(str(text), _SHOWN_CHARACTERS)


def authorization(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def parse(asked: str, status: int, content: bytes) -> Any:  # noqa: ANN401
    """Returns the JSON of a whole reply (None if it is not JSON); status 200 alone is not
    success."""
    reply = _json(content)
    refused = isinstance(reply, dict) and reply.get("success") is False
    if not HTTPStatus.OK <= status < HTTPStatus.MULTIPLE_CHOICES or refused:
        raise refusal(asked, status, content)
    return reply


def _json(content: bytes) -> Any:  # noqa: ANN401
    try:
        return json.loads(content)
    except ValueError:
        return None


def refusal(asked: str, status: int, content: bytes) -> EngineError:
    """Returns the error for a reply; a failure within the server is an EngineFaultError."""
    reply = _json(content)
    said = reply.get("message") if isinstance(reply, dict) else None
    kind = EngineFaultError if status >= HTTPStatus.INTERNAL_SERVER_ERROR else EngineError
    return kind(f"{asked}: HTTP {status}: {cut(said or content.decode(errors='replace'))}")


_REUSE_S = 2.0
"""Idle connections are dropped before the server drops them (uvicorn: 5 s), to avoid a race."""
_CONNECT_S = 30.0
_CLOSE_S = 5.0
"""Time for connections to close cleanly."""


class AsyncHttp:
    """Requests of an event loop to one engine, thousands at a time."""

    def __init__(self, url: str, token: str, *, silence_s: float) -> None:
        """Connects lazily.

        Args:
            url: "http://host:port".
            silence_s: longest wait until a request is accepted, and then between bytes of the
                reply.
        """
        self.url, self._silence_s = url, silence_s
        self._headers = {**authorization(token), "Content-Type": "application/json"}
        self._session: aiohttp.ClientSession | None = None
        self._waits = set[asyncio.Timeout]()
        self._closed = False

    async def aclose(self) -> None:
        """Cuts all connections: open requests raise EngineLostError."""
        self._closed = True
        for wait in self._waits:  # which do not all end with the session
            if not wait.expired():
                wait.reschedule(asyncio.get_running_loop().time())
        if self._session is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_S):
                    await self._session.close()

    async def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:  # noqa: ANN401
        """Returns the JSON of a reply; None if it is not JSON.

        Raises:
            EngineError: refused.
            EngineLostError: no answer.
        """
        async with aclosing(self.stream(method, path, body)) as pieces:
            content = b"".join([piece async for piece in pieces])
        return parse(f"{self.url}{path}", HTTPStatus.OK, content)

    async def stream(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> AsyncGenerator[bytes, None]:
        """Yields the pieces of a reply as they arrive. Leaving it early cuts the connection.

        Raises:
            EngineError: refused.
            EngineLostError: no answer, or interrupted.
        """
        from aiohttp import ClientError, ConnectionTimeoutError

        asked = f"{self.url}{path}"
        content = None if body is None else json.dumps(body, separators=(",", ":")).encode()
        try:
            async with self._patience():
                request = self._open().request(method, asked, data=content, allow_redirects=False)
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
        """Interrupts the block when it takes too long, or this client is closed."""
        if self._closed:
            raise TimeoutError
        async with asyncio.timeout(self._silence_s) as wait:
            self._waits.add(wait)
            try:
                yield
            finally:
                self._waits.discard(wait)

    def _open(self) -> "aiohttp.ClientSession":
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
