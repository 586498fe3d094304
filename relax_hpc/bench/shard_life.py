"""The lives of some shards, phase by phase, for strace to watch: `python -m ... FOLDER SHARDS`."""

import os
import sys
from pathlib import Path

import numpy as np

from relax_hpc.bench.workload import renumbered, short_groups
from relax_hpc.bus import layout
from relax_hpc.bus.producer import Producer
from relax_hpc.bus.reader import Reader
from relax_hpc.bus.sequencer import Sequencer
from relax_hpc.bus.sidecar import SidecarWriter
from relax_hpc.paths import BusPaths

GROUPS = 128
"""Prompt groups of a shard, which is also a step."""


def main(root: Path, shards: int) -> None:
    """Makes a bus at `root`, and `shards` shards that are widened, trained on and deleted."""
    paths = BusPaths(root)
    layout.create(paths, ["rollout-0"], {}, sidecar_writers={"reference-0": "reference"})
    producer, writer = Producer(paths, "rollout-0", {}), SidecarWriter(paths, "reference-0", {})
    sequencer = Sequencer(paths, prompts_per_step=GROUPS, position=None, needs=["reference"])
    reader, groups = Reader(paths), short_groups(GROUPS)
    producer.put(groups)  # what happens once happens here
    _widen(writer)
    sequencer.next_portion(1, timeout_s=30)
    steps = range(2, shards + 2)
    begin("publish")
    for step in steps:
        producer.put(renumbered(groups, (step - 1) * GROUPS))
    begin("widen")
    _widen(writer)
    begin("admit")
    records = [sequencer.next_portion(step, timeout_s=30) for step in steps]
    begin("read")
    for record in records:
        reader.rows(record, range(record.num_trajectories))
    reader.close()
    begin("grant")
    for step in steps:
        sequencer.advance(step=step, policy_version=step)
        sequencer.check_fenced()
    begin("delete")
    for step in steps:
        producer.collect(GROUPS * step)
        writer.collect(GROUPS * step)
    begin("end")


def begin(phase: str) -> None:
    """Leaves a mark in the trace."""
    os.access(f"/PHASE/{phase}", os.F_OK)


def _widen(writer: SidecarWriter) -> None:
    for pending in writer.pending():
        with writer.open(pending) as shard:
            num_tokens = int(shard.read("index/offsets").astype(np.int64)[-1])
        writer.put(pending, {"ragged/ref_logprobs": np.zeros(num_tokens, np.float32)})


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
