"""The actor's loop on 256 ranks (TP 4 x CP 2 x DP 16 x PP 2), each a thread with its own world."""

import threading
from itertools import pairwise
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch

from relax_hpc.bus import layout
from relax_hpc.bus.producer import Producer
from relax_hpc.bus.reader import Reader
from relax_hpc.bus.sequencer import Sequencer
from relax_hpc.bus.shards.shard import Shard
from relax_hpc.config import job_file
from relax_hpc.errors import TrainingError
from relax_hpc.roles.actor import loop as actor
from relax_hpc.roles.actor.rank0 import ActorRank0
from relax_hpc.roles.actor.loop import ActorOtherRank
from relax_hpc.roles.dealing.micro_batches import imbalance
from relax_hpc.roles.dealing.portions import Portion
from relax_hpc.runtime.comm.world import StarWorld
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.runtime.telemetry.events import EventWriter, read_events
from relax_hpc.schema import FinishReason, PromptGroup, Trajectory
from relax_hpc.weights.publish import Published

TP, CP, DP, PP = 4, 2, 16, 2
RANKS = TP * CP * DP * PP
PROMPTS, SIBLINGS, BUDGET = 64, 8, 2048
MIXED, EQUAL, ALMOST = [1, 0] * 4, [1] * 8, [2, 0, 1, 1, 1, 1, 1, 1]
"""Rewards of a group: 8 rows teach, none does, 2 do."""


def dp_rank_of(rank):
    """Megatron's order of the grid: tp, cp, dp, pp, the first one fastest."""
    return rank // (TP * CP) % DP


def group(guid, rewards, rng):
    scale = rng.lognormal(5.0, 0.7)  # siblings resemble each other
    lengths = np.clip(scale * rng.lognormal(0.0, 0.7, SIBLINGS), 2, BUDGET - 8).astype(int)
    return PromptGroup(
        guid, [trajectory(guid, i, int(lengths[i]), rewards[i]) for i in range(SIBLINGS)]
    )


def trajectory(guid, sibling, length, reward):
    mask = np.ones(8 + length, np.uint8)
    mask[:8] = 0
    return Trajectory(
        guid=guid, sibling=sibling, prompt_index=guid, seed=0,
        token_ids=np.full(8 + length, guid * SIBLINGS + sibling, np.int32),
        prompt_len=8, loss_mask=mask, columns={"rollout_logprobs": -mask.astype(np.float32)},
        version_runs=runs_of(guid, length), finish=FinishReason.STOP,
        reward=float(reward),
    )  # fmt: skip


def runs_of(guid, length):
    """The first half by the policy before the one that is current."""
    version = guid // PROMPTS
    runs = [[8, max(version - 1, 0)], [8 + length // 2, version]]
    return np.array(runs, np.int32)


class Rollout:
    """Commits the next groups whenever the trainer has to wait, as a publisher who looks around."""

    def __init__(self, paths, commits):
        self.producer = Producer(paths, "rollout-0", {})
        self.commits, self.published = commits, []

    def has_newcomers(self):
        if self.commits:
            self.producer.put(self.commits.pop(0))
        return False

    def publish(self, version, tensors, *, check, check_fenced):
        list(tensors)
        self.published.append(version)
        return Published(version, [], [], False, 0, 0.0, {}, None)

    def take_ended_loads(self):
        return []

    def wait_for_loads(self):
        return False

    def close(self):
        self.producer.close()


class Trainer:
    """Notes what it is given."""

    def __init__(self, rank):
        self.step, self.dp_rank, self.given = 0, dp_rank_of(rank), []
        self.skip, self.costs = None, {}

    def accumulate(self, trajectories, micro_batches, loss, *, last, mini_batches):
        for row in trajectories:
            assert (row.token_ids == row.guid * SIBLINGS + row.sibling).all()
        assert sorted(i for rows in micro_batches for i in rows) == [*range(len(trajectories))]
        packed = [[trajectories[i] for i in rows] for rows in micro_batches]
        self.given.append(
            SimpleNamespace(
                step=self.step + 1,
                rows=[[(row.guid, row.sibling) for row in rows] for rows in packed],
                tokens=[sum(len(row.token_ids) for row in rows) for rows in packed],
                trained=[int(row.loss_mask.sum()) for row in trajectories],
                sampled=[len(row.token_ids) - row.prompt_len for row in trajectories],
                advantages=[float(row.columns["advantages"]) for row in trajectories],
            )
        )

    def update(self):
        self.step += 1
        return {"loss": 0.0}

    def stream_weights(self):
        yield "weight", torch.zeros(1)


class Takes:
    """Helps to publish: takes every tensor."""

    def publish(self, tensors):
        list(tensors)


class Grid:
    """Runs a job whose rollout commits `commits`, one list of (guid, rewards) after another."""

    def __init__(self, folder, commits, trainer=Trainer, fails=False, **schedule):
        num_groups = sum(map(len, commits))
        self.config = job_file.validate(
            {
                "name": "grid",
                "run_root": str(folder),
                "model": {"path": "none"},
                "prompts": {"train": "none"},
                "rollout": {"samples_per_prompt": SIBLINGS},
                "actor": {
                    "layout": {"data_parallel": DP},
                    "tokens_per_micro_batch": BUDGET,
                    "advanced": {"portion_micro_batches": 1},
                },
                "schedule": {"num_steps": num_groups // PROMPTS, "prompts_per_step": PROMPTS}
                | schedule,
            },
            source="test",
        )
        self.paths = RunPaths(self.config.run_dir)
        layout.create(self.paths.bus, self.config.producers, {})
        rng = np.random.default_rng(0)
        made = [[group(guid, rewards, rng) for guid, rewards in commit] for commit in commits]
        self.rollout = Rollout(self.paths.bus, made)
        self.trainers = [trainer(rank) for rank in range(RANKS)]
        self.portions = [[] for _ in range(RANKS)]
        self.readers, self.failures = {"index": set(), "rows": set()}, []
        threads = [
            threading.Thread(target=self._rank, args=(r,), daemon=True) for r in range(RANKS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=90)
        assert fails or not self.failures, self.failures[0]
        assert not any(thread.is_alive() for thread in threads)
        events = read_events(self.paths.root / "events")
        self.steps = [event for event in events if event["event"] == "step"]
        self.skipped = [event for event in events if event["event"] == "skipped"]

    def _rank(self, rank):
        try:
            self._run(rank)
        except Exception as error:  # noqa: BLE001 - outermost frame: the test reports it
            self.failures.append(error)

    def _run(self, rank):
        grid = self

        class World(StarWorld):
            def bcast(self, value):
                value = super().bcast(value)
                if self.size == RANKS and isinstance(value, Portion):
                    grid.portions[rank].append(value)
                return value

        class NotedReader(Reader):
            def index(self, record):
                grid.readers["index"].add(rank)
                return super().index(record)

            def rows(self, record, rows, columns):
                grid.readers["rows"].add(rank)
                return super().rows(record, rows, columns)

        meeting = self.paths.rendezvous("ranks")
        world = World.join(rank, RANKS, meeting, b"key", timeout_s=60)
        reader = NotedReader(self.paths.bus)
        duties = ActorOtherRank(Takes()) if rank else self._rank0(reader)
        stages = actor.Stages(lambda: None)
        actor.run(self.config, world, self.trainers[rank], reader, duties, stages)
        if rank == 0:
            duties.close()

    def _rank0(self, reader):
        sequencer = Sequencer(self.paths.bus, prompts_per_step=PROMPTS, position=None)
        events = EventWriter(self.paths.events("actor", 0), "actor", 0)
        return ActorRank0(self.config, sequencer, reader, self.rollout, None, events)

    def rows_of(self, step, trainers):
        """(guid, sibling) of all that the trainers were given in a step."""
        given = [given for trainer in trainers for given in trainer.given if given.step == step]
        return [row for g in given for rows in g.rows for row in rows]


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    """Step 1 comes at once, step 2 in three commits; some groups teach nothing."""
    groups = [(guid, EQUAL if guid % 8 == 7 else MIXED) for guid in range(2 * PROMPTS)]
    commits = [groups[:64], groups[64:84], groups[84:110], groups[110:]]
    return Grid(tmp_path_factory.mktemp("grid"), commits)


def test_every_rank_of_the_grid_has_the_same_plan(grid):
    plans = [[portion.micro_batches for portion in seen] for seen in grid.portions]
    assert [len(plan) for plan in plans] == [4] * RANKS
    assert all(plan == plans[0] for plan in plans)


def test_a_batch_is_trained_in_the_portions_that_it_came_in(grid):
    assert [step["batch/portions"] for step in grid.steps] == [1, 3]
    groups = [len(portion.record.guids) for portion in grid.portions[0]]
    assert groups == [64, 20, 26, 18]


def test_ranks_of_a_replica_train_the_same_rows(grid):
    for dp_rank in range(DP):
        replica = [trainer for trainer in grid.trainers if trainer.dp_rank == dp_rank]
        assert len(replica) == TP * CP * PP
        assert all(trainer.given == replica[0].given for trainer in replica)


def test_every_row_that_teaches_is_trained_once_over_the_replicas(grid):
    firsts = [grid.trainers[dp_rank * TP * CP] for dp_rank in range(DP)]
    assert [trainer.dp_rank for trainer in firsts] == list(range(DP))
    for step in (1, 2):
        guids = range((step - 1) * PROMPTS, step * PROMPTS)
        teaching = [(guid, i) for guid in guids if guid % 8 != 7 for i in range(SIBLINGS)]
        assert sorted(grid.rows_of(step, firsts)) == teaching


def test_ranks_run_equally_many_micro_batches_within_the_budget(grid):
    for portion in zip(*(trainer.given for trainer in grid.trainers), strict=True):
        assert len({len(given.rows) for given in portion}) == 1
        assert max(max(given.tokens) for given in portion) <= BUDGET


def test_nothing_leaves_the_loss_of_batches_that_wait_for_their_own(grid):
    assert all(g.trained == g.sampled for trainer in grid.trainers for g in trainer.given)


def test_tokens_are_balanced_over_each_whole_batch(grid):
    for step in (1, 2):
        tokens = [0] * DP
        for dp_rank in range(DP):
            given = grid.trainers[dp_rank * TP * CP].given
            tokens[dp_rank] = sum(sum(g.tokens) for g in given if g.step == step)
        assert imbalance(tokens) <= 0.05
        assert grid.steps[step - 1]["batch/imbalance"] == pytest.approx(imbalance(tokens))


def test_one_rank_of_a_replica_reads_tokens_and_one_of_all_reads_columns(grid):
    assert grid.readers["index"] == {0}
    assert grid.readers["rows"] == {dp_rank * TP * CP for dp_rank in range(DP)}


def test_batches_with_hardly_a_row_or_none_starve_nobody(tmp_path):
    """A group or none, as one portion and as the last of several; of one only two rows differ."""
    rewards = [EQUAL] * 6 * PROMPTS
    rewards[0] = MIXED  # step 1: 8 rows
    rewards[64] = ALMOST  # step 2: 8 rows, too; step 3: none
    rewards[192:255] = [MIXED] * 63  # step 4: nothing in the last portion
    rewards[256 + 63] = ALMOST  # step 5: 8 rows in the last portion; step 6: as step 2
    rewards[320] = ALMOST
    groups = list(enumerate(rewards))
    cuts = [0, 64, 128, 192, 255, 256, 300, 319, 320, 384]
    commits = [groups[a:b] for a, b in pairwise(cuts)]
    grid = Grid(tmp_path, commits, over_age="mask", max_staleness=0)
    firsts = [grid.trainers[dp_rank * TP * CP] for dp_rank in range(DP)]
    assert [len(grid.rows_of(step, firsts)) for step in range(1, 7)] == [8, 8, 0, 504, 8, 8]
    assert all(trainer.step == 6 for trainer in grid.trainers)
    for given in (given for trainer in grid.trainers for given in trainer.given):
        fresh = [n if given.step == 1 else n - n // 2 for n in given.sampled]
        assert given.trained == fresh  # what the policy before sampled is over age
    for portion in zip(*(trainer.given for trainer in grid.trainers), strict=True):
        assert len({len(given.rows) for given in portion}) == 1


class Skip(NamedTuple):
    reason: str
    samples: tuple
    num_samples: int
    in_a_row: int
    is_model: bool = False


class Sample(NamedTuple):
    guid: int
    sibling: int
    what: str


class BrokenTrainer(Trainer):
    """Updates nothing from step 2 on."""

    def update(self):
        metrics = super().update()
        if self.step > 1:
            sample = Sample((self.step - 1) * PROMPTS + 3, 1, "loss")
            self.skip = Skip("the loss is not finite", (sample,), 5, self.step - 1)
        return metrics | {"skipped": float(self.step > 1)}


def test_updates_skipped_in_a_row_end_every_rank_before_the_last_is_published(tmp_path):
    groups = [(guid, MIXED) for guid in range(6 * PROMPTS)]
    commits = [groups[i : i + PROMPTS] for i in range(0, len(groups), PROMPTS)]
    grid = Grid(tmp_path, commits, BrokenTrainer, fails=True)
    assert [trainer.step for trainer in grid.trainers] == [4] * RANKS  # of 6
    assert len(grid.failures) == RANKS
    for error in grid.failures:
        assert isinstance(error, TrainingError)
        assert "3 updates in a row were skipped: " in str(error)
        assert f"{3 * PROMPTS + 3}/1 (loss) and 4 more" in str(error)
    assert grid.rollout.published == [0, 1, 2, 3]
    assert [event["step"] for event in grid.skipped] == [2, 3, 4]
    for event in grid.skipped:
        (sample,) = event["samples"]
        assert (event["num_samples"], sample["guid"]) == (5, (event["step"] - 1) * PROMPTS + 3)
        shard = Shard(grid.paths.root / sample["shard"])
        assert sample["guid"] in shard.read_rows("row/guid", 0, shard.rows)
        shard.close()
