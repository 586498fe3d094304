"""The reference role on a real bus: a model that only says back what it was given."""

import errno
import threading
from pathlib import Path

import numpy as np
import pytest
from bus_fixtures import PRODUCERS, SIBLINGS, produce, whole_batch

from relax_hpc.bus import durable, layout
from relax_hpc.bus.credits import CreditTail
from relax_hpc.bus.durable import BusFullError
from relax_hpc.bus.log import RecordKind, read_log
from relax_hpc.bus.reader import Reader
from relax_hpc.bus.sequencer import Sequencer
from relax_hpc.bus.sidecar import SidecarWriter
from relax_hpc.comm.star import StarWorld
from relax_hpc.comm.world import SoloWorld
from relax_hpc.config.layout import Layout, MegatronConfig
from relax_hpc.paths import BusPaths
from relax_hpc.roles.actor.reference import Reference
from relax_hpc.roles.dealing.sight import Sight
from relax_hpc.roles.scorer import loop, rank0
from relax_hpc.roles.scorer.build import COLUMN
from relax_hpc.telemetry.events import EventWriter, read_events

GROUPS = 12


class Echo:
    """Logprobs of a token are its number, negated."""

    def __init__(self, dp_rank=0, fail_after=None):
        self.dp_rank, self.rows, self.calls, self.fail_after = dp_rank, 0, 0, fail_after

    def forward_logprobs(self, trajectories, micro_batches):
        self.calls += bool(trajectories)
        if self.fail_after is not None and self.calls > self.fail_after:
            raise KeyError("killed")
        self.rows += len(trajectories)
        assert sorted(r for batch in micro_batches for r in batch) == [*range(len(trajectories))]
        return [-row.token_ids.astype(np.float32) for row in trajectories]


@pytest.fixture
def paths(tmp_path):
    made = BusPaths(tmp_path / "bus")
    layout.create(made, PRODUCERS, {}, sidecar_writers={"reference-0": "reference"})
    for number, name in enumerate(PRODUCERS):
        produce(made, name, range(number, GROUPS, len(PRODUCERS)), per_shard=2)
    return made


def open_rank0(
    paths, events, *, data_parallel=1, budget=20, name="reference", column=COLUMN, view=None
):
    return rank0.Rank0(
        MegatronConfig(tokens_per_micro_batch=budget, layout=Layout(data_parallel=data_parallel)),
        column,
        SidecarWriter(paths, f"{name}-0", {}),
        Reader(paths),
        CreditTail(paths),
        events,
        view,
    )


def score(paths, tmp_path, scorer=None):
    """Runs the role until everything there is has been scored."""
    scorer = scorer or Echo()
    with EventWriter(tmp_path / "events" / "reference-0.jsonl", "reference", 0) as events:
        mine = open_rank0(paths, events)
        with finished_when(paths, lambda: not mine._writer.pending() and not mine._unsent):
            loop.run(SoloWorld(), scorer, Reader(paths), mine, Sight(Reader(paths), None))
        mine.close()
    return scorer


class finished_when:  # noqa: N801 - reads as a statement
    """A trainer that says it is finished as soon as `done` holds."""

    def __init__(self, paths, done):
        self.paths, self.done, self.over = paths, done, threading.Event()

    def __enter__(self):
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()

    def watch(self):
        with Sequencer(self.paths, prompts_per_step=4, position=None) as sequencer:
            while not self.over.wait(0.02):
                if self.done():
                    sequencer.finish()
                    return

    def __exit__(self, *_):
        self.over.set()
        self.thread.join(10)


def sidecars(paths):
    return [r for r in read_log(paths.log("reference-0")) if r.kind is RecordKind.SIDE]


def planned_rows(paths):
    """All trajectories of three batches, as the actor reads them."""
    sequencer = Sequencer(paths, prompts_per_step=4, position=None, needs=("reference",))
    with sequencer:
        records = [whole_batch(sequencer, step, timeout_s=5) for step in (1, 2, 3)]
        reader = Reader(paths)
        return [t for r in records for t in reader.rows(r, range(r.num_trajectories))]


def assert_every_row_scored(paths):
    rows = planned_rows(paths)
    assert len(rows) == GROUPS * SIBLINGS
    for row in rows:
        assert np.array_equal(row.columns["ref_logprobs"], -row.token_ids.astype(np.float32))


def test_every_committed_row_gets_the_logprobs_of_its_own_tokens(paths, tmp_path):
    scorer = score(paths, tmp_path)
    assert scorer.rows == GROUPS * SIBLINGS and scorer.calls > 1  # in several rounds
    assert_every_row_scored(paths)
    scored = [e for e in read_events(tmp_path / "events") if e["event"] == "scored"]
    assert sum(e["num_trajectories"] for e in scored) == GROUPS * SIBLINGS
    assert sum(e["num_tokens"] for e in scored) == GROUPS * SIBLINGS * 7


def test_a_restarted_task_scores_what_is_left_and_nothing_twice(paths, tmp_path):
    with pytest.raises(KeyError, match="killed"):
        score(paths, tmp_path, Echo(fail_after=1))
    done = {record.parent for record in sidecars(paths)}
    assert 0 < len(done) < GROUPS // 2
    score(paths, tmp_path)
    parents = [record.parent for record in sidecars(paths)]
    assert len(parents) == len(set(parents)) == GROUPS // 2
    assert_every_row_scored(paths)


def test_ranks_share_the_rows_and_one_of_them_writes(paths, tmp_path):
    scorers = [Echo(dp_rank) for dp_rank in range(2)]
    with EventWriter(tmp_path / "events" / "reference-0.jsonl", "reference", 0) as events:
        mine = open_rank0(paths, events, data_parallel=2)

        def rank(number):
            world = StarWorld.join(number, 2, tmp_path / "rendezvous", b"key", timeout_s=20)
            loop.run(
                world,
                scorers[number],
                Reader(paths),
                mine if number == 0 else loop.OtherRank(),
                Sight(Reader(paths), None),
            )

        threads = [threading.Thread(target=rank, args=(n,), daemon=True) for n in range(2)]
        with finished_when(paths, lambda: not mine._writer.pending()):
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(30)
        assert not any(thread.is_alive() for thread in threads)
        mine.close()
    assert scorers[0].rows + scorers[1].rows == GROUPS * SIBLINGS
    assert min(scorer.rows for scorer in scorers) > GROUPS * SIBLINGS // 4
    assert_every_row_scored(paths)


def test_a_full_file_system_delays_and_loses_nothing(paths, tmp_path, monkeypatch):
    monkeypatch.setattr(durable, "FULL_RETRY_S", 0.05)
    put, refusals = SidecarWriter.put, [3, 2, 1]

    def put_if_there_is_space(self, *args, **options):
        if refusals:
            refusals.pop()
            raise BusFullError(Path("shard"), OSError(errno.ENOSPC, "no space left"))
        return put(self, *args, **options)

    monkeypatch.setattr(SidecarWriter, "put", put_if_there_is_space)
    score(paths, tmp_path)
    assert not refusals
    assert_every_row_scored(paths)


def test_ranks_hear_from_rank_0_while_there_is_nothing_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(rank0, "SIGN_OF_LIFE_S", 0.1)
    paths = BusPaths(tmp_path / "bus")
    layout.create(paths, PRODUCERS, {}, sidecar_writers={"reference-0": "reference"})
    with EventWriter(tmp_path / "events" / "reference-0.jsonl", "reference", 0) as events:
        found = open_rank0(paths, events).next_round()
    assert found.parts == [] and found.micro_batches == [[]]


def test_the_reference_in_the_actor_is_renewed_at_its_steps():
    class Trainer:
        renewed = 0

        def keep(self, name, folder=None, *, lasting=False):
            self.renewed += lasting

    trainer = Trainer()
    counts = []
    reference = Reference(trainer, refresh_every=3)
    for step in range(1, 8):
        reference.end_step(step)
        counts.append(trainer.renewed)
    assert counts == [0, 0, 1, 1, 1, 2, 2]
    never = Reference(trainer, refresh_every=0)
    never.end_step(3)
    assert trainer.renewed == 2
