"""Rank 0 of the actor: what it asks of bus and publisher, in which order, and what it notes."""

import math
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from role_fakes import Events, Journal, NobodyElse, config, index_of, row

from relax_hpc.bus import layout
from relax_hpc.bus.plan import PlanPosition, PlanRecord, ShardRange, SkippedGroup
from relax_hpc.bus.producer import Producer
from relax_hpc.bus.reader import Reader
from relax_hpc.bus.sequencer import Sequencer
from relax_hpc.errors import FencedError
from relax_hpc.roles.actor import loop
from relax_hpc.roles.actor.loop import ActorOtherRank
from relax_hpc.roles.actor.rank0 import ActorRank0
from relax_hpc.roles.training import duties as turns
from relax_hpc.runtime.comm.world import connect
from relax_hpc.runtime.files.run_secret import RunSecret
from relax_hpc.runtime.paths import BusPaths
from relax_hpc.runtime.telemetry.timers import Timers
from relax_hpc.schema import PromptGroup
from relax_hpc.trainer.checkpoints.store import Checkpoint
from relax_hpc.weights.files import Loaded
from relax_hpc.weights.publish import Published
from relax_hpc.weights.transport import DigestComparison

DONE = Published(
    1, ["rollout-0"], [], False, 4_000_000_000, 0.25, {"wire": 2.0, "total": 3.0}, None
)


UNSOLVED = SkippedGroup(1, "u", 8, 1, 1, solved=False, reward=0.0)
TAUGHT = {"num_tokens": 1, "reward/mean": 0.5, "groups/teaching": 0.875, "groups/solved": 0.0}


class FakeSequencer:
    duplicates = 6

    def __init__(self, journal, records=()):
        self.journal, self.records = journal, list(records)

    def check_fenced(self):
        self.journal.note("check_fenced")

    def find_skipped(self, step):
        return []

    def count_over_age(self, step):
        return 16

    def advance(self, **credit):
        self.journal.note("advance", credit)

    def release(self, step):
        self.journal.note("release", step)

    def finish(self):
        self.journal.note("finish")

    def lacks_groups(self):
        return True

    def next_portion(self, step, *, on_wait, **settings):
        self.journal.note("next_portion", step, settings)
        on_wait()
        return self.records.pop(0)


class FakePublisher:
    def __init__(self, journal, published=DONE):
        self.journal, self.published, self.newcomers = journal, published, False

    def publish(self, version, tensors, *, check, check_fenced):
        self.journal.note("publish", version, list(tensors), check)
        check_fenced()
        return self.published._replace(version=version)

    def wait_for_loads(self):
        self.journal.note("wait_for_loads")
        return True

    def has_newcomers(self):
        return self.newcomers

    def take_ended_loads(self):
        return []


class FakeReader:
    """Rows of prompt groups of two, of which the first is solved by the later policy."""

    def parts(self, record):
        return {}

    def index(self, record):
        pairs = (
            (row(n, 0, reward=1.0, version=2), row(n, 1, response=1, version=1))
            for n in record.guids
        )
        return index_of([each for pair in pairs for each in pair])


class FakeCheckpoints:
    def __init__(self, *steps):
        self.steps = steps

    def complete(self):
        return [Checkpoint(None, step, PlanPosition(1, step, step)) for step in self.steps]


def rank0_of(journal, *, published=DONE, records=(), critic=(), **settings):
    events = Events()
    settings = {"weights__advanced__checksum_every": 3, "schedule__num_steps": 8} | settings
    publisher = FakePublisher(journal, published)
    sequencer = FakeSequencer(journal, records)
    checkpoints = [FakeCheckpoints(3, 6, 9), *critic]
    rank0 = ActorRank0(config(**settings), sequencer, FakeReader(), publisher, checkpoints, events)
    return rank0, publisher, events


def test_a_rank_that_was_superseded_publishes_nothing():
    journal = Journal()
    rank0, _, events = rank0_of(journal)

    def fenced():
        raise FencedError("another trainer took over")

    rank0.sequencer.check_fenced = fenced
    with pytest.raises(FencedError):
        rank0.publish(1, iter([]))
    assert journal == [] and events.all == []


def test_the_credit_is_granted_once_engines_have_the_weights():
    journal = Journal()
    rank0, _, _ = rank0_of(journal)
    assert rank0.publish(2, iter(["w"])) is False
    assert journal == [
        ("check_fenced",),
        ("publish", 2, ["w"], False),
        ("check_fenced",),  # by the publisher, once it has written
        ("advance", {"step": 2, "policy_version": 2}),
    ]


def test_weights_are_compared_at_multiples_and_at_the_last_version_and_never_at_the_first():
    def checked(**settings):
        journal = Journal()
        rank0, _, _ = rank0_of(journal, **settings)
        for version in range(9):
            rank0.publish(version, iter([]))
        return [version for _, version, _, check in journal.of("publish") if check]

    assert checked() == [3, 6, 8]
    assert checked(weights__advanced__checksum_every=0) == [8]


def test_only_after_the_last_version_loads_are_waited_for():
    journal = Journal()
    rank0, _, _ = rank0_of(journal)
    assert not rank0.publish(7, iter([]))
    assert not journal.of("wait_for_loads")
    assert rank0.publish(8, iter([]))  # some came late
    assert journal[-1] == ("wait_for_loads",)
    journal.clear()
    rank0, _, _ = rank0_of(journal, published=DONE._replace(again=True))
    assert rank0.publish(8, iter([]))
    assert not journal.of("wait_for_loads")  # there is another publication first


def test_a_publication_is_noted_with_its_speed_and_what_was_compared():
    rank0, _, events = rank0_of(Journal())
    rank0.publish(1, iter([]))
    [event] = events.of("publish")
    assert (event["step"], event["version"], event["members"]) == (1, 1, ["rollout-0"])
    assert event["sync/wire"] == 2.0 and event["sync/total"] == 3.0
    assert event["sync/gb_per_s"] == 2.0 and event["sync/paused"] == 0.25
    assert "verified" not in event and "seconds" not in event and not events.of("verify")
    verified = DigestComparison("x", {"rollout-0": "y"}, False)
    published = DONE._replace(verified=verified, seconds={"load": 1.0, "write": 8.0}, members=[])
    rank0, _, events = rank0_of(Journal(), published=published)
    rank0.publish(1, iter([]))
    [event] = events.of("publish")
    assert event["sync/write_gb_per_s"] == 0.5 and "sync/gb_per_s" not in event
    [told] = events.of("verify")
    assert told == {"version": 1, "trainer": "x", "members": {"rollout-0": "y"}, "equal": False}


def portion(number, guids=(4, 5), *, last=True):
    parts = [ShardRange("rollout-0", 2, guid, f"u{guid}", 0, 2) for guid in guids]
    return PlanRecord(3, list(guids), parts, 4, 0, 20, number, last)


def test_the_next_portion_is_as_large_and_waited_for_as_long_as_the_settings_say():
    journal = Journal()
    rank0, publisher, _ = rank0_of(
        journal, records=[portion(0)], actor__tokens_per_micro_batch=50,
        actor__advanced__portion_micro_batches=3, launch__advanced__peer_timeout_s=77,
    )  # fmt: skip
    publisher.newcomers = True
    assert rank0.next_task(3, Timers()) is None  # engines are given weights first
    publisher.newcomers = False
    assert rank0.next_task(3, Timers()).record == portion(0)
    asked = {"min_tokens": 142.5, "timeout_s": 77, "may_lack_groups": False}
    assert journal == [("next_portion", 3, asked)] * 2


class Skip:
    reason, num_samples, in_a_row = "loss is nan", 1, 2

    class Sample:
        guid, sibling, what = 5, 1, "loss"

        def _asdict(self):
            return {"guid": 5, "sibling": 1, "what": "loss"}

    samples = (Sample(),)


def test_a_skipped_update_names_the_shard_of_a_sample_of_any_portion_of_its_step():
    records = [portion(0, (5,), last=False), portion(1, (6,)), portion(0, (7,))]
    rank0, _, events = rank0_of(Journal(), records=records)
    rank0.next_task(3, Timers())
    rank0.next_task(3, Timers())
    rank0.note_skipped(3, Skip)
    rank0.next_task(4, Timers())
    rank0.note_skipped(4, Skip)
    [third, fourth] = events.of("skipped")
    assert (third["step"], third["reason"], third["in_a_row"]) == (3, "loss is nan", 2)
    path = "bus/p/rollout-0/f2/000000000005.h5"
    assert [sample["shard"] for sample in third["samples"]] == [path]
    assert [sample["shard"] for sample in fourth["samples"]] == [None]  # not of that step


def test_a_step_is_noted_with_its_speed(monkeypatch):
    rank0, _, events = rank0_of(Journal(), algorithm__groups__name="as_sampled")
    left = rank0._config.schedule.num_steps - 3
    monkeypatch.setattr(rank0._record._pace, "end_step", lambda *told: {(4.0, left): 5.0}[told])
    monkeypatch.setattr(rank0._batch, "describe", lambda step: {"num_tokens": 100})
    timers = SimpleNamespace(seconds={"time/save": 2.0}, phases=["phase"], elapsed=4.0)
    rank0.end_step(3, {"loss": 0.5}, timers)
    [step] = events.of("step")
    assert step == {
        "step": 3, "eta_s": 5.0, "num_tokens": 100, "loss": 0.5, "time/save": 2.0,
        "time/other": 2.0, "time/step": 4.0, "tokens_per_s": 25.0,
    }  # fmt: skip
    assert events.of("phases") == [{"step": 3, "phases": ["phase"]}]


def test_a_step_notes_and_the_log_says_what_is_not_learned_from(monkeypatch, caplog):
    """Of 32 groups, and as many that were skipped, 36 have no spread."""
    monkeypatch.setattr(FakeSequencer, "find_skipped", lambda *_: [UNSOLVED] * 64)
    drop = {"schedule__prompts_per_step": 32, "schedule__over_age": "drop"}
    rank0, _, events = rank0_of(Journal(), records=[portion(0, (5,))], **drop)
    rank0.next_task(1, Timers())
    [said] = caplog.messages
    assert said.startswith("not learned from: 64 prompt groups, skipped for step 1 so far: nobody")
    caplog.clear()
    monkeypatch.setattr(FakeSequencer, "find_skipped", lambda *_: [UNSOLVED] * 32)
    monkeypatch.setattr(rank0._batch, "describe", lambda step: TAUGHT)
    for step in (2, 3):
        rank0.end_step(step, {}, SimpleNamespace(seconds={}, phases=[], elapsed=1.0))
    told = [(step["groups/no_spread"], step["staleness/over_age"]) for step in events.of("step")]
    assert told == [(36 / 64, 16 / 80)] * 2
    begins = [line[:34] for line in caplog.messages]
    assert begins == ["not learned from: 56 % of the grou", "not learned from: 20 % of the grou"]


def test_the_record_of_a_step_says_what_its_batch_was_like_and_no_other():
    records = [portion(0, (5,), last=False), portion(1, (6,)), portion(0, (7,))]
    rank0, _, events = rank0_of(Journal(), records=records)
    for step, portions in ((3, 2), (4, 1)):
        timers = Timers()
        for _ in range(portions):
            rank0.next_task(step, timers)
        rank0.end_step(step, {}, timers)
    third, fourth = events.of("step")
    assert (third["num_trajectories"], third["batch/portions"], third["num_tokens"]) == (4, 2, 16)
    assert (fourth["num_trajectories"], fourth["batch/portions"]) == (2, 1)
    assert (third["staleness/max"], fourth["staleness/max"]) == (1, 2)  # policy 1 sampled some
    assert {"time/wait", "time/read"} <= third.keys()


@pytest.mark.parametrize(("steps", "released"), [((), 0), ((2, 8), 2), ((5, 9), 3)])
def test_what_the_critic_has_no_checkpoint_behind_is_not_released(steps, released):
    journal = Journal()
    rank0, *_ = rank0_of(journal, critic=[FakeCheckpoints(*steps)])
    rank0.release()
    assert journal == [("release", released)]


class Both:
    dp_rank, skip, costs, step = 0, None, {}, 0

    def accumulate(self, rows, micro_batches, objective, *, last, mini_batches):
        self.guids = [row.guid for row in rows]

    def update(self):
        self.step += 1
        return {}

    def stream_weights(self):
        return iter([])


def test_ranks_that_wait_for_rank_0_hear_from_it_while_it_waits_for_rollout(tmp_path, monkeypatch):
    """Else they give up on it, where rollout may be absent, or a disk is full, for long."""
    monkeypatch.setattr(turns, "TURN_S", 0.1)
    settings = config(
        run_root=str(tmp_path), launch__layout="separate", weights__transport="files",
        schedule__prompts_per_step=1, schedule__num_steps=1, algorithm__groups__name="as_sampled",
        actor__layout__tensor_parallel=2,
    )  # fmt: skip
    bus, secret, trainers = BusPaths(settings.run_dir / "bus"), RunSecret.new(), [Both(), Both()]
    layout.create(bus, ["rollout-0"], {})
    monkeypatch.setattr(ActorRank0, "end_step", lambda *_: None)

    def rank(number):
        world = connect(
            "files", rank=number, size=2, rendezvous=tmp_path / "ranks", secret=secret, timeout_s=2
        )
        reader, duties = Reader(bus), ActorOtherRank(NobodyElse(Journal()))
        if number == 0:
            sequencer = Sequencer(bus, prompts_per_step=1, position=None)
            publisher = FakePublisher(Journal(), DONE._replace(verified=None))
            publisher.wait_for_loads = lambda: False
            duties = ActorRank0(
                settings, sequencer, reader, publisher, [], Events(),
                tell_others=turns.Turns(world).tell,
            )  # fmt: skip
        stages = loop.Stages(lambda: None)
        loop.run(settings, world, trainers[number], reader, duties, stages)

    with ThreadPoolExecutor(2) as threads:
        ranks = [threads.submit(rank, number) for number in range(2)]
        time.sleep(3.5)
        with Producer(bus, "rollout-0", {}) as producer:
            producer.put([PromptGroup(0, [row(0, 0), row(0, 1, reward=1.0)])])
        for each in ranks:
            each.result()
    assert [trainer.guids for trainer in trainers] == [[0, 0], [0, 0]]


def test_of_what_an_engine_loads_by_itself_the_time_and_the_failure_are_noted():
    rank0, publisher, events = rank0_of(Journal())

    def loaded(name, reason, seconds, verified=None):
        member = SimpleNamespace(id=name)
        return Loaded(member, 4, seconds, verified=verified, reason=reason)

    digests = DigestComparison("x", {"rollout-1": "x"}, True)
    publisher.take_ended_loads = lambda: [
        loaded("rollout-0", "broken", {}),
        loaded("rollout-1", "", {"pause": 0.5, "load": 8.0}, digests),
    ]
    rank0.publish(5, iter([]))
    bad, good = events.of("loaded")
    assert (bad["members"], bad["fenced"], bad["error"]) == ([], ["rollout-0"], "broken")
    assert (good["members"], good["fenced"], good["step"], good["version"]) == (
        ["rollout-1"], [], 4, 4,
    )  # fmt: skip
    assert good["sync/paused"] == 8.5 and math.isclose(good["sync/gb_per_s"], 0.5)
    assert "sync/paused" not in bad
    assert [event["version"] for event in events.of("verify")] == [4]
