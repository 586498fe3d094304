"""Throughput of the generation client against plain load on the same engine.

One engine, and three ways to ask it, in turns: the client of a rollout task, plain requests, and
plain requests whose tokens are streamed one by one, which is how SGLang's bench_serving asks. All
send the same number of prompts of the same lengths, want the same lengths back, and logprobs, and
keep the same number in flight. Every trial has prompts of its own, so nobody finds them cached.
"""

import asyncio
import resource
import secrets
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from relax_hpc.bench import plain_load
from relax_hpc.bench.report import Row
from relax_hpc.bench.shapes import SHAPES, model_folder
from relax_hpc.config.run import RunConfig
from relax_hpc.engines.generation import GenerationClient
from relax_hpc.engines.pool import Pool
from relax_hpc.engines.pool_engine import Endpoint
from relax_hpc.engines.process import start_engine
from relax_hpc.engines.response import Sampling
from relax_hpc.errors import EngineError
from relax_hpc.job_file import with_overrides
from relax_hpc.roles.engine.hosting import Slot, spec_of
from relax_hpc.scratch import scratch_folder

AIM = 0.95
"""Share of the plain load's tokens per second."""
_TOKEN = secrets.token_hex(16)
_SILENCE_S = 600.0
_VOCABULARY = 100
"""Token ids of prompts are below: every model has them."""


class Load(NamedTuple):
    """The requests of a trial."""

    in_flight: int
    num_requests: int
    siblings: int
    """Requests that share a prompt."""
    prompt_tokens: int
    new_tokens: int
    """Tokens of a response on average: half to one and a half times as many."""

    def requests(self, trial: int) -> list[tuple[list[int], int]]:
        """(prompt, response tokens) of a trial; lengths are those of every trial."""
        random, lengths = np.random.default_rng(trial), np.random.default_rng(0)
        high = max(self.new_tokens * 3 // 2, 2)
        wanted = lengths.integers(max(self.new_tokens // 2, 1), high, self.num_requests).tolist()
        groups = -(-self.num_requests // self.siblings)
        prompts = random.integers(3, _VOCABULARY, (groups, self.prompt_tokens)).tolist()
        return [(prompts[i // self.siblings], count) for i, count in enumerate(wanted)]


class Trial(NamedTuple):
    """One measurement of one way of asking."""

    way: str
    tokens_per_s: float
    cpu_s: float
    """Seconds of this process, per 1,000 tokens."""


Requests = Sequence[tuple[list[int], int]]
Way = Callable[[str, str, Requests, int], Coroutine[Any, Any, int]]
"""(engine's URL, its token, requests, in flight) -> tokens that came."""


def measure(
    shape: str,
    *,
    kind: str,
    load: Load,
    repeats: int,
    overrides: Sequence[str],
    streamed: bool = True,
    python: str | None = None,
) -> list[Trial]:
    """Starts an engine and lets all ways take turns, each round in another order.

    Args:
        shape: a name of `bench.shapes.SHAPES` (random weights), or a model's folder.
        kind: "sglang" or "embedded"; the latter needs a folder with weights.
        load: what to ask.
        repeats: rounds of all ways.
        overrides: further settings of a job, "engines.rollout.args.mem_fraction_static=0.8".
        streamed: also ask token by token, which takes as long as the others together.
        python: interpreter that has the engine.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    ways: dict[str, Way] = {"ours": _ours, "plain": plain_load.whole}
    if streamed:
        ways["streamed"] = plain_load.tokens
    names = deque(ways)
    with scratch_folder("bench") as scratch:
        config = _config(shape, kind, load.in_flight, Path(scratch), overrides)
        with start_engine(
            spec_of(config, Slot("", 0, 0)),
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


def rows(trials: Sequence[Trial], load: Load) -> list[Row]:
    """Ours against each of the others: the median of the ratios within a round."""

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
        found.append(Row(name, speed, "tokens/s", said, baseline, ratio, AIM))
    for way in dict.fromkeys(trial.way for trial in trials):
        cpu_ms = float(np.median([1e3 * trial.cpu_s for trial in of(way)]))
        found.append(Row(f"client's CPU, {way}", cpu_ms, "ms per 1,000 tokens"))
    return found


def _take(name: str, way: Way, url: str, load: Load, number: int) -> Trial:
    requests = load.requests(number)
    cpu, start = time.process_time(), time.perf_counter()
    tokens = asyncio.run(way(url, _TOKEN, requests, load.in_flight))
    seconds = time.perf_counter() - start
    wanted = sum(count for _, count in requests)
    if tokens != wanted:
        raise EngineError(f"{url}: {name}: asked for {wanted} tokens, got {tokens}")
    return Trial(name, tokens / seconds, 1e3 * (time.process_time() - cpu) / tokens)


async def _ours(url: str, token: str, requests: Requests, in_flight: int) -> int:
    """Asks as a rollout task does, and counts the tokens that came."""

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


def _config(
    shape: str, kind: str, in_flight: int, scratch: Path, overrides: Sequence[str]
) -> RunConfig:
    import torch

    args: dict[str, Any] = {}
    if kind == "sglang" and shape in SHAPES:
        args = {"load_format": "dummy"}
    tree = {
        "name": "bench",
        "model": {
            "path": str(model_folder(shape, scratch)),
            "dtype": "bfloat16" if torch.cuda.is_available() else "float32",
        },
        "prompts": {"train": "unused"},
        "engines": {"rollout": {"kind": kind, "max_running_requests": in_flight, "args": args}},
        "schedule": {"num_steps": 1},
    }
    config = with_overrides(tree, overrides, source="bench generate")
    assert isinstance(config, RunConfig)
    return config
