"""The lives of some shards, phase by phase, to be watched with strace."""

import os
import sys
from pathlib import Path

import numpy as np
from bus_fixtures import group

from relax_hpc.bus import layout
from relax_hpc.bus.producer import Producer
from relax_hpc.bus.reader import Reader
from relax_hpc.bus.sequencer import Sequencer
from relax_hpc.bus.sidecar import SidecarWriter
from relax_hpc.paths import BusPaths

P = 16
"""Prompt groups of a shard, which is also a step."""


def begin(phase):
    os.access(f"/PHASE/{phase}", os.F_OK)


def widen(writer):
    for pending in writer.pending():
        with writer.open(pending) as shard:
            num_tokens = int(shard.read("index/offsets")[-1])
        writer.put(pending, {"ragged/ref_logprobs": np.zeros(num_tokens, np.float32)})


def main(root, shards):
    paths = BusPaths(Path(root))
    layout.create(paths, ["rollout-0"], {}, sidecar_writers={"reference-0": "reference"})
    producer, writer = Producer(paths, "rollout-0", {}), SidecarWriter(paths, "reference-0", {})
    options = {"prompts_per_step": P, "position": None, "needs": ["reference"]}
    sequencer, reader = Sequencer(paths, ["rollout-0"], **options), Reader(paths)
    groups = [[group(g) for g in range(k * P, (k + 1) * P)] for k in range(shards + 1)]
    producer.put(groups[0])  # what happens once happens here
    widen(writer)
    sequencer.next_batch(1, timeout_s=30)
    begin("publish")
    for held in groups[1:]:
        producer.put(held)
    begin("widen")
    widen(writer)
    begin("admit")
    records = [sequencer.next_batch(step, timeout_s=30) for step in range(2, shards + 2)]
    begin("read")
    for record in records:
        reader.rows(record, range(record.num_trajectories))
    reader.close()
    begin("grant")
    for step in range(2, shards + 2):
        sequencer.advance(step=step, policy_version=step)
        sequencer.check_fenced()
    begin("delete")
    for step in range(2, shards + 2):
        producer.collect(P * step)
        writer.collect(P * step)
    begin("end")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
