"""Engines in a run directory and a trainer of two ranks that publishes to them.

Engines start slowly, so the tests of a file share a house; each finds it as if it were new.
"""

import itertools
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
import sync_worker
from engine_fixtures import started, wait_until
from rank_pool import Ranks
from sglang_under_test import SGLANG_VERSION
from trainers import job

from relax_hpc.config.run import RunConfig
from relax_hpc.inference import members
from relax_hpc.inference.generation import GenerationClient
from relax_hpc.inference.members import Member, Roster
from relax_hpc.inference.process import EngineProcess
from relax_hpc.inference.switches import Switches
from relax_hpc.runtime.paths import RunPaths

ENGINE_ARGS = {
    "embedded": {},
    "sglang": {"disable_overlap_schedule": False},  # as on GPUs: a step ends after the next began
}
if SGLANG_VERSION == "0.5.17":
    ENGINE_ARGS["sglang"]["disable_radix_cache"] = True  # it cannot be emptied in a pause
SMALL_BUCKETS = 40_000  # of 411 kB in all


@dataclass
class House:
    kind: str
    paths: RunPaths
    config: RunConfig
    checkpoints: list[Path]
    start: Callable[[int], EngineProcess]
    """number -> an engine of policy 0."""
    engines: list[EngineProcess]
    ranks_each: int
    lanes: bool
    """Whether engines are on the GPUs of the trainer's ranks, as it were."""
    _starts: Iterator[int] = field(default_factory=itertools.count)

    def reset(self) -> None:
        """Engines of policy 0 that nobody has seen before, and no trainer was ever there."""
        for number, engine in enumerate(self.engines):
            if not engine.alive:
                engine.stop()
                self.engines[number] = self.start(number)
                continue
            thaw(engine)
            client = engine.client()
            client.update_weights_from_disk(str(self.checkpoints[0]), 0)
            client.resume()
            client.abort_all()
            client.close()
        self.paths.roster.unlink(missing_ok=True)
        shutil.rmtree(self.paths.weights, ignore_errors=True)
        self.announce()

    def announce(self, *transports: str, ids: list[str] | None = None) -> str:
        """Announces engines as owners do that have started them anew; returns the start."""
        start = f"7.0-1-{next(self._starts)}"
        ways = transports or ("collective",) * len(self.engines)
        for number, (name, engine, way) in enumerate(
            zip(self.ids, self.engines, ways, strict=True)
        ):
            if ids is None or name in ids:
                record = Member(
                    name, start, engine.url, self.ranks_each, self.kind, "HEALTHY",
                    lane=number * self.ranks_each if self.lanes else -1, transport=way,
                )  # fmt: skip
                members.announce(self.paths, record)
        return start

    def client(self, number: int) -> GenerationClient:
        """Makes a client as rollout tasks do."""
        engine, name = self.engines[number], self.ids[number]
        start = members.find(self.paths, name).start
        switches = Switches(self.paths, name, start) if self.kind == "sglang" else None
        return GenerationClient(engine.url, engine.token, switches=switches)

    @property
    def ids(self) -> list[str]:
        return [f"rollout-{number}" for number in range(len(self.engines))]

    @property
    def roster(self) -> Roster:
        return Roster.read(self.paths)

    @property
    def versions(self) -> list[int]:
        return [engine.client().version() for engine in self.engines]


@contextmanager
def house_of(kind, checkpoints, folder, *, count=2, ranks_each=1, lanes=False):
    """`count` engines; of SGLang each with `ranks_each` ranks."""
    config = job(checkpoints[0], "tp2")
    pools = {"rollout": config.rollout_pool.model_copy(update={"kind": kind})}
    config = config.model_copy(update={"run_root": folder, "engines": pools})
    args = ENGINE_ARGS[kind] | ({"tp_size": ranks_each} if ranks_each > 1 else {})

    def start(number):
        log = folder / f"engine-{number}.log"
        return started(kind, checkpoints[0], log, args=args, seed=number)

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(count) as threads:
        if ranks_each > 1:  # SGLang wants to be told, where there are fewer sockets than ranks
            cores = "|".join(str(core % os.cpu_count()) for core in range(ranks_each))
            patch.setenv("SGLANG_CPU_OMP_THREADS_BIND", cores)
        house = House(
            kind, RunPaths(config.run_dir), config, checkpoints,
            # An engine dies with the thread that started it.
            lambda number: threads.submit(start, number).result(),
            list(threads.map(start, range(count))), ranks_each, lanes,
        )  # fmt: skip
        yield house
        for engine in house.engines:
            thaw(engine)
            engine.stop()


@contextmanager
def trainer(house, timeout_s=60, **settings):
    """Two ranks; `settings` are for `sync_worker.open_publisher`."""
    ranks, lanes = Ranks(2), len(house.ids) * house.ranks_each // 2
    ranks.call(
        sync_worker.open_publisher, config=house.config, ids=house.ids,
        bucket_bytes=SMALL_BUCKETS, timeout_s=timeout_s, lanes=lanes * house.lanes, **settings,
    )  # fmt: skip
    try:
        yield ranks
        if all(process.is_alive() for process in ranks.processes):
            ranks.call(sync_worker.close)
    finally:
        ranks.close()


def publish(ranks, house, version, *, check=False):
    """Version v of the weights is checkpoint v modulo 3."""
    folder = house.checkpoints[version % 3]
    return ranks.call(sync_worker.publish, version=version, folder=folder, check=check)[0]


@contextmanager
def at_that_moment(ranks, house, moment, act):
    """Acts on the second engine while the next publication stands still at a moment of it."""
    reached, released = (house.paths.root / name for name in ("reached", "released"))
    for file in (reached, released):
        file.unlink(missing_ok=True)
    ranks.call(sync_worker.hold, place=moment, reached=reached, released=released)

    def run():
        wait_until(reached.exists)
        act(house.engines[1])
        released.touch()

    with ThreadPoolExecutor(1) as pool:
        acting = pool.submit(run)
        yield
        acting.result()


def freeze(engine):
    for process in tree_of(engine):
        process.send_signal(signal.SIGSTOP)


def thaw(engine):
    if engine.alive:
        for process in tree_of(engine):
            process.send_signal(signal.SIGCONT)


def kill(engine):
    family = tree_of(engine)
    for process in family:
        process.kill()
    psutil.wait_procs(family[:-1], timeout=30)
    wait_until(lambda: not engine.alive)


def tree_of(engine):
    leader = psutil.Process(engine.pid)
    return [*leader.children(recursive=True), leader]
