"""What others send to an engine: one HTTP request per sample, by a general client.

aiohttp where it is installed, which is what SGLang's bench_serving uses; else our own connections,
which cost less than httpx.
"""

import asyncio
import importlib.util
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from relax_hpc.engines.async_http import AsyncHttp

_TIMEOUT_S = 3600.0
Requests = Sequence[tuple[list[int], int]]
Post = Callable[[dict[str, Any]], AsyncIterator[bytes]]


async def whole(url: str, token: str, requests: Requests, in_flight: int) -> int:
    """Replies that come when all tokens are there. Returns how many tokens came."""

    async def ask(post: Post, body: dict[str, Any]) -> int:
        reply = json.loads(b"".join([piece async for piece in post(body)]))
        return len(reply["meta_info"]["output_token_logprobs"])

    return await _all(url, token, requests, in_flight, ask, stream=False)


async def tokens(url: str, token: str, requests: Requests, in_flight: int) -> int:
    """Replies that are streamed as the engine likes, which is token by token."""

    async def ask(post: Post, body: dict[str, Any]) -> int:
        rest, count = b"", 0
        async for piece in post(body):
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                if line.startswith(b"data: ") and line != b"data: [DONE]":
                    count = json.loads(line[6:])["meta_info"]["completion_tokens"]
        return count

    return await _all(url, token, requests, in_flight, ask, stream=True)


async def _all(
    url: str,
    token: str,
    requests: Requests,
    in_flight: int,
    ask: Callable[[Post, dict[str, Any]], Any],
    *,
    stream: bool,
) -> int:
    room = asyncio.Semaphore(in_flight)

    async def one(post: Post, prompt: list[int], count: int) -> int:
        sampling = {"temperature": 1.0, "max_new_tokens": count, "ignore_eos": True}
        body = {
            "input_ids": prompt,
            "sampling_params": sampling,
            "return_logprob": True,
            "stream": stream,
        }
        async with room:
            return int(await ask(post, body))

    async with _CLIENTS[client_name()](f"{url}/generate", token) as post:
        counts = await asyncio.gather(*(one(post, prompt, count) for prompt, count in requests))
    return sum(counts)


@asynccontextmanager
async def _aiohttp(url: str, token: str) -> AsyncIterator[Post]:
    import aiohttp

    async with aiohttp.ClientSession(
        headers={"Authorization": f"Bearer {token}"},
        timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S),
        connector=aiohttp.TCPConnector(limit=0),
        read_bufsize=1 << 20,
    ) as session:

        async def post(body: dict[str, Any]) -> AsyncIterator[bytes]:
            async with session.post(url, json=body) as response:
                response.raise_for_status()
                async for piece in response.content.iter_any():
                    yield piece

        yield post


@asynccontextmanager
async def _asyncio(url: str, token: str) -> AsyncIterator[Post]:
    http = AsyncHttp(url.removesuffix("/generate"), token, silence_s=_TIMEOUT_S)
    yield lambda body: http.stream("POST", "/generate", body)
    await http.aclose()


_CLIENTS: dict[str, Callable[[str, str], AbstractAsyncContextManager[Post]]] = {
    "aiohttp": _aiohttp,
    "asyncio": _asyncio,
}


def client_name() -> str:
    """Which client is used here."""
    return "aiohttp" if importlib.util.find_spec("aiohttp") else "asyncio"
