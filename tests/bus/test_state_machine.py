"""Anything that can happen to a bus, in any order, beside a model of what must be true of it."""

import itertools
import os
import shutil
import tempfile
from collections import Counter
from contextlib import closing, suppress
from pathlib import Path

import pytest
from bus_fixtures import PRODUCERS, SIBLINGS, group, judge
from deaths import Killed, death
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from relax_hpc.bus import layout
from relax_hpc.bus.audit import audit
from relax_hpc.bus.credits import Credit, CreditTail
from relax_hpc.bus.frames import read_frames
from relax_hpc.bus.log import SHARDS, RecordKind, read_log
from relax_hpc.bus.plan import read_chain
from relax_hpc.bus.producer import Producer
from relax_hpc.bus.reader import Reader
from relax_hpc.bus.sequencer import Sequencer
from relax_hpc.bus.sidecar import SidecarWriter
from relax_hpc.bus.staleness import staleness
from relax_hpc.errors import BusError, DamagedError, PeerTimeoutError
from relax_hpc.runtime.paths import BusPaths

P, MAX_STALENESS, KEPT, MAX_STEPS, TOKENS = 2, 1, 2, 6, 7 * SIBLINGS
WRITER = "reference-0"
POISON = {"version": 9, "response": 6}
"""A repetition; it counts only if what it repeats does not."""
FLAT = frozenset({1, 2, 5, 6, 7, 11, 12, 14})
"""Groups that teach nothing, where that is looked at."""
deaths = st.one_of(st.just(0), st.just(0), st.integers(1, 30))
names = st.sampled_from(PRODUCERS)
policies = st.sampled_from(["wait", "drop", "mask"])


class Trainer:
    """An incarnation, and what it has been trained on: its own part of a checkpoint."""

    def __init__(self, paths, checkpoint, needs, over_age, flat):
        self.over_age = over_age
        self.step, self.trained = checkpoint["step"], list(checkpoint["trained"])
        self.portions = []
        """Portions of the step that is being trained."""
        self.sequencer = Sequencer(
            paths,
            prompts_per_step=P,
            position=checkpoint["position"],
            needs=needs,
            over_age=over_age,
            max_staleness=MAX_STALENESS,
            judge=judge if flat else None,
        )


class BusMachine(RuleBasedStateMachine):
    """Two producers, a sidecar writer, a trainer, and what is left of those before them."""

    @initialize(sidecars=st.booleans(), refill=st.booleans())
    def make(self, sidecars, refill):
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self.root = Path(tempfile.mkdtemp(dir=memory))
        self.paths = BusPaths(self.root / "bus")
        self.needs = ["reference"] if sidecars else []
        self.flat = FLAT if refill else frozenset()
        writers = {WRITER: "reference"} if sidecars else {}
        layout.create(self.paths, PRODUCERS, {}, sidecar_writers=writers)
        self.names = [*PRODUCERS, *writers]
        self.owners, self.trainer, self.zombies = {}, None, []
        self.checkpoints = [{"step": 0, "trained": [], "position": None}]
        """Checkpoints that may be resumed, oldest first."""
        self.damaged, self.plan, self.bytes = set(), {}, {}
        self.retired = 0

    def teardown(self):
        if not hasattr(self, "root"):
            return
        try:
            self.complete()
        finally:
            for link in Path("/proc/self/fd").iterdir():
                with suppress(OSError):
                    if link.readlink().is_relative_to(self.root):
                        os.close(int(link.name))
            shutil.rmtree(self.root)

    # owners

    @rule(name=names, dies=deaths)
    def open_producer(self, name, dies):
        self.open_owner(name, dies)

    @precondition(lambda self: self.needs)
    @rule(dies=deaths)
    def open_writer(self, dies):
        self.open_owner(WRITER, dies)

    def open_owner(self, name, dies=0):
        before = self.owners.pop(name, None)
        if before:
            self.zombies.append(before)
        kind = SidecarWriter if name == WRITER else Producer
        self.attempt(dies, lambda: self.owners.update({name: kind(self.paths, name, {})}))

    @precondition(lambda self: self.owners.keys() & set(PRODUCERS))
    @rule(name=names, skip=st.integers(0, 3), number=st.integers(1, 3), late=st.integers(0, 3),
          partial=st.booleans(), dies=deaths)  # fmt: skip
    def put(self, name, skip, number, late, partial, dies):
        """Commits some groups that are owed; it may pass over some that come later."""
        producer = self.owners.get(name)
        if producer is None:
            return
        credit = self.credit()
        producer.owe_again(credit.owed)
        todo = self.owed(producer)[skip : skip + number]
        version = max(credit.policy_version - late, 0)
        groups = [self.group(g, version=version) for g in todo]
        if groups:
            act = producer.put_partial if partial else producer.put
            self.attempt(dies, lambda: act(groups), name)

    def owed(self, producer):
        credit = self.credit()
        # The last batch, as far as is known, whatever lies between.
        beyond = max(MAX_STEPS - credit.step - len(credit.batch_ends), 0) * P
        end = credit.batch_ends[: MAX_STEPS - credit.step][-1:] or (credit.step * P,)
        share = range(PRODUCERS.index(producer.name), end[0] + beyond, len(PRODUCERS))
        retired = credit.retired_guid_below
        return [g for g in share if g >= retired and g not in producer.committed]

    def group(self, guid, **kwargs):
        return group(guid, reward=1.0 if guid in self.flat else None, **kwargs)

    @rule(name=names, which=st.integers(0, 20), dies=deaths)
    def put_again(self, name, which, dies):
        """A producer that lost its memory."""
        producer = self.owners.get(name)
        if producer and producer.committed:
            producer.owe_again(self.credit().owed)
            known = sorted(producer.committed)
            if known:
                guid = known[which % len(known)]
                del producer._source[guid]
                self.attempt(dies, lambda: producer.put([self.group(guid, **POISON)]), name)

    @precondition(lambda self: WRITER in self.owners)
    @rule(number=st.integers(1, 3), again=st.booleans(), dies=deaths)
    def widen(self, number, again, dies):
        writer = self.owners[WRITER]
        self.attempt(dies, lambda: self.widen_some(writer, number, again), WRITER)

    def widen_some(self, writer, number, again=False):
        for pending in writer.pending(self.credit().retired_guid_below)[:number]:
            try:
                with writer.open(pending) as shard:
                    columns = {"ragged/ref_logprobs": -shard.read("ragged/token_ids").astype("<f4")}
            except DamagedError:
                writer.skip(pending)
                continue
            for shift in (0, 1) if again else (0,):
                writer.put(pending, {name: v - shift for name, v in columns.items()})

    @rule(name=st.sampled_from([*PRODUCERS, WRITER]), dies=deaths)
    def collect(self, name, dies):
        if name in self.owners:
            owner, retired = self.owners[name], self.credit().retired_guid_below
            self.retired = max(self.retired, retired)
            self.attempt(dies, lambda: owner.collect(retired), name)

    # the trainer

    @rule(over_age=policies, which=st.integers(0, KEPT - 1), dies=deaths)
    def open_trainer(self, over_age, which, dies):
        """Resumes any checkpoint, whatever policy there was before."""
        if self.trainer:
            self.zombies.append(self.trainer)
        self.trainer = None
        checkpoint = self.checkpoints[-1 - which % len(self.checkpoints)]

        def resume():
            self.trainer = Trainer(self.paths, checkpoint, self.needs, over_age, self.flat)

        self.attempt(dies, resume)

    @precondition(lambda self: self.trainer and self.trainer.step < MAX_STEPS)
    @rule(min_tokens=st.sampled_from([TOKENS, 2 * TOKENS, 1000 * TOKENS]), dies=deaths)
    def train(self, min_tokens, dies):
        """One portion, if there is one; with the last of a step the step is done."""
        with suppress(PeerTimeoutError):
            self.attempt(dies, lambda: self.train_portion(min_tokens), "trainer")

    def train_portion(self, min_tokens):
        trainer, step = self.trainer, self.trainer.step + 1
        before = read_chain(self.paths).steps
        record = trainer.sequencer.next_portion(step, timeout_s=-1, min_tokens=min_tokens)
        known = self.plan.setdefault((step, record.portion), record)
        assert record == known, "what was planned did not stay planned"
        assert not self.flat & set(record.guids), "trains on what teaches nothing"
        if trainer.over_age == "drop" and record not in before:
            assert staleness(step, record.policy_version_min) <= MAX_STALENESS
        with closing(Reader(self.paths)) as reader:
            rows = reader.rows(record, range(record.num_trajectories))
        self.check_rows(rows)
        trainer.portions.append([row.guid for row in rows[::SIBLINGS]])
        if record.last:
            trainer.trained.append([g for portion in trainer.portions for g in portion])
            trainer.portions, trainer.step = [], step
            trainer.sequencer.advance(step=step, policy_version=step)

    def check_rows(self, rows):
        assert [row.sibling for row in rows] == list(range(SIBLINGS)) * (len(rows) // SIBLINGS)
        dropped = {drop.guid for drop in read_chain(self.paths).dropped}
        for _, record in filter(lambda found: found[0] in self.damaged, self.committed(PRODUCERS)):
            dropped.update(range(record.guid_min, record.guid_max + 1))
        for row in rows:
            repeats = len(row.token_ids) != 7
            assert not repeats or row.guid in dropped, "a repetition was trained on"
            kwargs = POISON if repeats else {}
            whole = self.group(row.guid, **kwargs).trajectories[row.sibling]
            assert row.token_ids.tobytes() == whole.token_ids.tobytes()
            if self.needs:
                assert (
                    row.columns["ref_logprobs"].tobytes()
                    == (-whole.token_ids.astype("<f4")).tobytes()
                )

    @precondition(lambda self: self.trainer)
    @rule(dies=deaths)
    def look(self, dies):
        self.attempt(dies, lambda: self.trainer.sequencer.look(), "trainer")

    @precondition(lambda self: self.trainer and not self.trainer.portions)
    @rule(releases=st.booleans(), dies=deaths)
    def save(self, releases, dies):
        """The checkpoint is there as a whole or not at all: that is for others to test."""
        trainer = self.trainer
        checkpoint = {"step": trainer.step, "trained": list(trainer.trained)}
        if trainer.step > self.checkpoints[-1]["step"]:
            trainer.sequencer.check_fenced()
            checkpoint["position"] = trainer.sequencer.position
            self.checkpoints = [*self.checkpoints, checkpoint][-KEPT:]
        if releases:
            oldest = min(c["step"] for c in self.checkpoints)
            self.attempt(dies, lambda: trainer.sequencer.release(oldest), "trainer")

    # what should not happen

    @precondition(lambda self: self.zombies)
    @rule(which=st.integers(0, 20), act=st.sampled_from(["commit", "delete", "plan", "grant"]))
    def zombie_acts(self, which, act):
        """It may change nothing but what it may delete, and finds out that it is one."""
        zombie = self.zombies[which % len(self.zombies)]
        if not self.is_superseded(zombie):
            return
        before = self.committed(self.names)
        with suppress(BusError):
            if isinstance(zombie, Trainer):
                self.trainer_acts(zombie, act)
            elif act == "delete":
                zombie.collect(self.credit().retired_guid_below)
                self.retired = max(self.retired, self.credit().retired_guid_below)
            elif isinstance(zombie, SidecarWriter):
                self.widen_some(zombie, 1)
            elif todo := self.owed(zombie):
                zombie.put([self.group(todo[0], version=9, response=1)])
        assert self.committed(self.names) == before, "a zombie has committed a shard"

    def is_superseded(self, zombie):
        """Whether a newer one lived long enough to take over."""
        if isinstance(zombie, Trainer):
            grants = read_frames(self.paths.credits)
            return max(g["plan_fence"] for g, _ in grants) > zombie.sequencer.fence
        records = read_log(self.paths.log(zombie.name))
        return max(r.fence for r in records if r.kind is RecordKind.OPEN) > zombie.fence

    def trainer_acts(self, zombie, act):
        if act == "plan":
            step = min(zombie.sequencer.num_planned, MAX_STEPS - 1) + 1
            with suppress(PeerTimeoutError):
                zombie.sequencer.next_portion(step, timeout_s=-1)
                raise AssertionError("a zombie has planned")
        elif act == "delete":
            zombie.sequencer.release(MAX_STEPS)
            raise AssertionError("a zombie has released")
        else:
            zombie.sequencer.advance(step=9, policy_version=9)
            raise AssertionError("a zombie has granted")

    @precondition(lambda self: self.trainer is None)
    @rule(which=st.integers(0, 50), how=st.sampled_from(["missing", "torn", "foreign"]))
    def damage(self, which, how):
        """A shard none of which is planned, while nobody holds it open."""
        chain = read_chain(self.paths)
        used = {part.uuid for step in chain.steps for part in step.parts}
        used |= {shard.uuid for shard in chain.ignored} | {d.dropped for d in chain.dropped}
        used |= {group.skipped for group in chain.skipped}
        found = [
            path
            for path, record in self.committed(PRODUCERS)
            if record.kind is RecordKind.BASE and record.uuid not in used and path.exists()
        ]
        if found and len(self.damaged) < 3:
            path = found[which % len(found)]
            self.damaged.add(path)
            if how == "missing":
                path.unlink()
            else:
                path.write_bytes(path.read_bytes()[:100] if how == "torn" else b"not a shard")

    # what must be true

    @invariant()
    def committed_files_are_there_and_never_change(self):
        for path, record in self.committed(self.names):
            if path in self.damaged or record.kind is RecordKind.PARTIAL:
                continue
            if path.exists():
                data = path.read_bytes()
                assert self.bytes.setdefault(path, data) == data
            else:
                assert record.guid_max < self.retired, f"{path} is gone"

    @invariant()
    def the_plan_is_one_history(self):
        chain = read_chain(self.paths)
        guids = [guid for record in chain.steps for guid in record.guids]
        guids += [group.guid for group in chain.skipped]
        assert max(Counter(guids).values(), default=0) <= 1, "a prompt is planned twice"
        places = {(r.step, r.portion): r for r in chain.steps}
        assert len(places) == len(chain.steps)
        assert self.plan.items() <= places.items()
        for step in {r.step for r in chain.steps}:
            portions = [r for r in chain.steps if r.step == step]
            assert [r.portion for r in portions] == list(range(len(portions)))
            assert [r.last for r in portions][:-1] == [False] * (len(portions) - 1)
            assert portions[-1].last == (sum(len(r.guids) for r in portions) == P)

    @invariant()
    def what_a_resume_needs_is_there(self):
        chain = read_chain(self.paths)
        for checkpoint in self.checkpoints:
            if checkpoint["position"]:
                chain.check(checkpoint["position"])
        oldest = self.checkpoints[0]["step"]
        for record in chain.steps:
            if record.step > oldest:
                files = [self.paths.shard(*part[:3]) for part in record.parts]
                for roles in record.sidecars.values():
                    files += [self.paths.shard(*sidecar[:3]) for sidecar in roles.values()]
                assert all(file.exists() for file in files)

    # parts

    def complete(self):
        """Everybody comes back, all is done that is owed, and the accounts add up."""
        for name in self.names:
            self.open_owner(name)
        self.trainer = Trainer(self.paths, self.checkpoints[-1], self.needs, "drop", self.flat)
        for _ in range(100):
            for name in PRODUCERS:
                producer, credit = self.owners[name], self.credit()
                producer.owe_again(credit.owed)
                if todo := self.owed(producer):
                    version = credit.policy_version
                    producer.put([self.group(g, version=version) for g in todo[:2]])
            if self.needs:
                self.widen_some(self.owners[WRITER], 100)
            with suppress(PeerTimeoutError):
                self.train_portion(1000 * TOKENS)
            if self.trainer.step == MAX_STEPS:
                break
        sequencer = self.trainer.sequencer
        trained = [g for step in self.trainer.trained for g in step]
        teaching = (guid for guid in itertools.count() if guid not in self.flat)
        expected = list(itertools.islice(teaching, MAX_STEPS * P))
        assert sorted(trained) == expected, "a run that cannot go on, or twice"
        sequencer.finish()
        counts = audit(self.paths)
        assert (counts.planned_twice, counts.dropped) == (0, 0), counts
        explained = counts.planned + counts.duplicates + counts.over_age + counts.damaged
        assert counts.committed == explained + counts.skipped, counts
        assert {group.guid for group in read_chain(self.paths).skipped} <= self.flat
        sequencer.release(MAX_STEPS)
        for name in self.names:
            self.open_owner(name)
            self.owners[name].collect(expected[-1] + 1)
        left = set(self.paths.root.glob("p/*/f*/*")) - self.damaged
        assert not left, f"left over: {left}"

    def attempt(self, dies, act, actor=None):
        """Lets `actor` act, who may die over it."""
        try:
            with death(dies):
                act()
        except Killed:
            if actor == "trainer":
                self.trainer = None
            self.owners.pop(actor, None)

    def credit(self):
        with closing(CreditTail(self.paths)) as tail:
            return tail.latest() or Credit()

    def committed(self, owners):
        """(path, record) of every shard that is committed."""
        return [
            (self.paths.shard(name, record.fence, record.seq), record)
            for name in owners
            for record in read_log(self.paths.log(name))
            if record.kind in SHARDS
        ]


@pytest.fixture(autouse=True)
def snapshots_are_frequent(monkeypatch):
    monkeypatch.setattr("relax_hpc.bus.sequencer.SNAPSHOT_RECORDS", 2)
    monkeypatch.setattr("relax_hpc.bus.sequencer.POLL_S", 0)
    monkeypatch.setattr("relax_hpc.bus.log.BALLAST_BYTES", 16)
    monkeypatch.setattr("relax_hpc.bus.intake.MAX_DAMAGED", 100)


def run_machine(**kwargs):
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large]
    run_state_machine_as_test(
        BusMachine,
        settings=settings(
            deadline=None, database=None, suppress_health_check=checks, print_blob=True, **kwargs
        ),
    )


def test_whatever_happens_in_whatever_order_nothing_is_lost_or_doubled():
    run_machine(max_examples=25, stateful_step_count=25, derandomize=True)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_whatever_happens_for_long_nothing_is_lost_or_doubled():
    run_machine(max_examples=1000, stateful_step_count=60)
