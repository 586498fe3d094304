"""A bus whose shards live and go, phase by phase, for strace to watch.

python metadata_run.py ROOT SHARDS
"""

import os
import sys
from pathlib import Path

import numpy as np
from bus_fixtures import group

from relax_hpc.bus import layout
from relax_hpc.bus.credits import CreditTail
from relax_hpc.bus.producer import Producer
from relax_hpc.bus.reader import Reader
from relax_hpc.bus.sequencer import Sequencer
from relax_hpc.bus.shards.shard import OpenShards
from relax_hpc.bus.sidecar import SidecarWriter
from relax_hpc.runtime.paths import BusPaths

P = 8
"""Prompt groups of a shard, which is also a step."""
LOOKS = 20


def main(root, num_shards):
    paths = BusPaths(root)
    layout.create(paths, ["rollout-0"], {}, sidecar_writers={"reference-0": "reference"})
    producer, writer = Producer(paths, "rollout-0", {}), SidecarWriter(paths, "reference-0", {})
    shards, credits = OpenShards(paths), CreditTail(paths)
    sequencer = Sequencer(
        paths, prompts_per_step=P, position=None, needs=["reference"], shards=shards
    )
    publish(producer, 1)  # what happens once happens here
    widen(writer)
    rank_0, other, records = Reader(paths, shards=shards), Reader(paths), []

    def plan(step):
        records.append(sequencer.next_portion(step, timeout_s=30))
        rank_0.rows(records[-1], range(records[-1].num_trajectories))

    plan(1)
    credits.latest()
    steps = range(2, num_shards + 2)
    begin("publish")
    for step in steps:
        publish(producer, step)
    begin("widen")
    widen(writer)
    begin("plan")
    for step in steps:
        plan(step)
    begin("read")
    for record in records[1:]:
        other.rows(record, range(record.num_trajectories))
    other.close()
    begin("grant")
    for step in steps:
        sequencer.advance(step=step, policy_version=step)
        sequencer.check_fenced()
    begin("look")
    for _ in range(LOOKS):
        sequencer.check_fenced()
        sequencer._intake.poll(num_shards + 2)
        writer.pending()
        credits.latest()
    begin("delete")
    for step in steps:
        producer.collect(P * step)
        writer.collect(P * step)
    begin("end")


def publish(producer, step):
    producer.put([group(guid) for guid in range(P * (step - 1), P * step)])


def widen(writer):
    for pending in writer.pending():
        with writer.open(pending) as shard:
            num_tokens = int(shard.read("index/offsets")[-1])
        writer.put(pending, {"ragged/ref_logprobs": np.zeros(num_tokens, np.float32)})


def begin(phase):
    """Leaves a mark in the trace."""
    os.access(f"/PHASE/{phase}", os.F_OK)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
