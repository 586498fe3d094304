"""The actor's loop: what every rank does in which order, what each is given, how it is made."""

from types import SimpleNamespace

import numpy as np
import pytest
from role_fakes import Events, Journal, NobodyElse, Rank1, config, index_of, row

from relax_hpc.bus import layout
from relax_hpc.bus.plan import PlanRecord, ShardRange
from relax_hpc.errors import TrainingError
from relax_hpc.inference.members import Member
from relax_hpc.roles.actor import build as actor_task
from relax_hpc.roles.actor import loop
from relax_hpc.roles.actor.loop import ActorOtherRank, Reference, Stages
from relax_hpc.roles.dealing.portions import Batch
from relax_hpc.roles.role import ModelRank
from relax_hpc.runtime.comm.world import SoloWorld
from relax_hpc.runtime.files.run_secret import RunSecret
from relax_hpc.runtime.paths import RunPaths

ROWS = [
    [row(0, 0, reward=1.0, version=1), row(0, 1, response=1, version=0)],
    [row(1, 0, reward=0.0, version=0), row(1, 1, reward=1.0, version=1)],
]


class Skip:
    reason, num_samples, samples, in_a_row, is_model = "grad norm is nan", 0, (), 3, False


class Trainer:
    dp_rank, skip = 0, None
    costs = {"time/forward": 1.0}  # noqa: RUF012

    def __init__(self, journal, step=0):
        self.journal, self.step = journal, step

    def accumulate(self, trajectories, micro_batches, loss, *, last, mini_batches):
        given = [(t.guid, t.sibling, t.loss_mask.tolist()) for t in trajectories]
        advantages = [float(t.columns["advantages"]) for t in trajectories]
        self.journal.note("accumulate", given, micro_batches, advantages, last)
        self.refs = [t.columns.get("ref_logprobs") for t in trajectories]

    def update(self):
        self.step += 1
        self.journal.note("update", self.step)
        return {"loss": 0.5}

    def stream_weights(self):
        yield "w", self.step

    def keep(self, name, folder=None, *, lasting=False):
        if lasting:
            self.journal.note("refresh")

    def forward_kept_logprobs(self, name, trajectories, micro_batches):
        assert name == "reference"
        self.journal.note("score", [t.guid for t in trajectories], micro_batches)
        return [-t.token_ids.astype(np.float32) for t in trajectories]


class Reader:
    """Rows of portion p are those of prompt p."""

    def __init__(self, journal):
        self.journal = journal

    def parts(self, record):
        return {}

    def index(self, record):
        return index_of(ROWS[record.portion])

    def rows(self, record, rows, columns):
        self.journal.note("read", record.step, record.portion, rows)
        self.columns = columns
        return [ROWS[record.portion][n] for n in rows]


def record(step, portion):
    parts = [ShardRange("rollout-0", 1, portion, f"u{portion}", 0, 2)]
    return PlanRecord(step, [portion], parts, 2, 0, 9, portion, last=portion == 1)


class Rank0:
    """Two portions a step; now and then an engine comes that has to be given weights first."""

    def __init__(self, journal, newcomers=(), again=()):
        self.journal, self.newcomers, self.again = journal, list(newcomers), list(again)
        self.portions, self.batch = {}, Batch(config(), Reader(Journal()))

    def next_task(self, step, timers):
        self.journal.note("next", step)
        if step in self.newcomers:
            self.newcomers.remove(step)
            return None
        number = self.portions.get(step, 0)
        self.portions[step] = number + 1
        return self.batch.deal(record(step, number))

    def publish(self, version, tensors):
        self.journal.note("publish", version, dict(tensors))
        again = version in self.again
        if again:
            self.again.remove(version)
        return again

    def end_step(self, step, fields, timers):
        self.journal.note("end_step", step, fields | timers.seconds)

    def note_skipped(self, step, skip):
        self.journal.note("skipped", step, skip.reason)

    def finish(self):
        self.journal.note("finish")


def run(journal, *, rank0=None, trainer=None, **settings):
    trainer = trainer or Trainer(journal)
    made = config(reference__placement="actor", **settings)
    reference = Reference(trainer, refresh_every=2, events=Events())
    stages = Stages(lambda: journal.note("save", trainer.step), [reference])
    reader = Reader(journal)
    loop.run(made, SoloWorld(), trainer, reader, rank0 or Rank0(journal), stages)
    assert reader.columns == {"ragged/ref_logprobs"}
    return trainer


def plain_run(journal, trainer, **stages):
    """Without a reference."""
    stages = Stages(lambda: None, **stages)
    loop.run(config(), SoloWorld(), trainer, Reader(journal), Rank0(journal), stages)


STEP = ["next", "read", "score", "accumulate"] * 2 + ["update", "publish"]


def test_a_step_trains_publishes_renews_saves_and_is_noted_in_this_order():
    journal = Journal()
    run(journal)
    assert [entry[0] for entry in journal] == [
        "publish",
        *STEP, "save", "end_step",
        *STEP, "refresh", "save", "end_step",
        "finish",
    ]  # fmt: skip
    published = journal.of("publish")
    assert published == [("publish", version, {"w": version}) for version in range(3)]
    assert journal.of("save") == [("save", 1), ("save", 2)]


def test_a_portion_is_read_and_trained_on_with_its_rows_advantages_and_whether_it_is_the_last():
    journal = Journal()
    trainer = run(journal)
    assert journal.of("read")[:2] == [("read", 1, 0, [0, 1]), ("read", 1, 1, [0, 1])]
    full, short = [0, 0, 1, 1, 1], [0, 0, 1]
    first, second = journal.of("accumulate")[:2]
    assert first[1:] == ([(0, 0, full), (0, 1, short)], [[0, 1]], [0.5, -0.5], False)
    assert second[1:] == ([(1, 0, full), (1, 1, full)], [[0, 1]], [-0.5, 0.5], True)
    for found, given in zip(trainer.refs, ROWS[1], strict=True):
        assert found.tolist() == (-given.token_ids).tolist()  # of the row's own tokens


def test_over_age_tokens_leave_the_loss_only_where_the_settings_say_mask():
    """Step 2 trains policy 1: with a staleness of 0, what policy 0 sampled is over age."""
    for over_age, short in (("mask", [0, 0, 0]), ("drop", [0, 0, 1])):
        journal = Journal()
        trainer = Trainer(journal, step=1)
        settings = {"schedule__over_age": over_age, "schedule__max_staleness": 0}
        run(journal, trainer=trainer, **settings)
        first = journal.of("accumulate")[0][1]
        assert first == [(0, 0, [0, 0, 1, 1, 1]), (0, 1, short)]


def test_engines_and_trainer_are_compared_when_a_batch_is_whole_and_not_applied_yet():
    journal = Journal()
    trainer = Trainer(journal)
    plain_run(journal, trainer, checks=[lambda: journal.note("check", trainer.step)])
    kinds = [entry[0] for entry in journal.of("accumulate", "check", "update", "publish")]
    assert kinds == ["publish", *["accumulate", "accumulate", "check", "update", "publish"] * 2]
    assert journal.of("check") == [("check", 0), ("check", 1)]


def test_before_every_step_and_when_a_wait_is_broken_off_it_is_asked_whether_the_end_is_near():
    journal = Journal()
    trainer = Trainer(journal)
    stages = Stages(lambda: None, stop=lambda: journal.note("stop", trainer.step))
    rank0 = Rank0(journal, newcomers=[2])
    loop.run(config(), SoloWorld(), trainer, Reader(journal), rank0, stages)
    kinds = [entry[:2] for entry in journal.of("stop", "next", "end_step")]
    assert kinds == [
        ("stop", 0), ("next", 1), ("next", 1), ("end_step", 1),
        ("stop", 1), ("next", 2), ("stop", 1), ("next", 2), ("next", 2), ("end_step", 2),
    ]  # fmt: skip


def test_engines_that_come_are_given_the_current_weights_before_the_batch_goes_on():
    journal = Journal()
    run(journal, rank0=Rank0(journal, newcomers=[2], again=[1, 1]))  # twice somebody is left
    after_first = [entry[:2] for entry in journal][journal.index(("save", 1)) :]
    assert after_first[2:5] == [("next", 2), ("publish", 1), ("next", 2)]
    assert [entry[1] for entry in journal.of("publish")] == [0, 1, 1, 1, 1, 2]


def test_the_record_of_a_step_has_the_update_the_costs_and_the_time():
    journal = Journal()
    run(journal)
    _, step, fields = journal.of("end_step")[1]
    assert (step, fields["loss"], fields["time/forward"]) == (2, 0.5, 1.0)
    assert {f"time/{name}" for name in ("read", "publish", "save")} <= fields.keys()
    assert "time/train" not in fields  # the trainer measures that itself


def test_a_run_that_cannot_learn_ends_before_the_step_is_published_or_saved():
    journal = Journal()
    trainer = Trainer(journal)
    trainer.skip = Skip
    with pytest.raises(TrainingError, match="3 updates in a row were skipped"):
        run(journal, trainer=trainer)
    assert journal[-2:] == [("update", 1), ("skipped", 1, Skip.reason)]
    assert len(journal.of("publish")) == 1 and not journal.of("save", "refresh", "end_step")


def portions_of(step):
    """As rank 0 deals them to two ranks."""
    batch = Batch(config(actor__layout__data_parallel=2), Reader(Journal()))
    return [batch.deal(record(step, number)) for number in range(2)]


def follow(journal, trainer, world):
    trainer.dp_rank = 1
    duties, stages = ActorOtherRank(NobodyElse(journal)), Stages(lambda: journal.note("save"))
    loop.run(
        config(actor__layout__data_parallel=2), world, trainer, Reader(journal), duties, stages
    )
    assert world.told == []


def test_a_rank_besides_rank_0_trains_its_own_share_and_helps_to_publish():
    journal, dealt = Journal(), portions_of(1)
    told = [False, *dealt, False, None, True, False, *portions_of(2), False]
    follow(journal, Trainer(journal), Rank1(told, SoloWorld()))
    # With the first step's end an engine comes, and one is left over at once.
    assert [entry[1] for entry in journal.of("help")] == [0, 1, 1, 1, 2]
    [mine] = {row for rows in dealt[0].micro_batches[1] for row in rows}
    assert journal.of("read")[0] == ("read", 1, 0, [mine])
    _, given, micro_batches, advantages, last = journal.of("accumulate")[0]
    assert (given[0][:2], micro_batches, last) == ((0, mine), [[0]], False)
    assert advantages == [0.5 - mine]
    assert [entry[0] for entry in journal.of("update", "save")] == ["update", "save"] * 2


def test_of_a_replica_one_rank_reads_and_the_others_are_told():
    class Second(Rank1):
        rank = 1

        def bcast(self, value):
            assert value == []
            return [ROWS[0][1]]

    journal = Journal()
    told = [False, *portions_of(1), False, *portions_of(2), False]
    follow(journal, Trainer(journal), Rank1(told, Second([])))
    assert not journal.of("read")
    assert journal.of("accumulate")[0][1] == [(0, 1, [0, 0, 1])]


class Lease:
    def __init__(self, journal):
        self.journal = journal

    def to_trainer(self, trainer):
        self.journal.note("to trainer")

    def to_engines(self, trainer):
        self.journal.note("to engines")


def test_with_shared_gpus_engines_have_them_before_every_publication_and_the_trainer_to_train():
    journal = Journal()
    plain_run(journal, Trainer(journal), lease=Lease(journal))
    kinds = ("to engines", "to trainer", "read", "publish", "accumulate", "update")
    step = ["read", "to trainer", "accumulate"] * 2 + ["update", "to engines", "publish"]
    expected = ["to engines", "publish", *step, *step]
    assert [entry[0] for entry in journal.of(*kinds)] == expected


def test_the_sequencer_and_the_clients_of_engines_are_made_as_the_settings_say(
    tmp_path, monkeypatch
):
    given, released = [], []
    for name in ("Sequencer", "EngineClient"):
        monkeypatch.setattr(actor_task, name, lambda *args, **kwargs: given.append((args, kwargs)))
    made = SimpleNamespace(release=lambda: released.append(True))
    monkeypatch.setattr(actor_task, "ActorRank0", lambda *_: made)
    monkeypatch.setattr(actor_task.Idle, "of", lambda *_: "idle")
    settings = config(
        schedule__prompts_per_step=6, schedule__over_age="mask", schedule__max_staleness=3,
        algorithm__groups__name="as_sampled",
        bus__keep_steps=5, reference__placement="own", engines__rollout__count=2,
        weights__advanced__kv_cache="recompute", weights__advanced__timeout_s=40,
    )  # fmt: skip
    paths = RunPaths(tmp_path)
    layout.create(paths.bus, [], {}, sidecar_writers={"reference-0": "reference"})
    for resumed in (SimpleNamespace(position="position"), None):
        rank = ModelRank(settings, paths, None, None, "events")
        parts = ("reader", "shards", "publisher", "checkpoints")
        actor_task._rank0(rank, *parts, resumed, "is_ending", "tell_others")
    assert released == [True]  # whoever saved that checkpoint may not have come to it
    (_, first), (_, again) = given
    assert again == first | {"position": None}
    asked = {"position": "position", "needs": ("reference",), "over_age": "mask"}
    asked |= {
        "prompts_per_step": 6,
        "max_staleness": 3,
        "keep_steps": 5,
        "most_skipped": 10 * 6 * 4,
    }
    assert first == first | asked
    secret = RunSecret.new()
    actor_task._connect(settings, secret, Member("m", "1", "http://m", 1, "sglang", "HEALTHY"))
    (at, how) = given[2]
    assert at == ("http://m", secret.engine_token("m", "1"))
    assert how["recompute"] and how["has_prefix_cache"] and how["timeout_s"] > 40


def test_the_reference_in_the_actor_is_the_model_of_its_path_renewed_as_often_as_it_says():
    events, kept = Events(), []
    trainer = SimpleNamespace(keep=lambda *of, lasting=False: kept.append((*of, lasting)))
    for placement in ("none", "own"):
        assert actor_task.own_columns(config(reference__placement=placement), trainer, events) == []
    settings = config(
        reference__placement="actor", reference__path="elsewhere", reference__refresh_every=6
    )
    [found] = actor_task.own_columns(settings, trainer, events)
    for step in range(1, 7):
        found.end_step(step)
    assert kept == [("reference", settings.reference.path, False), ("reference", True)]
    assert events.of("reference") == [{"step": 6}]
