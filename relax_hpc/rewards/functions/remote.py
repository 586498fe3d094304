"""Score of a service of yours, asked over HTTP."""

import asyncio
import json
import math
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from relax_hpc.errors import ConfigError, EngineError, first_line
from relax_hpc.rewards.contract import FIELDS, Sample, Score

if TYPE_CHECKING:
    import httpx

MOST_BYTES = 1 << 20
"""Limit of a reply; more is an error."""
CHECK_S = 10.0
"""Time for the service to answer `check`."""
_SHOWN = 200
_WAIT_S, _LONGEST_WAIT_S = 0.1, 5.0
_clients: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient]"
_clients = weakref.WeakKeyDictionary()

Seconds = Annotated[float, Field(gt=0)]


class RefusedError(EngineError):
    """A reply that another try would not change."""


class BusyError(EngineError):
    """A reply, or none, that another try may change."""


async def score(
    sample: Sample,
    *,
    url: str = "",
    timeout_s: Seconds = 3.0,
    retries: Annotated[int, Field(ge=0)] = 3,
    budget_s: Seconds = 9.0,
) -> Score:
    """Asks a service by POST for the score of a sample, whose fields it gets as a JSON object.

    It replies with a number, or with {"score": number, "parts": {name: number}}. A reply of 5xx,
    none in time and a lost connection are tried again, a reply of 4xx is not.

    Args:
        sample: to be scored.
        url: of the service.
        timeout_s: of one try.
        retries: further tries.
        budget_s: of all tries and the pauses between them.

    Raises:
        RefusedError: it refused, or replied with something else.
        BusyError: every try failed.
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
        RefusedError: it is not JSON, has no score, or one that is no finite number.
    """
    try:
        said = json.loads(reply)
    except (ValueError, RecursionError):
        raise RefusedError(f"replied {_shown(reply)}, which is not JSON") from None
    table = said if isinstance(said, Mapping) else {"score": said}
    parts = table.get("parts") or {}
    if "score" not in table or not isinstance(parts, Mapping):
        raise RefusedError(f'replied {_shown(reply)}; let it reply {{"score": number}}')
    return Score(
        _number("score", table["score"]),
        {name: _number(name, part) for name, part in parts.items()},
    )


def check(*, url: str, **_: object) -> None:
    """Checks that somebody answers at `url`, whatever the answer is.

    Raises:
        ConfigError: it is no URL, or nobody does.
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
        raise BusyError(f"replied {response.status_code}: {_shown(content)}")
    if response.status_code != 200:
        raise RefusedError(f"replied {response.status_code}: {_shown(content)}")
    return content


async def _content(pieces: "Callable[[], Any]") -> bytes:
    content = b""
    async for piece in pieces():
        content += piece
        if len(content) > MOST_BYTES:
            raise RefusedError(f"replied more than {MOST_BYTES} bytes")
    return content


def _client() -> "httpx.AsyncClient":
    """Returns the client of this process: connections are kept for the next samples."""
    import httpx

    loop = asyncio.get_running_loop()
    if loop not in _clients:
        _clients[loop] = httpx.AsyncClient(
            timeout=None, limits=httpx.Limits(max_keepalive_connections=64), trust_env=False
        )
    return _clients[loop]


def _number(name: str, given: object) -> float:
    if isinstance(given, bool) or not isinstance(given, int | float):
        raise RefusedError(f"replied {name} = {str(given)[:_SHOWN]!r}, which is no number")
    if not math.isfinite(given):
        raise RefusedError(f"replied {name} = {given}, which is not finite")
    return float(given)


def _shown(content: bytes) -> str:
    return repr(content[:_SHOWN].decode(errors="replace"))
