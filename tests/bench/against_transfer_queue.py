"""The bus against TransferQueue, side by side in the same processes.

Three Ray actors: one produces, two consume. Each side starts from its own form of a batch in the
producer's memory and ends in a `TensorDict` of the same tensors in the consumer's. TransferQueue
holds everything in memory (two storage units); the bus commits shards, with fsync, compares every
checksum, and reads into memory that it uses again. Needs TransferQueue and Ray, which relax-hpc
itself does not.

    python tests/bench/against_transfer_queue.py --folder DIR --json rows.json
"""

import argparse
import importlib.util
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

import psutil
from ray_worker import Worker
from rich.console import Console

from relax_hpc.cli.bench import report
from relax_hpc.cli.bench.bus import GROUPS, Kind, in_turns_order, places
from relax_hpc.cli.bench.report import ReportRow, compare
from relax_hpc.runtime.paths import BusPaths

NEEDED = ("transfer_queue", "ray", "tensordict", "omegaconf")
QUEUE = "TransferQueue"
ROUND_TRIP, PUT, GET, GET_BY_2 = "round trip", "put", "get", "get by 2, half each"
AIMS: dict[tuple[str, str, str], float] = {
    (ROUND_TRIP, "text", "tmpfs"): 6.0,
    (ROUND_TRIP, "text", "disk"): 3.0,
    (ROUND_TRIP, "images", "tmpfs"): 1.5,
    (ROUND_TRIP, "images", "disk"): 1.0,
    (GET, "text", "tmpfs"): 8.0,
    (GET, "text", "disk"): 8.0,
    (GET_BY_2, "text", "tmpfs"): 10.0,
    (GET_BY_2, "text", "disk"): 10.0,
}
CPU_AIMS: dict[Kind, float] = {"text": 4.0, "images": 2.5}
CPU_TRIPS, CPU_ROUNDS, IDLE_S = 4, 3, 1.0
Seconds = dict[str, list[float]]


def missing() -> str:
    """Says what is not installed here; nothing if the comparison can be made."""
    lacking = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    wanted = "pip install TransferQueue==0.1.11 ray"
    return f"{', '.join(lacking)} not installed ({wanted})" if lacking else ""


def measure(folder: Path | None, repeats: int) -> Iterator[ReportRow]:
    """Rows as they come; none where TransferQueue is not installed."""
    if missing():
        return
    with _Cluster() as cluster:
        for kind in GROUPS:
            yield from _compare(cluster, kind, folder, repeats)


class _Cluster:
    """Ray on this machine with TransferQueue and the workers in it."""

    def __enter__(self) -> Self:
        import ray
        import transfer_queue
        from omegaconf import OmegaConf

        self._folder = tempfile.TemporaryDirectory(prefix="relax-ray-", dir="/tmp")
        ray.init(
            address="local",
            num_cpus=16,
            object_store_memory=256 << 20,
            include_dashboard=False,
            _temp_dir=self._folder.name,
            log_to_driver=False,
            logging_level="ERROR",
            runtime_env={"env_vars": {"TQ_LOGGING_LEVEL": "ERROR"}},
        )
        settings = {
            "controller": {"polling_mode": True},
            "metrics": {"enabled": False},
            "backend": {"SimpleStorage": {"num_data_storage_units": 2}},
        }
        transfer_queue.init(OmegaConf.create(settings, flags={"allow_objects": True}))
        actor = ray.remote(num_cpus=0.1, max_concurrency=1)(Worker)
        self.get = ray.get
        self.producer, *self.consumers = (actor.remote() for _ in range(3))
        pids = {self.get(w.pid.remote()) for w in (self.producer, *self.consumers)}
        self._workers = [psutil.Process(pid) for pid in pids]
        everyone = psutil.Process().children(recursive=True)
        self._queue = [process for process in everyone if _is_queue(process)]
        return self

    def __exit__(self, *_: object) -> None:
        import ray
        import transfer_queue

        transfer_queue.close()
        ray.shutdown()
        self._folder.cleanup()

    def cpu_seconds(self, side: "_Side", *, queue: bool) -> float:
        """Returns the CPU seconds of one trip: the workers', and TransferQueue's own if `queue`.

        What they use when idle is taken off.
        """
        processes = self._workers + (self._queue if queue else [])
        time.sleep(IDLE_S)
        idle = -_cpu(processes)
        time.sleep(IDLE_S)
        idle += _cpu(processes)
        before, start = _cpu(processes), time.perf_counter()
        for _ in range(CPU_TRIPS):
            side.trip(None)
        taken = time.perf_counter() - start
        return (_cpu(processes) - before - idle * taken / IDLE_S) / CPU_TRIPS


def _cpu(processes: Sequence[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def _is_queue(process: psutil.Process) -> bool:
    command = " ".join(process.cmdline())
    return "SimpleStorageUnit" in command or "TransferQueueController" in command


class _Side(Protocol):
    sum: int
    """Over some of what the last trip brought, to compare the sides."""

    def trip(self, seconds: Seconds | None) -> None:
        """Puts one batch, takes it by one consumer and then by two, and removes it.

        Without `seconds` it is only put, taken by one and removed.
        """


class _Queue:
    """TransferQueue's side."""

    def __init__(self, cluster: _Cluster, kind: Kind, rows: int) -> None:
        self._cluster, self._kind, self._rows = cluster, kind, rows
        self._trips = 0
        self.sum = 0

    def trip(self, seconds: Seconds | None) -> None:
        get, clean = self._cluster.get, seconds is not None
        self._trips += 1
        name = f"{self._kind}-{self._trips}"
        put = get(self._cluster.producer.queue_put.remote(name, clean=clean))

        def take(worker: Any, task: str, rows: int) -> Any:
            return worker.queue_get.remote(self._kind, name, task, rows, clean=clean)

        one, self.sum = get(take(self._cluster.consumers[0], "a", self._rows))
        if seconds is not None:
            halves = get([take(c, "b", self._rows // 2) for c in self._cluster.consumers])
            _note(seconds, put, one, max(half[0] for half in halves))
        get(self._cluster.producer.queue_clear.remote(name))


class _Bus:
    """The bus's side, in one folder."""

    def __init__(self, cluster: _Cluster, kind: Kind, folder: Path) -> None:
        self._cluster, self._kind, self._paths = cluster, kind, BusPaths(folder / kind)
        self.sum = 0

    def open(self) -> None:
        get = self._cluster.get
        get(self._cluster.producer.bus_create.remote(self._paths))
        get([c.bus_follow.remote(self._paths) for c in self._cluster.consumers])

    def trip(self, seconds: Seconds | None) -> None:
        get, clean = self._cluster.get, seconds is not None
        put = get(self._cluster.producer.bus_put.remote(self._paths, clean=clean))
        first = self._cluster.consumers[0]
        one, self.sum = get(first.bus_get.remote(self._paths, self._kind, 0, 1, clean=clean))
        if seconds is not None:
            halves = [
                c.bus_get.remote(self._paths, self._kind, part, 2, clean=clean)
                for part, c in enumerate(self._cluster.consumers)
            ]
            _note(seconds, put, one, max(half[0] for half in get(halves)))
        get(self._cluster.producer.bus_retire.remote(self._paths))


def _note(seconds: Seconds, put: float, one: float, two: float) -> None:
    for name, value in ((ROUND_TRIP, put + one), (PUT, put), (GET, one), (GET_BY_2, two)):
        seconds.setdefault(name, []).append(value)


def _compare(
    cluster: _Cluster, kind: Kind, folder: Path | None, repeats: int
) -> Iterator[ReportRow]:
    size, rows = cluster.get(cluster.producer.load.remote(kind))
    queue = _Queue(cluster, kind, rows)
    sides: dict[str, _Side] = {QUEUE: queue}
    scratches = []
    for place, parent in places(folder).items():
        scratches.append(tempfile.TemporaryDirectory(dir=parent, prefix="relax-bench-"))
        bus = _Bus(cluster, kind, Path(scratches[-1].name))
        bus.open()
        sides[place] = bus
    try:
        seconds, cpu = _times(cluster, sides, repeats)
    finally:
        for scratch in scratches:
            scratch.cleanup()
    for place in places(folder):
        for what, theirs in seconds[QUEUE].items():
            aim = AIMS.get((what, kind, place))
            name = f"{what}, {kind}, {place}"
            yield compare(name, size, seconds[place][what], theirs, QUEUE, aim)
        ours, other = (cpu[side] / size * 1e9 for side in (place, QUEUE))
        name = f"CPU time of a round trip, {kind}, {place}"
        yield ReportRow(name, ours, "s/GB", QUEUE, other, other / ours, CPU_AIMS[kind])


def _times(
    cluster: _Cluster, sides: dict[str, _Side], repeats: int
) -> tuple[dict[str, Seconds], dict[str, float]]:
    seconds: dict[str, Seconds] = {name: {} for name in sides}
    for side in sides.values():
        side.trip({})  # to warm up
    sums = {side.sum for side in sides.values()}
    assert len(sums) == 1, f"not the same tensors on all sides: {sums}"
    for repeat in range(repeats):
        for name in in_turns_order(list(sides), repeat):
            sides[name].trip(seconds[name])
    rounds: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(CPU_ROUNDS):
        for name in in_turns_order(list(sides), repeat):
            rounds[name].append(cluster.cpu_seconds(sides[name], queue=name == QUEUE))
    return seconds, {name: statistics.median(values) for name, values in rounds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, help="file system to measure")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--plot", type=Path, help="also draw the ratios to this PNG")
    args = parser.parse_args()
    if words := missing():
        sys.exit(f"not compared with TransferQueue: {words}")
    before = report.machine()
    rows = list(measure(args.folder, args.repeats))
    report.show(rows, Console(soft_wrap=True), args.json, before)
    if args.plot:
        report.plot(rows, args.plot, before)


if __name__ == "__main__":
    main()
