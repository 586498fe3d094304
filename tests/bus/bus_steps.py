"""Buses whose first steps are planned, to look at with the tools."""

import numpy as np
from bus_fixtures import PRODUCERS, P, batch, make_bus, produce_all, sequencer

from relax_hpc.bus.producer import Producer
from relax_hpc.bus.sidecar import SidecarWriter


def bus_with_steps(root, *, num_guids=16, steps=3, release=0):
    """Shard k of producer r holds the guids 4k + r and 4k + r + 2: step k + 1 reads shards k."""
    paths = make_bus(root)
    produce_all(paths, num_guids, per_shard=2)
    plan(paths, steps, release=release)
    if release:
        for name in PRODUCERS:
            with Producer(paths, name, {}) as producer:
                producer.collect(release * P)
    return paths


def plan(paths, steps, *, release=0, position=None):
    """One incarnation of the trainer; returns the positions after each step."""
    positions, records = {}, []
    with sequencer(paths, position) as seq:
        for step in range(1 + (position.step if position else 0), steps + 1):
            records.append(batch(seq, step))
            positions[step] = seq.position
        if release:
            seq.release(release)
    return positions, records


def widened_bus(root, num_guids=12):
    """The same shards, widened by a reference role; nothing is planned."""
    paths = make_bus(root, writers={"reference-0": "reference"})
    produce_all(paths, num_guids, per_shard=2)
    widen(paths, 0)
    return paths


def widen(paths, value):
    """Reference log-probabilities for every shard: `value` + guid of each token's row."""
    with SidecarWriter(paths, "reference-0", {}) as writer:
        for pending in writer.pending():
            with writer.open(pending) as shard:
                guids = np.repeat(shard.read("row/guid"), np.diff(shard.read("index/offsets")))
            writer.put(pending, {"ragged/ref_logprobs": (value + guids).astype(np.float32)})


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


SHARD = ("rollout-0", 1, 1)
"""Guids 4 and 6, of step 2."""
