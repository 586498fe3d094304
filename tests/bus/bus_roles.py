"""The bus's roles as processes of their own, to be killed, stopped and put on other hosts.

python bus_roles.py make ROOT
python bus_roles.py produce ROOT NAME GROUPS
python bus_roles.py train ROOT GROUPS CHECKPOINT
python bus_roles.py audit ROOT

Exit code 3 and the message on stderr: a named error of the bus.
"""

import hashlib
import json
import os
import sys
import time
from pathlib import Path

from bus_fixtures import PRODUCERS, group

from relax_hpc.bus import layout
from relax_hpc.bus.audit import audit
from relax_hpc.bus.credits import CreditTail
from relax_hpc.bus.plan import PlanPosition
from relax_hpc.bus.producer import Producer
from relax_hpc.bus.reader import Reader
from relax_hpc.bus.sequencer import Sequencer
from relax_hpc.errors import RelaxError
from relax_hpc.paths import BusPaths

P, TIMEOUT_S, NAMED = 4, 60, 3


def digest(trajectories):
    """What a step was trained on, to the bit."""
    seen = hashlib.sha256()
    for t in trajectories:
        seen.update(f"{t.guid}/{t.sibling}/{t.reward}/{t.seed}:".encode())
        for values in (t.token_ids, t.loss_mask, t.rollout_logprobs, t.version_runs):
            seen.update(values.tobytes())
    return seen.hexdigest()


def expected(groups):
    """The digests of an undisturbed run."""
    return [
        digest([t for guid in range(lo, lo + P) for t in group(guid).trajectories])
        for lo in range(0, groups, P)
    ]


def make(root):
    layout.create(BusPaths(root), PRODUCERS, {"run": "test"})


def produce(root, name, groups):
    """Commits its share, one group a shard, and deletes what is released, until all is trained."""
    paths = BusPaths(root)
    share = range(PRODUCERS.index(name), int(groups), len(PRODUCERS))
    credits = CreditTail(paths)
    deadline = time.monotonic() + TIMEOUT_S
    with Producer(paths, name, {"run": "test"}) as producer:
        todo = [g for g in share if g not in producer.committed]
        while True:
            credit = credits.latest()
            retired = credit.retired_guid_below if credit else 0
            todo = [g for g in todo if g >= retired]
            if todo:
                producer.put([group(todo.pop(0))])
                print(producer.name, len(todo), flush=True)
            producer.collect(retired)
            if credit and credit.finished:
                return
            if not todo:
                time.sleep(0.01)
            assert time.monotonic() < deadline, f"the trainer did not finish in {TIMEOUT_S} s"


def train(root, groups, checkpoint):
    """Trains on everything, a checkpoint after each step; prints the digests."""
    state = json.loads(checkpoint.read_text()) if checkpoint.exists() else [None, []]
    position = PlanPosition(*state[0]) if state[0] else None
    paths = BusPaths(root)
    with Sequencer(paths, PRODUCERS, prompts_per_step=P, position=position) as sequencer:
        reader = Reader(paths)
        for step in range(len(state[1]) + 1, int(groups) // P + 1):
            record = sequencer.next_batch(step, timeout_s=TIMEOUT_S)
            state[1].append(digest(reader.rows(record, range(record.num_trajectories))))
            sequencer.advance(step=step, policy_version=step)
            draft = checkpoint.with_suffix(".tmp")
            draft.write_text(json.dumps([sequencer.position, state[1]]))
            draft.rename(checkpoint)
            sequencer.release(step)
        sequencer.finish()
    print(json.dumps(state[1]))


def main(command, root, *words):
    root = Path(root)
    if command == "make":
        make(root)
    elif command == "produce":
        produce(root, *words)
    elif command == "train":
        train(root, words[0], Path(words[1]))
    else:
        print(json.dumps(audit(BusPaths(root))._asdict()))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except RelaxError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.stderr.flush()
        os._exit(NAMED)
