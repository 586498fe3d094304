"""Gets the score from your own HTTP service."""

import asyncio
import json
import math
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from relax_hpc.environments.rewards.contract import FIELDS, Sample, Score
from relax_hpc.errors import ConfigError, EngineError, first_line

if TYPE_CHECKING:
    import httpx

MOST_BYTES = 1 << 20
"""Most bytes of a reply; more is an error."""
CHECK_S = 10.0
"""Seconds for the service to answer `check`."""
_SHOWN = 200
_WAIT_S, _LONGEST_WAIT_S = 0.1, 5.0
_clients: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient]"
_clients = weakref.WeakKeyDictionary()

Seconds = Annotated[float, Field(gt=0)]


class RemoteRefusedError(EngineError):
    """A reply that a retry would not change."""


class BusyError(EngineError):
    """A failure that a retry may cure."""


async def score(
    sample: Sample,
    *,
    url: str = "",
    timeout_s: Seconds = 3.0,
    retries: Annotated[int, Field(ge=0)] = 3,
    budget_s: Seconds = 9.0,
) -> Score:
    """POSTs the sample as a JSON object to a service, and returns its score.

    It replies with a number, or with {"score": number, "parts": {name: number}}. Status 5xx,
    timeouts and lost connections are retried; 4xx is not.

    Args:
        timeout_s: of one attempt.
        retries: further attempts.
        budget_s: of all attempts and the pauses between them.

    Raises:
        RefusedError: it refused, or the reply has another form.
        BusyError: every attempt failed.
    """
    from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt
    from tenacity.wait import wait_random_exponential

    body = json.dumps({name: getattr(sample, name) for name in FIELDS}).encode()
    tries = AsyncRetrying(
        retry=retry_if_exception_type(BusyError),
        stop=stop_after_attempt(retries + 1),
        wait=wait_random_exponential(_WAIT_S, _LONGEST_WAIT_S),
        reraise=True,
    )
    lost = "no reply"

    async def once() -> Score:
        nonlocal lost
        try:
            return score_in(await _reply(url, body, timeout_s))
        except BusyError as error:
            lost = str(error)
            raise

    try:
        async with asyncio.timeout(budget_s):
            return await tries(once)
    except TimeoutError:
        raise BusyError(f"url = {url!r}: {lost}; gave up after {budget_s:g} s") from None
    except EngineError as error:
        raise type(error)(f"url = {url!r}: {error}") from None


def score_in(reply: bytes) -> Score:
    """Reads a reply of the service.

    Raises:
        RefusedError: it is not JSON, has no score, or the score is not finite.
    """
    try:
        said = json.loads(reply)
    except (ValueError, RecursionError):
        raise RemoteRefusedError(f"replied {_show(reply)}, which is not JSON") from None
    table = said if isinstance(said, Mapping) else {"score": said}
    parts = table.get("parts") or {}
    if "score" not in table or not isinstance(parts, Mapping):
        raise RemoteRefusedError(f'replied {_show(reply)}; let it reply {{"score": number}}')
    return Score(
        _number("score", table["score"]),
        {name: _number(name, part) for name, part in parts.items()},
    )


def check(*, url: str, **_: object) -> None:
    """Checks that a server answers at `url`, with any answer.

    Raises:
        ConfigError: it is no URL, or nobody answers.
    """
    import httpx

    try:
        parsed = httpx.URL(url)
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise httpx.InvalidURL("it has no http:// and host")
        httpx.head(url, timeout=CHECK_S, trust_env=False)
    except httpx.InvalidURL as error:
        raise ConfigError(
            f'url = {url!r}: is no address ({error}); write "http://HOST:PORT/PATH"'
        ) from None
    except httpx.HTTPError as error:
        raise ConfigError(
            f"url = {url!r}: nobody answers here ({first_line(error)}); start the service, or "
            "correct the address"
        ) from None


async def _reply(url: str, body: bytes, timeout_s: float) -> bytes:
    import httpx

    try:
        async with (
            asyncio.timeout(timeout_s),
            _client().stream(
                "POST", url, content=body, headers={"Content-Type": "application/json"}
            ) as response,
        ):
            content = await _content(response.aiter_bytes)
    except TimeoutError:
        raise BusyError(f"no reply in {timeout_s:g} s") from None
    except httpx.TransportError as error:
        raise BusyError(f"no reply: {first_line(error)}") from None
    if response.status_code >= 500:
        raise BusyError(f"replied {response.status_code}: {_show(content)}")
    if response.status_code != 200:
        raise RemoteRefusedError(f"replied {response.status_code}: {_show(content)}")
    return content


async def _content(pieces: "Callable[[], Any]") -> bytes:
    content = b""
    async for piece in pieces():
        content += piece
        if len(content) > MOST_BYTES:
            raise RemoteRefusedError(f"replied more than {MOST_BYTES} bytes")
    return content


def _client() -> "httpx.AsyncClient":
    """Returns this process's client, which keeps connections open."""
    import httpx

    loop = asyncio.get_running_loop()
    if loop not in _clients:
        _clients[loop] = httpx.AsyncClient(
            timeout=None, limits=httpx.Limits(max_keepalive_connections=64), trust_env=False
        )
    return _clients[loop]


def _number(name: str, given: object) -> float:
    if isinstance(given, bool) or not isinstance(given, int | float):
        raise RemoteRefusedError(f"replied {name} = {str(given)[:_SHOWN]!r}, which is no number")
    if not math.isfinite(given):
        raise RemoteRefusedError(f"replied {name} = {given}, which is not finite")
    return float(given)


def _show(content: bytes) -> str:
    return repr(content[:_SHOWN].decode(errors="replace"))
