"""The reference role on two ranks, and the reference in the actor: what is scored, dealt, noted."""

import errno
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from role_fakes import Events, Journal, Rank1, row

from relax_hpc.bus.credits import Credit
from relax_hpc.bus.durable import FULL_RETRY_S, BusFullError
from relax_hpc.bus.plan import ShardRange
from relax_hpc.config.model import Layout, MegatronConfig
from relax_hpc.errors import DamagedError
from relax_hpc.roles.actor.loop import Reference
from relax_hpc.roles.dealing.sight import StepMedia
from relax_hpc.roles.scorer import build as rank0
from relax_hpc.roles.scorer import loop
from relax_hpc.roles.scorer.build import ScorerRank0
from relax_hpc.roles.scorer.loop import Round
from relax_hpc.roles.training.duties import Duties
from relax_hpc.runtime.telemetry.timers import Timers


def pending(number, rows=2, tokens=10, damaged=False):
    record = SimpleNamespace(
        fence=1, seq=number, uuid=f"u{number}", rows=rows, tokens=tokens, guid_min=10 * number
    )
    return SimpleNamespace(producer="rollout-0", record=record, damaged=damaged)


class Writer:
    """Shards that wait for their sidecars."""

    def __init__(self, journal, shards):
        self.journal, self.shards, self.is_full = journal, list(shards), False

    def collect(self, retired):
        self.journal.note("collect", retired)

    def pending(self, retired):
        self.journal.note("pending", retired)
        return self.shards

    def open(self, shard):
        if shard.damaged:
            raise DamagedError(f"{shard.record.uuid}: is damaged")
        return SimpleNamespace(close=lambda: None)

    def skip(self, shard):
        self.journal.note("skip", shard.record.uuid)

    def put(self, shard, columns, *, policy_version):
        assert policy_version == -1  # the model never changes
        if self.is_full:
            raise BusFullError(Path("shard"), OSError(errno.ENOSPC, "no space left"))
        [(name, values)] = columns.items()
        self.journal.note("put", shard.record.uuid, name, values.tolist())


class Reader:
    """Rows of 3 + n tokens."""

    def index(self, record):
        count = sum(part.hi - part.lo for part in record.parts)
        return SimpleNamespace(
            guid=np.arange(count, dtype=np.uint64),
            prompt_len=np.full(count, 3),
            response_len=np.arange(count, dtype=np.int32),
        )


class Credits:
    def __init__(self, *credits):
        self.credits = list(credits)

    def latest(self):
        return self.credits.pop(0) if len(self.credits) > 1 else self.credits[0]


COLUMN = "ragged/a_column"


def rank0_of(journal, shards, *credits, data_parallel=1, budget=10):
    layout = Layout(data_parallel=data_parallel)
    config = MegatronConfig(tokens_per_micro_batch=budget, layout=layout)
    events = Events()
    writer = Writer(journal, shards)
    credits = Credits(*(credits or [None]))
    return ScorerRank0(config, COLUMN, writer, Reader(), credits, events), events


def test_a_round_is_the_oldest_shards_that_fill_it_and_a_large_one_comes_alone():
    def chosen(*tokens, **settings):
        mine, _ = rank0_of(Journal(), [pending(n, 1, size) for n, size in enumerate(tokens)])
        mine._megatron = MegatronConfig(tokens_per_micro_batch=10, layout=Layout(**settings))
        return [part.seq for part in mine.next_task(0, Timers()).parts]

    assert chosen(20, 20, 1) == [0, 1]  # four micro-batches of ten
    assert chosen(20, 21, 1) == [0]  # in their order: the third does not overtake
    assert chosen(99, 1) == [0]
    assert chosen(20, 21, 40, data_parallel=2) == [0, 1]


def test_a_damaged_shard_is_passed_over_and_the_next_is_scored():
    journal = Journal()
    mine, _ = rank0_of(journal, [pending(0, damaged=True), pending(1)])
    assert [part.uuid for part in mine.next_task(0, Timers()).parts] == ["u1"]
    assert journal.of("skip") == [("skip", "u0")]


def test_rows_are_whole_shards_in_order_and_nothing_retired_is_asked_for():
    journal = Journal()
    shards = [pending(3, rows=2, tokens=7), pending(4, rows=3, tokens=12)]
    credit = Credit(retired_guid_below=30)
    mine, _ = rank0_of(journal, shards, credit)
    found = mine.next_task(0, Timers())
    assert journal.of("collect", "pending") == [("collect", 30), ("pending", 30)]
    assert found.parts == [
        ShardRange("rollout-0", 1, 3, "u3", 0, 2), ShardRange("rollout-0", 1, 4, "u4", 0, 3),
    ]  # fmt: skip
    [micro_batches] = found.micro_batches
    assert sorted(n for rows in micro_batches for n in rows) == [0, 1, 2, 3, 4]
    assert mine.next_task(0, Timers()).step == found.step + 1  # so that readers let go


def test_each_shard_gets_the_logprobs_of_its_own_rows_in_their_order():
    journal = Journal()
    mine, events = rank0_of(journal, [pending(3, rows=2, tokens=7), pending(4, rows=1, tokens=3)])
    mine.next_task(0, Timers())
    mine.put([np.full(size, -value, np.float32) for size, value in ((3, 1), (4, 2), (3, 3))])
    assert journal.of("put") == [
        ("put", "u3", COLUMN, [-1, -1, -1, -2, -2, -2, -2]),
        ("put", "u4", COLUMN, [-3, -3, -3]),
    ]
    [scored] = events.of("scored")
    told = (scored["num_shards"], scored["num_trajectories"], scored["num_tokens"])
    assert (*told, scored["first_guid"]) == (2, 3, 10, 30)
    assert {"time/wait", "time/score", "time/write"} <= scored.keys()


def test_what_finds_no_space_is_kept_and_nothing_new_is_scored_until_it_is_written(monkeypatch):
    monkeypatch.setattr(rank0, "SIGN_OF_LIFE_S", 0.0)
    monkeypatch.setattr(rank0, "POLL_S", 0.0)
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(rank0.time, "monotonic", lambda: clock.now)
    journal = Journal()
    mine, _ = rank0_of(journal, [pending(3, rows=1, tokens=3)])
    mine.next_task(0, Timers())
    mine._writer.is_full = True
    mine.put([np.zeros(3, np.float32)])
    mine._writer.is_full = False
    ticks = iter([100.0] * 4 + [101.0] * 99)
    monkeypatch.setattr(rank0.time, "monotonic", lambda: next(ticks))
    assert mine.next_task(0, Timers()).parts == []  # the ranks hear that it waits
    assert not journal.of("put")  # it is not tried at once again
    mine.put([])
    clock.now = 100.0 + FULL_RETRY_S
    monkeypatch.setattr(rank0.time, "monotonic", lambda: clock.now)
    assert len(mine.next_task(0, Timers()).parts) == 1  # there is more to score
    assert journal.of("put") == [("put", "u3", COLUMN, [0, 0, 0])]


def test_when_training_is_over_nothing_more_is_scored():
    mine, _ = rank0_of(Journal(), [pending(0)], Credit(step=5, finished=True))
    assert mine.next_task(0, Timers()) is None


class Replica:
    def __init__(self, rank, told=None):
        self.rank, self.told = rank, told

    def bcast(self, value):
        assert (value is None) == (self.rank != 0)
        return self.told if value is None else value


@pytest.mark.parametrize("reads", [True, False])
def test_a_rank_scores_its_share_and_the_one_that_read_it_gives_it_back(reads):
    """Rows 0 and 3 of four are this replica's."""
    found = Round(1, [], [[[1], [2]], [[3], [0]]])
    rows = [row(0), row(3, response=1)]
    scored = [np.zeros(5, np.float32), np.ones(3, np.float32)]
    journal = Journal()

    class Rows:
        def rows(self, record, wanted, columns):
            journal.note(wanted, columns)
            return rows

    class Scorer:
        dp_rank = 1

        def forward_logprobs(self, trajectories, micro_batches):
            assert trajectories == rows and micro_batches == [[1], [0]]
            return scored

    world = Rank1([found, None], Replica(0 if reads else 1, rows))
    loop.run(world, Scorer(), Rows(), Duties(), StepMedia(Rows(), None))
    assert journal == ([([0, 3], [])] if reads else [])
    assert world.given == [dict(zip([0, 3], scored, strict=True)) if reads else {}]


def test_rank_0_gets_all_rows_in_their_order():
    got = []
    a, d = np.zeros(5, np.float32), np.ones(5, np.float32)

    class World:
        rank = 0

        def bcast(self, value):
            return value

        def split(self, color):
            return Replica(0)

        def allgather(self, mine):
            return [mine, {1: "b", 2: "c"}]

    class Deals:
        rounds = [Round(1, [], [[[3, 0]], [[1, 2]]]), None]  # noqa: RUF012

        def next_task(self, step, timers):
            return self.rounds.pop(0)

        def put(self, scored, *, version=-1):
            got.append(scored)

    scorer = SimpleNamespace(dp_rank=0, forward_logprobs=lambda rows, micro_batches: [a, d])
    reader = SimpleNamespace(rows=lambda record, rows, columns: [row(n) for n in rows])
    loop.run(World(), scorer, reader, Deals(), StepMedia(reader, None))
    assert got == [[a, "b", "c", d]]


def test_every_trajectory_is_filled_with_its_own_logprobs_and_a_renewal_is_noted():
    journal, events = Journal(), Events()

    class Trainer:
        def keep(self, name, folder=None, *, lasting=False):
            journal.note("keep", name, folder, lasting)

        def forward_kept_logprobs(self, name, trajectories, micro_batches):
            journal.note("logprobs", name, micro_batches)
            return [-each.token_ids for each in trajectories]

    reference = Reference(Trainer(), "elsewhere", refresh_every=2, events=events)
    given = [row(1), row(2)]
    for before, after in zip(given, reference.fill(given, [[1], [0]]), strict=True):
        assert after.columns["ref_logprobs"].tolist() == (-before.token_ids).tolist()
        assert "ref_logprobs" not in before.columns
        assert after.token_ids is before.token_ids
    for step in range(1, 5):
        reference.end_step(step)
    assert journal == [
        ("keep", "reference", "elsewhere", False),
        ("logprobs", "reference", [[1], [0]]),
        *[("keep", "reference", None, True)] * 2,
    ]
    assert events.of("reference") == [{"step": 2}, {"step": 4}]
