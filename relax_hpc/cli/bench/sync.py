"""Measures weight updates under load, with real trainer and engines on this machine's GPUs.

A trainer without optimizer publishes version after version to engines that sample all the time. For
a shape only a config.json is written: both sides draw weights, and version 0 replaces the engines'.
"""

import asyncio
import itertools
import json
import logging
import multiprocessing
import queue
import statistics
import sys
import threading
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing.queues import Queue
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import torch
import torch.distributed as dist

from relax_hpc.cli.bench.report import machine
from relax_hpc.cli.bench.shapes import grid_name, job_of, join, row_of, run_ranks
from relax_hpc.config.run import RunConfig
from relax_hpc.errors import ConfigError, EngineError
from relax_hpc.inference import members
from relax_hpc.inference.client import EngineClient
from relax_hpc.inference.generation import Generation, GenerationClient, Sampling
from relax_hpc.inference.members import EngineRegistry, Member
from relax_hpc.inference.process import EngineProcess, start_engine
from relax_hpc.roles.engine.host import EngineSlot, attendance, spec_of
from relax_hpc.roles.rollout.check import check_lease
from relax_hpc.runtime.comm.torch_group import BroadcastGroup, open_store, settle_nccl
from relax_hpc.runtime.comm.world import World
from relax_hpc.runtime.files.records import write_json
from relax_hpc.runtime.files.run_secret import RunSecret
from relax_hpc.runtime.files.scratch import scratch_folder
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.runtime.text import align_lines
from relax_hpc.weights.meeting.attendant import Attendant
from relax_hpc.weights.publish import Published, Publisher
from relax_hpc.weights.same_gpu import Sleep
from relax_hpc.weights.transport import TrainerRanks, call_timeout_s

if TYPE_CHECKING:
    from relax_hpc.trainer.megatron.scorer import MegatronScorer

_WIRE_BYTES, _WIRE_ROUNDS, _WIRE_TIMEOUT_S = 1 << 30, 8, 60
_PROMPT_TOKENS = 64
_LOOK_S = 0.05
_FEWEST = 3
"""Least updates for throughput of engines."""
LOGPROB_VERSIONS = (0, 1, 10)
"""Versions after which the logprobs of engines and trainer are compared."""
ATTEMPT = "1"
"""Attempt of the engines' start."""
PARTS = (
    "gather", "write", "join", "pause", "prepare", "idle", "received", "load", "wire", "resume",
)  # fmt: skip
_SAMPLES, _PROMPT, _RESPONSE = 32, 64, 192
_STEP = 1 + 2.0**-6
"""Each version multiplies the weights by it or its inverse: enough to change 16-bit values."""


class SyncTask(NamedTuple):
    """Orders to the ranks of the trainer."""

    config: RunConfig
    updates: int
    first_gpu_of_engines: int
    compare_logprobs: bool
    every_s: float
    """Seconds from the end of an update to the next."""

    @property
    def is_colocated(self) -> bool:
        return self.config.rollout_pool.placement == "actor"

    @property
    def paths(self) -> RunPaths:
        return RunPaths(self.config.run_dir)

    @property
    def results(self) -> Path:
        return self.config.run_dir / "figures.json"

    @property
    def num_ranks(self) -> int:
        return self.config.actor.layout.world_size


@dataclass
class VersionUpdate:
    """The seconds of one version's update."""

    version: int
    num_bytes: int
    paused: float
    """Pause of the engines."""
    total: float
    """From the first gathered tensor to the last engine that resumed."""
    parts: dict[str, float]
    """`sync/...` of docs/explanation/architecture.md."""
    began: float = 0.0
    """Seconds since the epoch."""
    invited: dict[str, str] | None = None
    """Engine -> how it was invited, where this update formed the communicator."""
    falling_asleep: float = 0.0
    """Time before it for colocated engines to fall asleep."""
    free_gib: tuple[float, float] | None = None
    """Free GiB of the first of these GPUs, before and after that."""


@dataclass
class SyncGap:
    """Trainer's logprob minus the engine's, over sampled tokens, in nats."""

    version: int
    num_tokens: int
    mean: float
    """Mean absolute value."""
    largest: float
    k3: float
    """Mean of exp(d) - 1 - d, an estimate of KL(engine || trainer)."""


@dataclass
class SyncFigures:
    shape: str
    trainer: str
    engines: str
    in_flight: int
    updates: list[VersionUpdate]
    gaps: list[SyncGap]
    equal: bool
    """Whether engines held the sent weights, after the first and the last version."""
    wire_gb_per_s: float
    """Rate of an undisturbed broadcast of 1 GiB between the same GPUs; 0 if not measured."""
    failed: int = 0
    """Requests that ended in an error."""
    tokens_per_s: float = 0.0
    """Tokens per second of the engines, from the second update to the last; 0 if not measured."""
    undisturbed_tokens_per_s: float = 0.0
    """The same, for as long without updates."""


def show(figures: SyncFigures, json_file: Path | None) -> str:
    """Formats a line per version, and the medians; writes all of it as JSON if requested."""
    heads = ("version", "paused", "total", *PARTS, "GB/s")
    lines: list[tuple[str, ...]] = [heads]
    for update in figures.updates:
        rate = update.num_bytes / 1e9 / _on_the_wire(update)
        parts = [f"{1e3 * update.parts.get(name, 0.0):.1f}" for name in PARTS]
        whole = [f"{1e3 * update.paused:.1f}", f"{1e3 * update.total:.1f}"]
        lines.append((str(update.version), *whole, *parts, f"{rate:.0f}"))
    table = align_lines(lines)
    if json_file is not None:
        write_json(json_file, {"machine": machine(), **asdict(figures)})
    gaps = map(line_of, figures.gaps)
    return "\n".join([f"{machine()}; milliseconds", *table, *_summary(figures), *gaps])


def _summary(figures: SyncFigures) -> list[str]:
    later = figures.updates[1:]
    paused = statistics.median(update.paused for update in later)
    total = statistics.median(update.total for update in later)
    size = later[0].num_bytes / 1e9
    wire_s = statistics.median(map(_on_the_wire, later))
    lines = [
        f"{figures.shape}, trainer {figures.trainer} -> {figures.engines}, {size:.2f} GB, "
        f"{figures.in_flight} requests in flight: paused {1e3 * paused:.1f} ms, total "
        f"{1e3 * total:.1f} ms ({total / paused:.2f} x), {size / wire_s:.0f} GB/s",
        f"{figures.failed} requests failed, weights {'equal' if figures.equal else 'DIFFER'}",
    ]
    if calm := figures.undisturbed_tokens_per_s:
        span = (later[-1].began - later[0].began) / (len(later) - 1)
        lines.append(
            f"engines: {figures.tokens_per_s:.0f} tokens/s with an update every {span:.1f} s, "
            f"{calm:.0f} without: {figures.tokens_per_s / calm:.3f}"
        )
    for update in figures.updates:
        if update.invited:
            ways = ", ".join(f"{engine} by {way}" for engine, way in update.invited.items())
            lines.append(f"group formed in {1e3 * update.parts['join']:.0f} ms: {ways}")
    if memory := [update.free_gib for update in later if update.free_gib]:
        before, after = memory[-1]
        parts = {
            name: statistics.median(update.parts.get(f"wake_{name}", 0.0) for update in later)
            for name in ("weights", "kv_cache")
        }
        slept = statistics.median(update.falling_asleep for update in later)
        lines.append(
            f"engines fall asleep in {1e3 * slept:.0f} ms, take memory of weights back in "
            f"{1e3 * parts['weights']:.0f} ms, of the cache in {1e3 * parts['kv_cache']:.0f} ms; "
            f"GiB free on the GPU: {before:.1f} while they are awake, {after:.1f} asleep"
        )
    if figures.wire_gb_per_s:
        fraction = size / wire_s / figures.wire_gb_per_s
        lines.append(f"a bare broadcast: {figures.wire_gb_per_s:.0f} GB/s; {fraction:.0%} of it")
    return lines


def _on_the_wire(update: VersionUpdate) -> float:
    """Seconds from the first byte to the last, by the engines' measurement; without a wire, until
    the last one is in place."""
    if "wire" not in update.parts:  # engines load files
        return update.parts["load"]
    if "wake_weights" in update.parts:
        return update.parts["wire"]
    return update.parts.get("received") or update.parts["wire"]


def wire_speed(gpus: Sequence[int]) -> float:
    """GB/s of the best of some broadcasts from the first of `gpus`, the limit of an update.

    0 if they failed. Without GPUs, the ranks are processes.
    """
    context = multiprocessing.get_context("spawn")
    store = open_store("127.0.0.1", len(gpus), timeout_s=_WIRE_TIMEOUT_S)
    speeds = context.Queue()
    ranks = [
        context.Process(target=_wire_rank, args=(rank, gpus, store.port, speeds), daemon=True)
        for rank in range(len(gpus))
    ]
    for process in ranks:
        process.start()
    try:
        return float(speeds.get(timeout=_WIRE_TIMEOUT_S))
    except queue.Empty:
        return 0.0
    finally:
        for process in ranks:
            process.join(5)
            process.kill()


def _wire_rank(rank: int, gpus: Sequence[int], port: int, speeds: "Queue[float]") -> None:
    settle_nccl()
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(gpus[rank])
    group = BroadcastGroup(
        "127.0.0.1", port, rank, len(gpus), "wire", "nccl" if on_gpu else "gloo",
        store=dist.TCPStore("127.0.0.1", port, len(gpus), False), timeout_s=_WIRE_TIMEOUT_S,
    )  # fmt: skip
    data = torch.zeros(_WIRE_BYTES, dtype=torch.uint8, device="cuda" if on_gpu else "cpu")
    best = 0.0
    for _ in range(_WIRE_ROUNDS):
        group.broadcast(data[:8])  # all begin together
        start = time.perf_counter()
        group.broadcast(data)
        best = max(best, _WIRE_BYTES / 1e9 / (time.perf_counter() - start))
    if rank == 0:
        speeds.put(best)
    group.close()


class SteadyLoad:
    """Keeps a constant number of requests in flight at every engine, from its own thread, for the
    length of the block."""

    def __init__(
        self, engines: Sequence[tuple[str, str]], in_flight: int, *, vocabulary: int, length: int
    ) -> None:
        """Args:
        engines: URL and token of each.
        in_flight: requests per engine.
        vocabulary: prompts are random ids below it.
        length: tokens of every response but the first ones.
        """
        self._engines, self._in_flight = engines, in_flight
        self._vocabulary, self._length = vocabulary, length
        self.failed = 0
        """Failed requests."""
        self._seen: list[tuple[float, int]] = []
        self._seeds = itertools.count()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def tokens_per_s(self, begin: float, end: float) -> float:
        """Tokens per second of all engines between two points of `time.time()`."""
        return tokens_per_s(list(self._seen), begin, end)

    async def _run(self) -> None:
        clients = [GenerationClient(url, token) for url, token in self._engines]

        async def ask(client: GenerationClient, length: int) -> None:
            sampling = Sampling(1.0, length, ignore_eos=True)
            while not self._ended.is_set():
                seed = next(self._seeds)
                random = np.random.default_rng(seed)
                prompt = random.integers(0, self._vocabulary, _PROMPT_TOKENS).tolist()
                try:
                    await client.sample(prompt, seed, sampling, version=0)
                    sampling = sampling._replace(max_new_tokens=self._length)
                except EngineError:
                    self.failed += 1
                    await asyncio.sleep(1)

        async def look() -> None:
            while not self._ended.is_set():
                sampled = sum(client.counts.num_tokens for client in clients)
                self._seen.append((time.time(), sampled))
                await asyncio.sleep(_LOOK_S)

        # First responses end one after the other: else all would grow old together, and the
        # engine would be quick, then slow, then busy with prompts, whatever else happens.
        lengths = [-(-self._length * i // self._in_flight) for i in range(1, self._in_flight + 1)]
        await asyncio.gather(look(), *(ask(c, length) for c in clients for length in lengths))
        for client in clients:
            await client.aclose()


def tokens_per_s(seen: Sequence[tuple[float, int]], begin: float, end: float) -> float:
    """Tokens per second from counts at some times; 0 if these do not cover the interval."""
    times = [at for at, _ in seen]
    first, last = bisect_left(times, begin), bisect_left(times, end)
    if last >= len(seen) or first >= last:
        return 0.0
    return (seen[last][1] - seen[first][1]) / (seen[last][0] - seen[first][0])


def measure(
    shape: str,
    grid: Mapping[str, int],
    *,
    kind: str = "sglang",
    engines: int = 1,
    engine_tp: int = 1,
    updates: int = 10,
    in_flight: int = 64,
    compare_logprobs: bool = False,
    every_s: float = 1.0,
    compare_load: bool = False,
    colocated: bool = False,
    overrides: Sequence[str] = (),
    python: str | None = None,
) -> SyncFigures:
    """Publishes `updates` versions after version 0.

    Args:
        shape: a name of `shapes.SHAPES`, or a folder with a config.json.
        grid: of the trainer, as `train.measure` takes it.
        kind: of the engines, sglang or embedded.
        engines: each on `engine_tp` GPUs after the trainer's.
        in_flight: requests per engine at all times.
        compare_logprobs: of engine and trainer, after some versions.
        every_s: from the end of an update to the next.
        compare_load: also sample for as long without updates.
        colocated: engines are on the trainer's GPUs, sleep before every version, and have no
            requests.
        overrides: `section.key=value` of the job.
        python: interpreter that has the engine; default is this one.

    Raises:
        ConfigError: no such shape; not enough GPUs; a rank failed.
    """
    gpus = torch.cuda.device_count()
    with scratch_folder("bench") as folder:
        config = _config(
            shape, grid, kind, engines, engine_tp, updates, colocated, overrides, folder
        )
        if colocated:
            check_lease(config)
            in_flight = 0
        first = 0 if colocated else config.actor.layout.world_size
        needed = first + engines * engine_tp // config.rollout_pool.advanced.engines_per_gpu
        if gpus and needed > gpus:
            raise ConfigError(
                f"trainer and engines take {needed} GPUs, but {gpus} are here; use fewer"
            )
        task = SyncTask(config, updates, first, compare_logprobs, every_s)
        config.run_dir.mkdir()
        RunSecret.create(task.paths.secret)
        has_wire = gpus and not colocated
        speed = wire_speed([0, *range(task.first_gpu_of_engines, needed)]) if has_wire else 0.0
        with (
            _engines(task, python) as running,
            _load_of(task, running, in_flight) as load,
        ):
            # Engines, which run already, could not release memory with its segments.
            found = run_ranks(run, task, task.num_ranks)
            done = [VersionUpdate(**update) for update in found["updates"]]
            speeds = _speeds(load, done, every_s) if compare_load and in_flight else _NO_SPEEDS
    return SyncFigures(
        shape,
        grid_name(config.actor.layout),
        f"{engines} {kind}, tp{engine_tp}",
        in_flight,
        done,
        [SyncGap(**gap) for gap in found["gaps"]],
        found["equal"],
        speed,
        load.failed,
        *speeds,
    )


def _config(
    shape: str,
    grid: Mapping[str, int],
    kind: str,
    engines: int,
    engine_tp: int,
    updates: int,
    colocated: bool,
    overrides: Sequence[str],
    folder: Path,
) -> RunConfig:
    args: dict[str, Any] = {}
    if kind == "sglang":
        args = {"tp_size": engine_tp, "load_format": "dummy"}
        if colocated:
            args["mem_fraction_static"] = 0.5
    pool = {"kind": kind, "count": engines, "args": args}
    tables: dict[str, Any] = {
        "run_root": str(folder),
        "actor": {"layout": dict(grid)},
        "engines": {"rollout": pool | ({"placement": "actor"} if colocated else {})},
        "schedule": {"num_steps": updates} | ({"max_staleness": 0} if colocated else {}),
    }
    return job_of(shape, folder, tables, overrides, "bench sync")


@contextmanager
def _engines(task: SyncTask, python: str | None) -> Iterator[list[EngineProcess]]:
    """Starts engines in parallel and announces them."""
    pool, secret = task.config.rollout_pool, RunSecret.read(task.paths.secret)
    tp = int(str(pool.args.get("tp_size", 1)))

    def start(number: int) -> EngineProcess:
        args = dict(pool.args)
        if pool.kind == "sglang" and torch.cuda.is_available():
            own = number // pool.advanced.engines_per_gpu * tp
            args["base_gpu_id"] = task.first_gpu_of_engines + own
            args["enable_memory_saver"] = task.is_colocated
        return start_engine(
            replace(spec_of(task.config, EngineSlot("", number, 0)), args=args, seed=number),
            host="127.0.0.1",
            token=secret.engine_token(f"rollout-{number}", ATTEMPT),
            log_path=task.paths.log("engine", str(number)),
            python=python,
        )

    # An engine dies with the thread that started it, so these live until all is done.
    with ThreadPoolExecutor(pool.count) as threads, ExitStack() as stack:
        running = []
        way = attendance(task.config, pool, None)
        for number, engine in enumerate(threads.map(start, range(pool.count))):
            stack.callback(engine.stop)
            running.append(engine)
            name = f"rollout-{number}"
            member = Member(name, ATTEMPT, engine.url, tp, pool.kind, "HEALTHY")
            member = member._replace(task=name if way != "none" else "")
            if way != "none":
                stack.enter_context(
                    Attendant(task.paths, name, secret, way, partial(_client, task, member))
                )
            lane = number * tp if task.is_colocated else -1
            transport = task.config.weights.transport
            members.announce(task.paths, member._replace(lane=lane, transport=transport))
        yield running


def _client(task: SyncTask, member: Member, *_: str) -> EngineClient:
    timeout_s = call_timeout_s(task.config.weights.advanced.timeout_s)
    return EngineClient(member.url, _token(task, member), timeout_s=timeout_s)


def _load_of(task: SyncTask, engines: Sequence[EngineProcess], in_flight: int) -> SteadyLoad:
    config = json.loads((task.config.model.path / "config.json").read_text(encoding="utf-8"))
    return SteadyLoad(
        [(engine.url, engine.token) for engine in engines],
        in_flight,
        vocabulary=config["vocab_size"],
        length=task.config.rollout.max_new_tokens,
    )


class _Speeds(NamedTuple):
    """Tokens per second of the engines; 0 if the time was too short."""

    updated: float
    undisturbed: float


_NO_SPEEDS = _Speeds(0.0, 0.0)


def _speeds(load: SteadyLoad, updates: Sequence[VersionUpdate], every_s: float) -> _Speeds:
    """Speeds during the updates, and for as long after them.

    Begins at the second version, since the first forms the communicator, and ends where the last
    begins, whose contents are compared.
    """
    if len(updates) < _FEWEST:
        return _NO_SPEEDS
    begin, end = updates[1].began, updates[-1].began
    calm = time.time() + every_s
    time.sleep(every_s + end - begin + 1)
    return _Speeds(load.tokens_per_s(begin, end), load.tokens_per_s(calm, calm + end - begin))


def run(rank: int, task: SyncTask) -> None:
    """Publishes all versions; rank 0 writes the results."""
    from relax_hpc.trainer.megatron.scorer import MegatronScorer

    logging.basicConfig(level=logging.WARNING)
    rendezvous = task.paths.rendezvous("trainer")
    world, device = join(rank, task.num_ranks, rendezvous, task.paths.secret)
    has_weights = any(task.config.model.path.glob("*.safetensors"))
    scorer = MegatronScorer(
        task.config.model, task.config.actor, world, device,
        seed=task.config.seed, temperature=task.config.temperature, random_weights=not has_weights,
    )  # fmt: skip
    ranks, publisher, sleep = _parts(task, world, scorer, device)
    updates, gaps, equal = list[VersionUpdate](), list[SyncGap](), True
    for version in range(task.updates + 1):
        check = version in (0, task.updates)
        nap, began = _put_to_sleep(sleep, device) if sleep and version else _Nap(), time.time()
        if done := _publish(scorer, ranks, publisher, version, check=check):
            updates.append(_update_of(done, began, nap))
            equal = equal and (done.verified is None or done.verified.equal)
            _say(updates[-1])
        if task.compare_logprobs and version in LOGPROB_VERSIONS:
            gaps.append(_compare(task, world, scorer, version))
            if publisher:
                _say(gaps[-1])
        _change(scorer, _STEP if version % 2 else 1 / _STEP)
        time.sleep(task.every_s)  # so that engines are at work again
    if publisher:
        write_json(task.results, {
            "updates": [asdict(update) for update in updates],
            "gaps": [asdict(gap) for gap in gaps],
            "equal": equal,
        })  # fmt: skip
        publisher.close()
    dist.barrier()
    dist.destroy_process_group()


def _parts(
    task: SyncTask, world: World, scorer: "MegatronScorer", device: torch.device
) -> tuple[TrainerRanks, Publisher | None, Sleep | None]:
    """Builds this rank's parts of a publication; collective."""
    from relax_hpc.roles.actor.build import Publishing, carriers_of

    weights = task.config.weights
    publishing = Publishing(
        weights, world, scorer, device, folder=task.paths.weights,
        source=task.config.model.path, lanes_per_rank=task.config.rollout_pool.lanes_per_rank,
    )  # fmt: skip
    if world.rank:
        return publishing.ranks, None, None
    register = EngineRegistry(task.paths, lambda: task.config.producers, partial(_client, task))
    publisher = publishing.publisher(
        register, waits_for_loads=True, carriers=partial(carriers_of, task.config, task.paths)
    )
    if not task.is_colocated:
        return publishing.ranks, publisher, None
    return publishing.ranks, publisher, Sleep(register, ATTEMPT, timeout_s=60, start_timeout_s=60)


class _Nap(NamedTuple):
    seconds: float = 0.0
    free_gib: tuple[float, float] | None = None
    """Free GiB of the first GPU before and after."""


def _put_to_sleep(sleep: Sleep, device: torch.device) -> _Nap:
    start, before = time.perf_counter(), _free_gib(device)
    sleep.fall_asleep()
    seconds = time.perf_counter() - start
    nap = _Nap(seconds, (before, _free_gib(device)))
    sleep.wake()
    return nap


def _free_gib(device: torch.device) -> float:
    return torch.cuda.mem_get_info(device)[0] / 2**30 if device.type == "cuda" else 0.0


def _publish(
    scorer: "MegatronScorer",
    ranks: TrainerRanks,
    publisher: Publisher | None,
    version: int,
    *,
    check: bool,
) -> Published | None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()
    tensors = scorer.stream_weights()
    if publisher:
        return publisher.publish(version, tensors, check=check)
    ranks.publish(tensors)
    return None


@torch.no_grad()
def _change(scorer: "MegatronScorer", factor: float) -> None:
    for parameter in scorer.parameters():
        parameter.mul_(factor)


def progress(found: VersionUpdate | SyncGap) -> str:
    if isinstance(found, SyncGap):
        return line_of(found)
    parts = ", ".join(
        f"{name} {1e3 * found.parts[name]:.1f}" for name in PARTS if name in found.parts
    )
    return (
        f"version {found.version}: paused {1e3 * found.paused:.1f} ms, total "
        f"{1e3 * found.total:.1f} ms ({parts})"
    )


def line_of(gap: SyncGap) -> str:
    return (
        f"logprobs at version {gap.version}, {gap.num_tokens} tokens: mean |d| {gap.mean:.2e}, "
        f"largest {gap.largest:.2e}, k3 {gap.k3:.2e}"
    )


def _say(found: VersionUpdate | SyncGap) -> None:
    """Prints it at once, in case the rest is cut off."""
    sys.stderr.write(progress(found) + "\n")


def _update_of(published: Published, began: float, nap: _Nap) -> VersionUpdate:
    parts = dict(published.seconds)
    total = parts.pop("total")
    return VersionUpdate(
        published.version, published.num_bytes, published.pause_seconds, total, parts, began,
        dict(published.invited) or None, *nap,
    )  # fmt: skip


def _compare(task: SyncTask, world: World, scorer: "MegatronScorer", version: int) -> SyncGap:
    """Samples from the first engine, scores with the trainer; collective."""
    found = None
    if world.rank == 0:
        [member] = members.follow(task.paths).get(*task.config.producers[:1])
        assert member
        found = asyncio.run(_sample(task, member))
    rows = [
        row_of(
            np.array([*prompt, *sampled.token_ids], np.int32), len(prompt),
            np.array([0.0] * len(prompt) + sampled.logprobs, np.float32),
            version_runs=sampled.version_runs, finish=sampled.finish,
        )
        for prompt, sampled in world.bcast(found)
    ]  # fmt: skip
    budget = task.config.actor.tokens_per_micro_batch // (_PROMPT + _RESPONSE)
    batches = [
        list(range(first, min(first + budget, len(rows)))) for first in range(0, len(rows), budget)
    ]
    scored = scorer.forward_logprobs(rows, batches)
    pairs = [
        (
            logprobs[row.prompt_len :],
            row.columns["rollout_logprobs"][row.prompt_len :].astype(np.float32),
        )
        for logprobs, row in zip(scored, rows, strict=True)
    ]
    gap = np.concatenate([ours.astype(np.float64) - theirs for ours, theirs in pairs])
    k3 = float(np.mean(np.expm1(gap) - gap))
    size = np.abs(gap)
    return SyncGap(version, len(gap), float(size.mean()), float(size.max()), k3)


def _token(task: SyncTask, member: Member) -> str:
    return RunSecret.read(task.paths.secret).engine_token(member.id, member.start)


async def _sample(task: SyncTask, member: Member) -> list[tuple[list[int], Generation]]:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 300, _PROMPT).tolist() for _ in range(_SAMPLES)]
    async with GenerationClient(member.url, _token(task, member)) as client:
        sampled = await asyncio.gather(
            *(
                client.sample(prompt, seed, Sampling(1.0, _RESPONSE, ignore_eos=True))
                for seed, prompt in enumerate(prompts)
            )
        )
    return list(zip(prompts, sampled, strict=True))
