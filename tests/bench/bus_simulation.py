"""Where the bus's protocol breaks as producers are added: an arithmetic and an event simulation.

Five things can give out: the metadata server (names), the one file of credits that all producers
poll, the sequencer that reads all logs, its descriptors, and the flow between them. The operations
per shard are those of the code as built; tests/bus/test_operations.py counts them with strace. What
a file system serves per second is an assumption (`Site`): put in what mdtest says at your site.
"""

import heapq
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

from relax_hpc.bus.shards.open_shards import MAX_OPEN

# Metadata operations of one shard, from draft to deletion; the folder that is flushed stays open.
# Reading and writing open files goes to data servers and is not here.
BASE = Counter(create=1, close=1, rename=1, sync_folder=1, unlink=1)
SIDECAR = BASE + Counter(open=1, close=1)
"""Its writer opens what it widens."""
READ = Counter(open=1, close=1)
"""By rank 0, for admission and index together; by a data-parallel rank, for its rows."""
PUBLISH = ("create", "close", "rename", "sync_folder")
"""Operations that a producer waits for, one after the other."""


class Site(NamedTuple):
    """The rates of a file system and a network: assumptions, shaped like public mdtest results."""

    capacity: float = 50_000
    """Metadata operations per second, in units of one create."""
    threads: int = 16
    """Operations that the metadata server works on at once."""
    reads_per_object: float = 50_000
    """Small reads per second of one file."""
    round_trip_s: float = 300e-6
    """One small read of a log by one process."""
    descriptors: int = 4096
    """Files that the trainer's rank 0 may have open: the hard limit of older systems."""
    poll_cpu_s: float = 50e-6
    """Seconds of the sequencer per log without news; measured, as the next two."""
    admit_cpu_s: float = 300e-6
    """Per shard."""
    plan_cpu_s: float = 20e-6
    """Per prompt group."""
    plan_bytes: float = 65
    """Per prompt group, in the plan's log."""


COST = {
    "create": 1.0,
    "rename": 1.5,
    "sync_folder": 1.0,
    "unlink": 0.6,
    "open": 0.4,
    "close": 0.15,
}
"""Work of the metadata server, in creates."""


class Load(NamedTuple):
    """A run at steady state."""

    producers: int
    seconds_per_shard: float = 5.0
    """Between two shards of a producer."""
    trajectories_per_s: float = 5.0
    """Rate of a producer."""
    siblings: int = 8
    sidecars: int = 1
    """Roles that widen each shard."""
    producers_per_sidecar_writer: int = 64
    readers: int = 1
    """Data-parallel ranks, rank 0 apart, that train rows of a shard."""
    credit_polls_per_s: float = 1.0
    """Rate of a producer."""
    step_s: float = 60.0
    """Seconds of the trainer's step."""
    direct: bool = True
    """Whether logs stay open and are read with O_DIRECT; else every poll is an open and a close."""

    @property
    def shards_per_s(self) -> float:
        return self.producers / self.seconds_per_shard

    @property
    def logs(self) -> float:
        """Logs that the sequencer reads."""
        return self.producers * (1 + self.sidecars / self.producers_per_sidecar_writer)

    @property
    def groups_per_s(self) -> float:
        return self.producers * self.trajectories_per_s / self.siblings


class Sequencer(NamedTuple):
    """The state of rank 0's reading loop."""

    busy: float
    """Fraction of its time that admission and planning take; at 1 it falls behind without end."""
    delay_s: float
    """From a commit until it is seen, on average."""


def per_shard(load: Load) -> Counter[str]:
    """Metadata operations of a base shard and its sidecars, over their whole life."""
    total = Counter(BASE)
    for _ in range(load.sidecars):
        total += SIDECAR
    # Rank 0 keeps what it admitted open until it is read, if that is not too much.
    step_shards = load.shards_per_s * load.step_s * (1 + load.sidecars)
    times = load.readers + (1 if step_shards <= MAX_OPEN else 2)
    for _ in range((1 + load.sidecars) * times):
        total += READ
    return total


def operations(load: Load, site: Site) -> dict[str, float]:
    """Metadata operations per second."""
    rates = {name: count * load.shards_per_s for name, count in per_shard(load).items()}
    if not load.direct:
        polls = load.producers * load.credit_polls_per_s + log_reads(load, site)
        rates["open"] += polls
        rates["close"] += polls
    return rates


def utilization(load: Load, site: Site) -> float:
    """Returns the metadata server's; at 1 its queue grows without end."""
    return sum(COST[name] * rate for name, rate in operations(load, site).items()) / site.capacity


def credit_utilization(load: Load, site: Site) -> float:
    """Returns that of the server of the file of credits."""
    return load.producers * load.credit_polls_per_s / site.reads_per_object


def descriptor_utilization(load: Load, site: Site) -> float:
    """Returns that of the files rank 0 may have open: all logs, the shards it keeps, some more."""
    return (load.logs + MAX_OPEN + 64) / site.descriptors


def log_reads(load: Load, site: Site) -> float:
    """Reads per second of the sequencer: one after the other, so they never flood anybody."""
    return min(1 / (site.round_trip_s + site.poll_cpu_s), load.logs / 0.02)


def sequencer(load: Load, site: Site) -> Sequencer:
    """How far behind the sequencer is, sweeping over all logs again and again."""
    admit = 3 * site.round_trip_s + site.admit_cpu_s  # open, header, row columns
    busy = load.shards_per_s * (1 + load.sidecars) * admit + load.groups_per_s * site.plan_cpu_s
    sweep = load.logs * (site.round_trip_s + site.poll_cpu_s) + 0.02
    return Sequencer(busy, sweep / (1 - busy) / 2 if busy < 1 else float("inf"))


def breaking_point(load: Load, site: Site, limit: float = 1.0) -> dict[str, int]:
    """Producers at which each part reaches `limit` of what it can do."""
    uses: dict[str, Callable[[Load], float]] = {
        "metadata server": lambda load: utilization(load, site),
        "file of credits": lambda load: credit_utilization(load, site),
        "sequencer": lambda load: sequencer(load, site).busy,
        "descriptors": lambda load: descriptor_utilization(load, site),
    }
    return {part: _first(load, use, limit) for part, use in uses.items()}


def publish_latency(load: Load, site: Site, *, seconds: float = 3.0, seed: int = 0) -> list[float]:
    """Seconds that producers wait for the names of a shard, sorted; an event simulation.

    The metadata server takes operations first come, first served, on `site.threads` threads. All
    other operations arrive at random; the published shards that are timed do theirs in sequence.

    Returns:
        [<= 400]; none if the server cannot keep up.
    """
    if utilization(load, site) >= 1:
        return []
    rng = random.Random(seed)
    events = [(at, cost, -1) for at, cost in _background(load, site, seconds, rng)]
    events += [(rng.uniform(0, seconds), 0.0, timed) for timed in range(400)]
    heapq.heapify(events)
    free = [0.0] * site.threads
    begun: dict[int, float] = {}
    stage: Counter[int] = Counter()
    latencies = []
    while events:
        at, cost, timed = heapq.heappop(events)
        if timed >= 0:
            begun.setdefault(timed, at)
            if stage[timed] == len(PUBLISH):
                latencies.append(at - begun[timed])
                continue
            cost = COST[PUBLISH[stage[timed]]]
            stage[timed] += 1
        done = max(at, free[0]) + cost * site.threads / site.capacity
        heapq.heapreplace(free, done)
        if timed >= 0:
            heapq.heappush(events, (done + site.round_trip_s, 0.0, timed))
    return sorted(latencies)


def _background(
    load: Load, site: Site, seconds: float, rng: random.Random
) -> Iterator[tuple[float, float]]:
    for name, rate in operations(load, site).items():
        for _ in range(int(rate * seconds)):
            yield rng.uniform(0, seconds), COST[name]


def _first(load: Load, use: Callable[[Load], float], limit: float) -> int:
    lo, hi = 1, 100_000_000
    while lo < hi:
        middle = (lo + hi) // 2
        reached = use(load._replace(producers=middle)) >= limit
        lo, hi = (lo, middle) if reached else (middle + 1, hi)
    return lo
