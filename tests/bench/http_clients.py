"""CPU time and throughput of HTTP clients that read streams as engines send them, in rounds.

    python tests/bench/http_clients.py [--repeats 5]

A server in a process (and on a core) of its own answers every POST with pieces of 64 tokens.
Clients send the same bytes and throw the same bytes away: what is measured is the client. Where
pieces come one by one, as from an engine, CPU time says what one costs; where the server sends
them as fast as it can, the clock says how many requests come through.
"""

import argparse
import asyncio
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from functools import partial
from urllib.parse import parse_qs, urlsplit

import h11_client
import numpy as np

from relax_hpc.engines.async_http import AsyncHttp

TOKENS_PER_PIECE = 64
IN_FLIGHT = {1: 200, 64: 1024, 1024: 2048}
"""Requests in flight -> requests in all."""
SHORT, LONG = 1, 17
"""Pieces of a reply: the difference is what pieces cost, the rest what a request costs."""
PACE_S = 400e-6
"""Between two pieces of whichever reply: no client is so slow that it reads two at once."""
Stream = Callable[[str, dict[str, object]], Awaitable[int]]
"""(path, body) -> bytes of the reply."""


def _piece(number: int) -> bytes:
    random = np.random.default_rng(number)
    pairs = [
        [round(-float(random.random()), 6), int(random.integers(150_000)), None]
        for _ in range(TOKENS_PER_PIECE)
    ]
    meta = {
        "id": "0" * 32,
        "finish_reason": None,
        "prompt_tokens": 512,
        "completion_tokens": TOKENS_PER_PIECE * (number + 1),
        "weight_version": "3",
        "output_token_logprobs": pairs,
    }
    event = f"data: {json.dumps({'text': '', 'meta_info': meta}, separators=(',', ':'))}\n\n"
    return b"%x\r\n%s\r\n" % (len(event), event.encode())


class _Server(asyncio.Protocol):
    """Keeps its connections, and does as little as it can."""

    pieces = tuple(_piece(number) for number in range(LONG))
    head = (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    )

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport, self.received = transport, b""

    def data_received(self, data: bytes) -> None:
        self.received += data
        head, found, body = self.received.partition(b"\r\n\r\n")
        lines = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
        if not found or len(body) < int(lines[b"content-length"]):
            return
        self.received = b""
        asked = parse_qs(urlsplit(head.split(b" ", 2)[1].decode()).query)
        self.transport.write(self.head)
        self.send(0, int(asked["pieces"][0]), float(asked["pace"][0]))

    def send(self, number: int, count: int, pace_s: float) -> None:
        if number == count:
            self.transport.write(b"0\r\n\r\n")
            return
        self.transport.write(self.pieces[number])
        loop = asyncio.get_running_loop()
        loop.call_later(pace_s, self.send, number + 1, count, pace_s)


async def _serve() -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(_Server, "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


async def _read(
    http: AsyncHttp | h11_client.Connections, path: str, body: dict[str, object]
) -> int:
    size = 0
    async with aclosing(http.stream("POST", path, body)) as pieces:
        async for piece in pieces:
            size += len(piece)
    return size


async def _h11(url: str, run: Callable[[Stream], Awaitable[None]]) -> None:
    http = h11_client.Connections(url, "t", silence_s=60)
    await run(partial(_read, http))
    http.close()


async def _aiohttp(url: str, run: Callable[[Stream], Awaitable[None]]) -> None:
    http = AsyncHttp(url, "t", silence_s=60)
    await run(partial(_read, http))
    await http.aclose()


CLIENTS = {"h11": _h11, "aiohttp": _aiohttp}


async def _round(
    name: str, url: str, in_flight: int, pieces: int, *, paced: bool
) -> tuple[float, float]:
    """Seconds of CPU and of the clock, per request."""
    count = in_flight if paced and in_flight > 64 else IN_FLIGHT[in_flight]
    pace_s = in_flight * PACE_S if paced and in_flight > 1 else 0
    path, body = f"/generate?pieces={pieces}&pace={pace_s}", {"input_ids": list(range(512))}
    expected = sum(len(piece.split(b"\r\n", 1)[1]) - 2 for piece in _Server.pieces[:pieces])
    measured = [0.0, 0.0]

    async def run(stream: Stream) -> None:
        left = iter(range(count))

        async def ask() -> None:
            for _ in left:
                assert await stream(path, body) == expected

        async def at_once() -> None:
            await asyncio.gather(*(ask() for _ in range(in_flight)))

        await asyncio.gather(*(stream(path, body) for _ in range(in_flight)))  # connects
        cpu, clock = time.process_time(), time.perf_counter()
        await at_once()
        measured[:] = time.process_time() - cpu, time.perf_counter() - clock

    await CLIENTS[name](url, run)
    return measured[0] / count, measured[1] / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--serve", action="store_true")
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if options.serve:
        os.sched_setaffinity(0, {cores[-1]})
        asyncio.run(_serve())
    os.sched_setaffinity(0, {cores[0]})
    command = [sys.executable, __file__, "--serve"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout
        url = f"http://127.0.0.1:{int(server.stdout.readline())}"
        try:
            _compare(url, options.repeats)
        finally:
            server.kill()


def _compare(url: str, repeats: int) -> None:
    print("| in flight | what | " + " | ".join(CLIENTS) + " | h11 / aiohttp |")
    print("|---|---|---|---|---|")
    for in_flight in IN_FLIGHT:
        found: dict[str, dict[str, list[float]]] = {}
        for repeat in range(repeats):
            for name in list(CLIENTS)[:: 1 if repeat % 2 else -1]:
                short, _ = asyncio.run(_round(name, url, in_flight, SHORT, paced=True))
                long, _ = asyncio.run(_round(name, url, in_flight, LONG, paced=True))
                cpu, clock = asyncio.run(_round(name, url, in_flight, LONG, paced=False))
                piece = (long - short) / (LONG - SHORT)
                for what, value in {
                    "CPU of a request and its first piece, µs": short * 1e6,
                    "CPU of a further piece, µs": piece * 1e6,
                    f"CPU of a request of {LONG} pieces at full speed, µs": cpu * 1e6,
                    f"clock of a request of {LONG} pieces at full speed, µs": clock * 1e6,
                }.items():
                    found.setdefault(what, {}).setdefault(name, []).append(value)
        for what, by in found.items():
            own, general = by["h11"], by["aiohttp"]
            ratios = sorted(a / b for a, b in zip(own, general, strict=True))
            middle = " | ".join(f"{statistics.median(by[name]):.0f}" for name in CLIENTS)
            low, high = ratios[0], ratios[-1]
            ratio = f"{statistics.median(ratios):.2f} ({low:.2f} to {high:.2f})"
            print(f"| {in_flight} | {what} | {middle} | {ratio} |", flush=True)


if __name__ == "__main__":
    main()
