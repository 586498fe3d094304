"""Buses whose first steps are planned, to look at with the tools."""

import numpy as np
from bus_fixtures import PRODUCERS, make_bus, produce, whole_batch

from relax_hpc.bus.producer import Producer
from relax_hpc.bus.sequencer import Sequencer
from relax_hpc.bus.sidecar import SidecarWriter

P = 4
"""Prompt groups of a step; a shard of the two producers holds two."""


def bus_with_steps(root, *, num_guids=16, steps=3, release=0):
    """Shard k of producer r holds the guids 4k + r and 4k + r + 2: step k + 1 reads shards k."""
    paths = make_bus(root)
    for r, name in enumerate(PRODUCERS):
        produce(paths, name, range(r, num_guids, 2), per_shard=2)
    plan(paths, steps, release=release)
    if release:
        for name in PRODUCERS:
            with Producer(paths, name, {}) as producer:
                producer.collect(release * P)
    return paths


def plan(paths, steps, *, release=0, position=None):
    """One incarnation of the trainer; returns the positions after each step."""
    positions, records = {}, []
    with Sequencer(paths, prompts_per_step=P, position=position) as sequencer:
        for step in range(1 + (position.step if position else 0), steps + 1):
            records.append(whole_batch(sequencer, step, timeout_s=1))
            positions[step] = sequencer.position
        if release:
            sequencer.release(release)
    return positions, records


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
