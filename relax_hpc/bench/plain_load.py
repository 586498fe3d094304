"""One plain HTTP request per sample, by aiohttp, as SGLang's bench_serving does."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from relax_hpc.engines.async_http import AsyncHttp

_SILENCE_S = 3600.0
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

    http = AsyncHttp(url, token, silence_s=_SILENCE_S)

    def post(body: dict[str, Any]) -> AsyncIterator[bytes]:
        return http.stream("POST", "/generate", body)

    counts = await asyncio.gather(*(one(post, prompt, count) for prompt, count in requests))
    await http.aclose()
    return sum(counts)
