"""The bus's roles as processes of their own, to be killed, stopped and put on other hosts.

python bus_roles.py make ROOT
python bus_roles.py produce ROOT NAME GROUPS
python bus_roles.py train ROOT GROUPS CHECKPOINT
python bus_roles.py act ROOT NAME STEP...     steps: open, put:GUID,
    share:GROUPS, draft, close, touch:FILE, wait:FILE
python bus_roles.py plan ROOT STEP...         steps: open, batch:STEP, advance:STEP, touch, wait
python bus_roles.py follow LOG TURNS FOLDER   reads the log once after each turn of `append`
python bus_roles.py append LOG TURNS FOLDER
python bus_roles.py audit ROOT
python bus_roles.py log ROOT NAME             guids in the order of their valid commit records

Exit code 3 and the message on stderr: a named error of the bus.
"""

import hashlib
import json
import os
import sys
import time
import traceback
from pathlib import Path

from bus_fixtures import PRODUCERS, group, whole_batch

from relax_hpc.bus import layout
from relax_hpc.bus.audit import audit
from relax_hpc.bus.credits import CreditTail
from relax_hpc.bus.durable import GrowingFile
from relax_hpc.bus.log import RECORD_BYTES, CommitRecord, LogWriter, RecordKind, read_log
from relax_hpc.bus.plan import PlanPosition
from relax_hpc.bus.producer import Producer
from relax_hpc.bus.reader import Reader
from relax_hpc.bus.sequencer import Sequencer
from relax_hpc.errors import RelaxError
from relax_hpc.runtime.paths import BusPaths

P, TIMEOUT_S, NAMED = 4, 30, 3


def digest(trajectories):
    """Hashes the rows that a step was trained on, to the bit."""
    seen = hashlib.sha256()
    for t in trajectories:
        seen.update(f"{t.guid}/{t.sibling}/{t.reward}/{t.seed}:".encode())
        for values in (t.token_ids, t.loss_mask, t.columns["rollout_logprobs"], t.version_runs):
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
            todo += producer.owe_again(credit.owed) if credit else []
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


def act(root, name, *steps):
    """A producer that does as it is told, in step with other processes."""
    producer = None
    for step in steps:
        verb, _, word = step.partition(":")
        if verb == "open":
            producer = Producer(BusPaths(root), name, {"run": "test"})
        elif verb == "put":
            producer.put([group(int(word))])
        elif verb == "share":
            for guid in range(PRODUCERS.index(name), int(word), len(PRODUCERS)):
                if guid not in producer.committed:
                    producer.put([group(guid)])
        elif verb == "draft":  # stays open
            draft = BusPaths(root).fence(name, producer.fence) / ".shard.tmp"
            os.open(draft, os.O_WRONLY | os.O_CREAT)
        elif verb == "close":
            producer.close()
        else:
            keep_in_step(verb, Path(word))


def plan(root, *steps):
    """A trainer that does as it is told."""
    sequencer = None
    for step in steps:
        verb, _, word = step.partition(":")
        if verb == "open":
            sequencer = Sequencer(BusPaths(root), prompts_per_step=P, position=None)
        elif verb == "batch":
            print(whole_batch(sequencer, int(word), timeout_s=TIMEOUT_S).guids, flush=True)
        elif verb == "advance":
            sequencer.advance(step=int(word), policy_version=int(word))
        else:
            keep_in_step(verb, Path(word))


def append(log, turns, folder):
    """One record a turn, as `LogWriter` does it; then it is the other one's turn."""
    writer = LogWriter(log)
    for turn in range(int(turns)):
        writer.append(CommitRecord(RecordKind.BASE, writer.fence, turn, rows=1))
        (Path(folder) / f"written-{turn}").touch()
        wait_for(Path(folder) / f"read-{turn}")


def follow(log, turns, folder):
    """Prints how many records each single look at the log showed."""
    direct, anew = GrowingFile(log), GrowingFile(log)
    anew.direct = False
    seen = []
    for turn in range(int(turns)):
        wait_for(Path(folder) / f"written-{turn}")
        seen.append([len(tail.read_from(0)) // RECORD_BYTES for tail in (direct, anew)])
        (Path(folder) / f"read-{turn}").touch()
    print(json.dumps([direct.direct, seen]))


def keep_in_step(verb, file):
    if verb == "touch":
        file.touch()
    else:
        wait_for(file)


def wait_for(file):
    deadline = time.monotonic() + TIMEOUT_S
    while not file.exists():
        assert time.monotonic() < deadline, f"{file} did not appear in {TIMEOUT_S} s"
        time.sleep(0.005)


def train(root, groups, checkpoint):
    """Trains on everything, a checkpoint after each step; prints the digests."""
    checkpoint = Path(checkpoint)
    state = json.loads(checkpoint.read_text()) if checkpoint.exists() else [None, []]
    position = PlanPosition(*state[0]) if state[0] else None
    paths = BusPaths(root)
    with Sequencer(paths, prompts_per_step=P, position=position) as sequencer:
        reader = Reader(paths)
        for step in range(len(state[1]) + 1, int(groups) // P + 1):
            record = whole_batch(sequencer, step, timeout_s=TIMEOUT_S)
            state[1].append(digest(reader.rows(record, range(record.num_trajectories))))
            sequencer.advance(step=step, policy_version=step)
            draft = checkpoint.with_suffix(".tmp")
            draft.write_text(json.dumps([sequencer.position, state[1]]))
            draft.rename(checkpoint)
            sequencer.release(step)
        sequencer.finish()
    print(json.dumps(state[1]))


def log(root, name):
    records = read_log(BusPaths(root).log(name))
    print(json.dumps([record.guid_min for record in records if record.rows]))


def count(root):
    print(json.dumps(audit(BusPaths(root))._asdict()))


COMMANDS = {
    "make": make, "produce": produce, "act": act, "plan": plan, "append": append,
    "follow": follow, "train": train, "log": log, "audit": count,
}  # fmt: skip


def run(*words):
    """Runs a command to its end and the process with it."""
    code = 1
    try:
        command, root, *rest = words
        COMMANDS[command](Path(root), *rest)
        code = 0
    except RelaxError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        code = NAMED
    except BaseException:  # noqa: BLE001 - the outermost frame of a process
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    run(*sys.argv[1:])
