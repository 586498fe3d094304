"""The roles of a small run, as they are when each of them may be killed at any moment.

Everything a trajectory holds follows from its guid and the policy that sampled it, so what was
trained on can be told to the bit. Roles give way to each other in `turn`.
"""

import hashlib
import json
import math
import os
import random
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
from bus_fixtures import PRODUCERS, TOKENS, P, group, judge, with_media

from relax_hpc.bus import layout
from relax_hpc.bus.credits import Credit, CreditTail
from relax_hpc.bus.plan import PlanPosition, read_chain
from relax_hpc.bus.producer import Producer
from relax_hpc.bus.reader import Reader
from relax_hpc.bus.sequencer import Sequencer
from relax_hpc.bus.sidecar import SidecarWriter
from relax_hpc.bus.staleness import mask_over_age
from relax_hpc.errors import BusError, DamagedError
from relax_hpc.runtime.paths import BusPaths

WRITERS = {"reference-0": "reference", "reference-1": "reference"}
TRAINER = "trainer"
STEPS, MAX_STALENESS, TIMEOUT_S = 4, 1, 120
POISON = {"version": 77, "response": 6}
"""A repetition; nobody may ever train on it."""


class Setup(NamedTuple):
    """The kind of a run."""

    over_age: str = "wait"
    portion_tokens: float = math.inf
    sidecars: bool = False
    partial: bool = False
    repeats: bool = False
    """Owners forget what they did and commit it again, with other content."""
    refill: bool = False
    """Two groups of five have no spread, and are skipped."""
    media: bool = False
    """Prompts show an image and a video with its sound, which two neighbours have in common."""
    per_shard: int = 2
    save_every: int = 1
    keep: int = 2
    """Checkpoints."""


SETUPS = {
    "wait": Setup(),
    "wait, all": Setup(sidecars=True, partial=True, repeats=True, media=True, per_shard=3),
    "wait, media": Setup(media=True),
    "wait, portions": Setup(portion_tokens=2 * TOKENS, sidecars=True, save_every=2, keep=1),
    "refill": Setup(refill=True, repeats=True, per_shard=3),
    "refill, all": Setup(
        portion_tokens=2 * TOKENS,
        sidecars=True,
        partial=True,
        repeats=True,
        save_every=2,
        keep=1,
        refill=True,
    ),
    "drop": Setup("drop", repeats=True, partial=True),
    "drop, all": Setup(
        "drop", TOKENS, sidecars=True, partial=True, repeats=True, media=True, keep=1
    ),
    "mask": Setup("mask", sidecars=True, repeats=True, per_shard=3),
    "mask, portions": Setup("mask", 2 * TOKENS, partial=True, per_shard=1, save_every=2),
}


class World(NamedTuple):
    """One run's folder, and how it behaves."""

    root: Path
    setup: Setup

    @property
    def bus(self):
        return BusPaths(self.root / "bus")

    @property
    def roles(self):
        """Every process of the run."""
        return [*PRODUCERS, *(WRITERS if self.setup.sidecars else ()), TRAINER]

    @property
    def batches(self):
        """Guids of each step, as they are without a kill where batches do not go by time."""
        few = P * STEPS * (2 if self.setup.refill else 1)
        guids = [guid for guid in range(few) if not self.is_flat(guid)][: P * STEPS]
        return [guids[lo : lo + P] for lo in range(0, P * STEPS, P)]

    @property
    def num_groups(self):
        """Prompt groups that are sampled, those that are skipped included."""
        return self.batches[-1][-1] + 1

    def is_flat(self, guid):
        """Whether a group has no spread."""
        return self.setup.refill and guid % 5 < 2

    def group(self, guid, **kwargs):
        made = group(guid, reward=1.0 if self.is_flat(guid) else None, **kwargs)
        return with_media(made) if self.setup.media else made

    @property
    def checkpoints(self):
        """Files of those that are whole, oldest first."""
        return sorted((self.root / "checkpoints").glob("step*.json"))

    def make(self):
        (self.root / "checkpoints").mkdir(parents=True)
        writers = WRITERS if self.setup.sidecars else {}
        layout.create(self.bus, PRODUCERS, {"run": "crashes"}, sidecar_writers=writers)


class Incarnation(NamedTuple):
    """One process's view of itself."""

    name: str
    number: int
    """0-based."""
    seed: int
    points: object
    turn: object
    """Gives way to the other roles; returns when it is this one's turn again."""

    @property
    def wait(self):
        """Is called while something is waited for."""
        return self.turn

    def dice(self, *what):
        """Random numbers that are the same whenever this incarnation asks for them."""
        return random.Random(repr((self.seed, self.name, self.number, what)))


def sample(world, guid, policy_version, *, again, dice):
    """A prompt group. Where lateness matters some come late, and have an old version then."""
    if world.setup.over_age == "wait":
        return world.group(guid, version=guid // P)
    late = 0 if again else dice.choice([0, 0, 1, 2, 3])
    return world.group(guid, version=max(policy_version - late, 0))


def produce(world, me):
    me.points.stage = "open"
    producer = Producer(world.bus, me.name, {"incarnation": me.number}, spares=me.number % 2)
    credits = CreditTail(world.bus)
    share = range(PRODUCERS.index(me.name), world.num_groups, len(PRODUCERS))
    owed_again, dice = set(), me.dice("samples")
    may_repeat = world.setup.repeats
    while True:
        me.turn()
        credit = credits.latest() or Credit()
        owed_again.update(producer.owe_again(credit.owed))
        me.points.stage = "collect"
        producer.collect(credit.retired_guid_below)
        if credit.finished:
            break
        todo = [g for g in share if g >= credit.retired_guid_below and g not in producer.committed]
        todo = [g for g in todo if g < end_of_lag(credit)]
        if world.setup.over_age != "wait":
            dice.shuffle(todo)
        groups = [
            sample(world, g, credit.policy_version, again=g in owed_again, dice=dice)
            for g in todo[: world.setup.per_shard]
        ]
        if not groups:
            continue
        if world.setup.partial:
            keep_partial(world, producer, me, groups)
        me.points.stage = "put"
        producer.put(groups)
        if may_repeat and dice.random() < 0.5:
            may_repeat = False
            repeat(world, producer, me, dice.choice(sorted(producer.committed)))
    me.points.stage = "close"
    producer.close()


def end_of_lag(credit):
    """The first guid that is not to be sampled yet."""
    ends = credit.batch_ends
    return ends[MAX_STALENESS] if ends else P * (credit.step + 1 + MAX_STALENESS)


def keep_partial(world, producer, me, groups):
    """Every third group is begun by one put and ended by another."""
    for found in producer.partial.values():
        whole = world.group(found.guid, version=found.trajectories[0].version_runs[0, 1])
        for part, trajectory in zip(found.trajectories, whole.trajectories, strict=True):
            n = len(part.token_ids)
            assert n == 5, f"partial group {found.guid} came back with {n} tokens"
            assert np.array_equal(part.token_ids[:3], trajectory.token_ids[:3])
    begun = [g for g in groups if g.guid % 3 == 0 and g.guid not in producer.partial]
    if begun:
        me.points.stage = "put_partial"
        versions = [g.trajectories[0].version_runs[0, 1] for g in begun]
        producer.put_partial(
            [
                world.group(g.guid, version=v, response=2)
                for g, v in zip(begun, versions, strict=True)
            ]
        )
        me.turn()


def repeat(world, producer, me, guid):
    """Does what a producer does that has lost its memory."""
    me.turn()
    if guid in producer.committed:
        me.points.stage = "put again"
        del producer._source[guid]
        producer.put([world.group(guid, **POISON)])


def widen(world, me):
    me.points.stage = "open"
    writer = SidecarWriter(world.bus, me.name, {"incarnation": me.number})
    credits = CreditTail(world.bus)
    may_repeat, dice = world.setup.repeats, me.dice("shards")
    while True:
        me.turn()
        credit = credits.latest() or Credit()
        me.points.stage = "collect"
        writer.collect(credit.retired_guid_below)
        if credit.finished:
            break
        me.points.stage = "pending"
        todo = writer.pending(credit.retired_guid_below)
        for pending in todo[: dice.choice([1, 2])]:
            me.points.stage = "read"
            try:
                with writer.open(pending) as shard:
                    columns = ref_logprobs(shard)
            except DamagedError:  # deleted since its credits were read
                writer.skip(pending)
                continue
            me.points.stage = "put"
            writer.put(pending, columns)
            if may_repeat and dice.random() < 0.5:
                may_repeat = False
                me.points.stage = "put again"
                writer.put(pending, {name: values - 1 for name, values in columns.items()})
    me.points.stage = "close"
    writer.close()


def ref_logprobs(shard):
    """A value that follows from the token it stands for."""
    return {"ragged/ref_logprobs": (-shard.read("ragged/token_ids")).astype(np.float32)}


def train(world, me):
    me.points.stage = "open"
    sequencer, state = resume(world, me)
    reader = Reader(world.bus)
    for step in range(state["step"] + 1, STEPS + 1):
        train_step(world, me, sequencer, reader, state, step)
        me.points.stage = "advance"
        sequencer.advance(step=step, policy_version=step)
        if step % world.setup.save_every == 0:
            me.points.stage = "checkpoint"
            sequencer.check_fenced()
            save(world, state | {"position": sequencer.position}, sequencer.fence)
            sequencer.check_fenced()
            keep_newest(world, world.setup.keep)
            me.points.stage = "release"
            sequencer.release(oldest_step(world))
        me.turn()
    me.points.stage = "finish"
    keep_newest(world, 1)
    sequencer.release(STEPS)
    sequencer.finish()
    me.points.stage = "close"
    sequencer.close()


def open_sequencer(world, position):
    return Sequencer(
        world.bus,
        prompts_per_step=P,
        position=position,
        needs=("reference",) if world.setup.sidecars else (),
        over_age=world.setup.over_age,
        max_staleness=MAX_STALENESS,
        judge=judge if world.setup.refill else None,
    )


def resume(world, me):
    """From one of the checkpoints; those that a fenced trainer slipped in are refused."""
    states = [json.loads(file.read_text()) for file in reversed(world.checkpoints)]
    if not states:
        return open_sequencer(world, None), {"step": 0, "chain": [], "guids": []}
    if me.dice("resume").random() < 0.3:
        states.reverse()
    refused = []
    for state in states:
        try:
            return open_sequencer(world, PlanPosition(*state["position"])), state
        except BusError as error:
            if "plan position" not in str(error):
                raise
            refused.append(error)
    raise refused[0]


def train_step(world, me, sequencer, reader, state, step):
    """Adds a link to the chain of all that was trained on, in the order in which it was."""
    seen = hashlib.sha256(state["chain"][-1].encode() if state["chain"] else b"")
    guids, last = [], False
    while not last:
        me.points.stage = "plan"
        record = sequencer.next_portion(
            step, timeout_s=TIMEOUT_S, min_tokens=world.setup.portion_tokens, on_wait=me.wait
        )
        me.points.stage = "read"
        for number, row in enumerate(reader.rows(record, range(record.num_trajectories))):
            if world.setup.media:
                order = (2, 0, 1)
                several = reader.media(record, [(number, place) for place in order])
                for place, each in zip(order, several, strict=True):
                    assert each.medium[2:] == row.media[place][2:]
                    assert np.array_equal(each.medium.data, row.media[place].data)
            assert ("ref_logprobs" in row.columns) == world.setup.sidecars
            if world.setup.over_age == "mask":
                row = mask_over_age(row, step=step, max_staleness=MAX_STALENESS)
            digest(seen, row)
        guids, last = guids + record.guids, record.last
        me.turn()
    state["step"] = step
    state["chain"] = [*state["chain"], seen.hexdigest()]
    state["guids"] = [*state["guids"], guids]


def digest(seen, row):
    seen.update(f"{row.guid}/{row.sibling}/{row.seed}/{row.reward}/{int(row.finish)}:".encode())
    for values in (row.token_ids, row.loss_mask, row.version_runs, *row.columns.values()):
        seen.update(values.dtype.str.encode() + values.tobytes())
    for medium in row.media:
        seen.update(f"{medium.kind} {medium[2:]} {row.media_spans.tolist()}".encode())
        seen.update(medium.data.tobytes())


def expected_chain(world):
    """Hashes a run in which batches are the prompts in order, from nothing but their content."""
    chain = []
    for guids in world.batches:
        seen = hashlib.sha256(chain[-1].encode() if chain else b"")
        for guid in guids:
            for row in world.group(guid, version=guid // P).trajectories:
                ref = {"ref_logprobs": -row.token_ids.astype(np.float32)}
                digest(seen, row.with_columns(**ref) if world.setup.sidecars else row)
        chain.append(seen.hexdigest())
    return chain


def valid_states(world, chain):
    """Reads the checkpoints, oldest first, without those of fenced trainers."""
    states = []
    for file in world.checkpoints:
        state = json.loads(file.read_text())
        with suppress(BusError):
            chain.check(PlanPosition(*state["position"]))
            states.append(state)
    return states


def newest_state(world):
    """Reads the newest of the checkpoints that can be resumed."""
    return valid_states(world, read_chain(world.bus))[-1]


def save(world, state, fence):
    """Published whole, and never in place of another trainer's."""
    file = world.root / "checkpoints" / f"step{state['step']:03d}.{fence:03d}.json"
    draft = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.write(fd, json.dumps(state).encode())
    os.fsync(fd)
    os.close(fd)
    os.rename(draft, file)  # noqa: PTH104  so that it is counted


def keep_newest(world, number):
    for old in world.checkpoints[:-number]:
        old.unlink(missing_ok=True)


def oldest_step(world):
    return int(world.checkpoints[0].name[4:7])


def tidy(world):
    """Every role comes back once more after all is done; nothing is committed any more."""
    with open_sequencer(world, PlanPosition(*newest_state(world)["position"])) as sequencer:
        sequencer.finish()
    credits = CreditTail(world.bus)
    retired = credits.latest().retired_guid_below
    credits.close()
    for name in PRODUCERS:
        with Producer(world.bus, name, {}) as owner:
            owner.collect(retired)
    for name in WRITERS if world.setup.sidecars else ():
        with SidecarWriter(world.bus, name, {}) as owner:
            owner.collect(retired)


def role_of(name):
    if name in PRODUCERS:
        return produce
    return train if name == TRAINER else widen
