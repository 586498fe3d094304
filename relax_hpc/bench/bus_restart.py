"""The cost of starting the sequencer again in the middle of a run."""

import time
from collections.abc import Iterator
from pathlib import Path

from relax_hpc.bench.report import Row
from relax_hpc.bench.workload import SIBLINGS, renumbered, short_groups
from relax_hpc.bus import layout
from relax_hpc.bus.producer import Producer
from relax_hpc.bus.sequencer import Sequencer
from relax_hpc.paths import BusPaths
from relax_hpc.scratch import scratch_folder

LIVE_ROWS = 100_000
GROUPS_PER_SHARD = 128


def measure(folder: Path | None) -> Iterator[Row]:
    """Seconds until a sequencer knows what waits, with 100,000 trajectories on the bus."""
    num_shards = LIVE_ROWS // (GROUPS_PER_SHARD * SIBLINGS) + 1
    with scratch_folder("bench", folder) as scratch:
        bus = BusPaths(scratch / "bus")
        layout.create(bus, ["bench-0"], {})
        groups = short_groups(GROUPS_PER_SHARD)
        with Producer(bus, "bench-0", {}) as producer:
            for shard in range(num_shards):
                producer.put(renumbered(groups, shard * GROUPS_PER_SHARD))
        for what in ("not planned", "planned"):
            start = time.perf_counter()
            with Sequencer(bus, prompts_per_step=GROUPS_PER_SHARD, position=None) as sequencer:
                sequencer.finish()
                seconds = time.perf_counter() - start
                yield Row(f"restart, 100,000 live rows, {what}", seconds, "s", aim=2.0)
                for step in range(1, num_shards + 1):
                    sequencer.next_portion(step, timeout_s=30)
