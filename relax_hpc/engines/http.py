"""HTTP to one engine, for threads; `async_http` is the same for event loops.

Both fail in one way: an EngineError that names URL and endpoint, an EngineLostError where the
engine gave no answer or failed by itself. Neither heeds a site's HTTP proxy, which must not see
traffic between our own nodes.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any, Self

import httpx

from relax_hpc.errors import EngineError, EngineFaultError, EngineLostError

_SHOWN_CHARACTERS = 500
_ABSENT = (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED)


class Http:
    """Exchanges of threads with one engine."""

    def __init__(self, url: str, token: str, *, timeout_s: float) -> None:
        """Connects lazily.

        Args:
            url: "http://host:port".
            token: bearer token.
            timeout_s: of every exchange.
        """
        self.url = url
        self._http = httpx.Client(
            base_url=url, headers=authorization(token), timeout=timeout_s, trust_env=False
        )

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        optional: bool = False,
        timeout_s: float | None = None,
    ) -> Any:  # noqa: ANN401
        """The JSON of a reply; None if it is not JSON, or there is no such endpoint (`optional`).

        Raises:
            EngineError: refused.
            EngineLostError: no answer.
        """
        response = self._request(method, path, body, timeout_s)
        if optional and response.status_code in _ABSENT:
            return None
        return parsed(f"{self.url}{path}", response.status_code, response.content)

    def status(self, method: str, path: str, *, timeout_s: float | None = None) -> int:
        """The status of a reply, whatever it is.

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
    """`weight_version` of a reply; SGLang says "default" where nobody has named one."""
    version = reply["weight_version"]
    return 0 if version == "default" else int(version)


@contextmanager
def reading(asked: str) -> Iterator[None]:
    """Names who was asked for what where a reply lacks what it should have.

    Raises:
        EngineFaultError: another engine, or the same later, may do better.
    """
    try:
        yield
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise EngineFaultError(f"{asked}: a reply that cannot be read: {error!r}") from error


def cut(text: object) -> str:
    """The beginning of what an engine said, for an error message."""
    return str(text)[:_SHOWN_CHARACTERS]


def authorization(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def parsed(asked: str, status: int, content: bytes) -> Any:  # noqa: ANN401
    """The JSON of a whole reply (None if it is not JSON); status 200 alone is not success."""
    try:
        reply = json.loads(content)
    except ValueError:
        reply = None
    refused = isinstance(reply, dict) and reply.get("success") is False
    if not HTTPStatus.OK <= status < HTTPStatus.MULTIPLE_CHOICES or refused:
        raise refusal(asked, status, content)
    return reply


def refusal(asked: str, status: int, content: bytes) -> EngineError:
    """The error that a reply means; one of the server's own making is an EngineFaultError."""
    try:
        reply = json.loads(content)
    except ValueError:
        reply = None
    said = reply.get("message") if isinstance(reply, dict) else None
    kind = EngineFaultError if status >= HTTPStatus.INTERNAL_SERVER_ERROR else EngineError
    return kind(f"{asked}: HTTP {status}: {cut(said or content.decode(errors='replace'))}")
