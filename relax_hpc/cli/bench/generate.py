"""Measures the throughput of the generation client against plain load on the same engine.

One engine is asked in three ways, in turns: by a rollout task's client, by plain requests, and by
plain requests with tokens streamed one by one, as SGLang's bench_serving does. All send equally
many prompts of the same lengths, request the same response lengths with logprobs, and keep the same
number in flight. Every trial has its own prompts, so none are cached.
"""

import asyncio
import json
import resource
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from relax_hpc.cli.bench.report import ReportRow
from relax_hpc.cli.bench.shapes import SHAPES, job_of
from relax_hpc.errors import EngineError
from relax_hpc.inference.generation import GenerationClient, Sampling
from relax_hpc.inference.http import AsyncHttp
from relax_hpc.inference.pool import Endpoint, Pool
from relax_hpc.inference.process import start_engine
from relax_hpc.roles.engine.host import EngineSlot, spec_of
from relax_hpc.runtime.files.scratch import scratch_folder

AIM = 0.95
"""Target share of the plain load's tokens per second."""
_TOKEN = secrets.token_hex(16)
_SILENCE_S, _PLAIN_SILENCE_S = 600.0, 3600.0
_VOCABULARY = 100
"""Token ids of prompts are below this: every model has them."""


class TrialLoad(NamedTuple):
    in_flight: int
    num_requests: int
    siblings: int
    """Requests that share a prompt."""
    prompt_tokens: int
    new_tokens: int
    """Mean tokens of a response: half to one and a half times as many."""

    def requests(self, trial: int) -> list[tuple[list[int], int]]:
        """Returns (prompt, response tokens) pairs; all trials have the same lengths."""
        random, lengths = np.random.default_rng(trial), np.random.default_rng(0)
        high = max(self.new_tokens * 3 // 2, 2)
        wanted = lengths.integers(max(self.new_tokens // 2, 1), high, self.num_requests).tolist()
        groups = -(-self.num_requests // self.siblings)
        prompts = random.integers(3, _VOCABULARY, (groups, self.prompt_tokens)).tolist()
        return [(prompts[i // self.siblings], count) for i, count in enumerate(wanted)]


class Trial(NamedTuple):
    """One measurement of one way."""

    way: str
    tokens_per_s: float
    cpu_s: float
    """CPU seconds of this process per 1,000 tokens."""


Requests = Sequence[tuple[list[int], int]]
Way = Callable[[str, str, Requests, int], Coroutine[Any, Any, int]]
"""(engine's URL, its token, requests, in flight) -> received tokens."""
_Post = Callable[[dict[str, Any]], AsyncIterator[bytes]]


def measure(
    shape: str,
    *,
    kind: str,
    load: TrialLoad,
    repeats: int,
    overrides: Sequence[str],
    streamed: bool = True,
    python: str | None = None,
) -> list[Trial]:
    """Starts an engine and measures all ways in turns, each round in another order.

    Args:
        shape: a name of `bench.shapes.SHAPES` (random weights), or a model's folder.
        kind: "sglang" or "embedded"; the latter needs a folder with weights.
        repeats: rounds of all ways.
        overrides: further settings of a job, "engines.rollout.args.mem_fraction_static=0.8".
        streamed: also stream tokens, which takes as long as the others together.
        python: interpreter that has the engine.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    ways: dict[str, Way] = {"ours": _ours, "plain": _whole}
    if streamed:
        ways["streamed"] = _stream
    names = deque(ways)
    with scratch_folder("bench") as scratch:
        args = {"load_format": "dummy"} if kind == "sglang" and shape in SHAPES else {}
        served = {"kind": kind, "max_running_requests": load.in_flight, "args": args}
        tables = {"engines": {"rollout": served}, "schedule": {"num_steps": 1}}
        config = job_of(shape, Path(scratch), tables, overrides, "bench generate")
        with start_engine(
            spec_of(config, EngineSlot("", 0, 0)),
            host="127.0.0.1",
            token=_TOKEN,
            log_path=Path(scratch) / "engine.log",
            python=python,
        ) as engine:
            # As much as a trial, since refills meet kernels that the first requests do not.
            asyncio.run(_ours(engine.url, _TOKEN, load.requests(0), load.in_flight))
            trials, number = [], 0
            for _ in range(repeats):
                for name in names:
                    number += 1
                    trials.append(_take(name, ways[name], engine.url, load, number))
                names.rotate(-1)
            return trials


def rows(trials: Sequence[Trial], load: TrialLoad) -> list[ReportRow]:
    """Compares ours with each of the others: the median of the ratios within a round."""

    def of(way: str) -> list[Trial]:
        return [trial for trial in trials if trial.way == way]

    ours, found = of("ours"), []
    speed = float(np.median([trial.tokens_per_s for trial in ours]))
    for way, said in (("plain", "plain requests"), ("streamed", "plain requests, token by token")):
        if not (theirs := of(way)):
            continue
        pairs = zip(ours, theirs, strict=True)
        ratio = float(np.median([a.tokens_per_s / b.tokens_per_s for a, b in pairs]))
        baseline = float(np.median([trial.tokens_per_s for trial in theirs]))
        name = f"{load.in_flight} in flight"
        found.append(ReportRow(name, speed, "tokens/s", said, baseline, ratio, AIM))
    for way in dict.fromkeys(trial.way for trial in trials):
        cpu_ms = float(np.median([1e3 * trial.cpu_s for trial in of(way)]))
        found.append(ReportRow(f"client's CPU, {way}", cpu_ms, "ms per 1,000 tokens"))
    return found


def _take(name: str, way: Way, url: str, load: TrialLoad, number: int) -> Trial:
    requests = load.requests(number)
    cpu, start = time.process_time(), time.perf_counter()
    tokens = asyncio.run(way(url, _TOKEN, requests, load.in_flight))
    seconds = time.perf_counter() - start
    wanted = sum(count for _, count in requests)
    if tokens != wanted:
        raise EngineError(f"{url}: {name}: asked for {wanted} tokens, got {tokens}")
    return Trial(name, tokens / seconds, 1e3 * (time.process_time() - cpu) / tokens)


async def _ours(url: str, token: str, requests: Requests, in_flight: int) -> int:
    """Requests as a rollout task does; returns the received tokens."""

    def connect(at: Endpoint) -> GenerationClient:
        return GenerationClient(at.url, at.token, silence_s=_SILENCE_S)

    pool = Pool(connect, max_in_flight=in_flight, patience_s=_SILENCE_S)
    pool.enlist({Endpoint("engine", "0", url, token): "serving"})
    async with asyncio.TaskGroup() as group:
        samples = [
            group.create_task(
                pool.sample(
                    prompt,
                    seed,
                    Sampling(1.0, count, ignore_eos=True),
                    homes=(tuple(prompt),),
                )
            )
            for seed, (prompt, count) in enumerate(requests)
        ]
    await pool.aclose()
    return sum(len(sample.result().token_ids) for sample in samples)


async def _whole(url: str, token: str, requests: Requests, in_flight: int) -> int:
    """Requests whole replies; returns the received tokens."""

    async def ask(post: _Post, body: dict[str, Any]) -> int:
        reply = json.loads(b"".join([piece async for piece in post(body)]))
        return len(reply["meta_info"]["output_token_logprobs"])

    return await _plain(url, token, requests, in_flight, ask, stream=False)


async def _stream(url: str, token: str, requests: Requests, in_flight: int) -> int:
    async def ask(post: _Post, body: dict[str, Any]) -> int:
        rest, count = b"", 0
        async for piece in post(body):
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                if line.startswith(b"data: ") and line != b"data: [DONE]":
                    count = json.loads(line[6:])["meta_info"]["completion_tokens"]
        return count

    return await _plain(url, token, requests, in_flight, ask, stream=True)


async def _plain(
    url: str,
    token: str,
    requests: Requests,
    in_flight: int,
    ask: Callable[[_Post, dict[str, Any]], Any],
    *,
    stream: bool,
) -> int:
    """Sends one HTTP request per sample through aiohttp, as SGLang's bench_serving does."""
    room = asyncio.Semaphore(in_flight)

    async def one(post: _Post, prompt: list[int], count: int) -> int:
        sampling = {"temperature": 1.0, "max_new_tokens": count, "ignore_eos": True}
        body = {
            "input_ids": prompt,
            "sampling_params": sampling,
            "return_logprob": True,
            "stream": stream,
        }
        async with room:
            return int(await ask(post, body))

    http = AsyncHttp(url, token, silence_s=_PLAIN_SILENCE_S)

    def post(body: dict[str, Any]) -> AsyncIterator[bytes]:
        return http.stream("POST", "/generate", body)

    counts = await asyncio.gather(*(one(post, prompt, count) for prompt, count in requests))
    await http.aclose()
    return sum(counts)
