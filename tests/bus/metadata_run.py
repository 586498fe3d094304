"""64 ranks of a run, simulated in one process, for strace to watch: 32 engines, 32 trainer ranks.

The trainer is DP 4 x TP 8; one rank of each replica reads. Prints what it did as JSON.
"""

import json
import os
import sys
from pathlib import Path

from bus_fixtures import group, whole_batch

from relax_hpc.bus import layout
from relax_hpc.bus.credits import CreditTail
from relax_hpc.bus.producer import Producer
from relax_hpc.bus.reader import Reader
from relax_hpc.bus.sequencer import Sequencer
from relax_hpc.bus.shards.open_shards import OpenShards
from relax_hpc.paths import BusPaths
from relax_hpc.roles.dealing.micro_batches import plan_micro_batches

ENGINES, REPLICAS, PROMPTS = 32, 4, 256
WARM, STEPS = 2, 4
POLLS = 20
"""Looks that every rank takes at its logs while nothing happens."""


def main(root):
    paths = BusPaths(root)
    names = [f"rollout-{rank}" for rank in range(ENGINES)]
    layout.create(paths, names, {})
    producers = [Producer(paths, name, {}) for name in names]
    tails = [CreditTail(paths) for _ in names]
    shards = OpenShards(paths)
    sequencer = Sequencer(paths, prompts_per_step=PROMPTS, position=None, shards=shards)
    readers = [Reader(paths, shards=shards if rank == 0 else None) for rank in range(REPLICAS)]
    others = 0
    for step in range(1, WARM + STEPS + 1):
        if step == WARM + 1:
            mark("begin")
        for rank, producer in enumerate(producers):
            guids = range((step - 1) * PROMPTS + rank, step * PROMPTS, ENGINES)
            producer.put([group(guid, response=1 + guid * 37 % 400) for guid in guids])
        record = whole_batch(sequencer, step, timeout_s=10)
        index = readers[0].index(record)
        lengths = (index.prompt_len + index.response_len).tolist()
        parts = [part for part in record.parts for _ in range(part.lo, part.hi)]
        numbers = {uuid: n for n, uuid in enumerate(dict.fromkeys(p.uuid for p in record.parts))}
        plan = plan_micro_batches(
            lengths,
            num_ranks=REPLICAS,
            budget=4096,
            shards=[numbers[part.uuid] for part in parts],
        )
        for reader, micro_batches in zip(readers, plan, strict=True):
            rows = sorted(row for rows in micro_batches for row in rows)
            reader.rows(record, rows)
            if step > WARM and reader is not readers[0]:
                others += len({parts[row].uuid for row in rows})
        sequencer.advance(step=step, policy_version=step)
        sequencer.release(step - 1)
        for producer, tail in zip(producers, tails, strict=True):
            producer.collect(tail.latest().retired_guid_below)
    mark("end")
    for _ in range(POLLS):
        sequencer.check_fenced()
        sequencer._intake.poll(step)
        for tail in tails:
            tail.latest()
    mark("idle")
    shards_written = ENGINES * STEPS
    print(json.dumps({"steps": STEPS, "shards": shards_written, "opens_by_others": others}))


def mark(name):
    os.access(f"/mark-{name}", os.F_OK)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
