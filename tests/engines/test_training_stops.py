"""A run whose training failed: what it published and saved is from before, and it says so."""

from types import SimpleNamespace

import numpy as np
import pytest
from trainers import equal, job, opened, trajectories

from relax_hpc.bus.plan import PlanRecord
from relax_hpc.errors import TrainingError
from relax_hpc.roles.actor import loop as actor
from relax_hpc.roles.dealing.portions import Portion
from relax_hpc.runtime.comm.world import SoloWorld
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.trainer.checkpoints import saving
from relax_hpc.trainer.checkpoints.store import Saved

BAD = SimpleNamespace(reason="the loss is not finite", samples=(), num_samples=0, is_model=False)


@pytest.mark.parametrize("grid", ["dp2", "pp2"])
@pytest.mark.parametrize(
    ("dtype", "rate"),
    [("float32", 1e30), ("float16", 1e6)],  # no square in float32; no number in float16
)
def test_an_update_that_breaks_the_weights_ends_training_on_every_rank(
    ranks, folder, grid, dtype, rate
):
    rows, advantages = trajectories(6)
    pool = opened(ranks, folder, grid, dtype=dtype, optimizer={"lr": rate})
    said = pool.train_fails(rows=rows, advantages=advantages)
    assert said[0] == said[1]
    assert said[0].startswith(f"step 1: with a learning rate of {rate:g} its update made weights")


def test_weights_that_give_no_sample_finite_logprobs_are_told_from_bad_samples(ranks, folder):
    rows, advantages = trajectories(6)
    silent = rows[0]._replace(loss_mask=np.zeros_like(rows[0].loss_mask), guid=99)
    rows, advantages = [*rows, silent], np.append(advantages, 0.0)
    pool = opened(ranks, folder, "dp2")
    rows[0].token_ids[0] = 120
    pool.break_embedding(token=120)
    batch = {"rows": rows, "advantages": advantages}
    assert pool.train(**batch)[0]["skipped"] == 1.0
    assert [skip.is_model for skip in pool.skip()] == [False, False]
    for row in rows:
        row.token_ids[0] = 120
    assert pool.train(**batch)[0]["skipped"] == 1.0
    assert [skip.is_model for skip in pool.skip()] == [True, True]


class Trainer:
    dp_rank, costs, skip, step, in_a_row = 0, {}, None, 0, 0
    expect_saves = accumulate = stream_weights = lambda *_, **__: ()

    def __init__(self, bad):
        self.bad = bad

    def update(self):
        self.step += 1
        self.in_a_row = self.in_a_row + 1 if self.step in self.bad else 0
        self.skip = SimpleNamespace(**vars(BAD), in_a_row=self.in_a_row) if self.in_a_row else None
        return {}


@pytest.fixture
def train(tmp_path):
    """Runs `num_steps` whose `bad` ones are skipped; what happened, in order."""

    def go(num_steps, bad, save_every=1, check=lambda trainer: None):
        said, trainer = [], Trainer(bad)
        actor_table, schedule = {"save_every": save_every}, {"num_steps": num_steps}
        config = job("unused", actor=actor_table, schedule=schedule)
        config = config.model_copy(update={"run_root": tmp_path})
        world = SoloWorld()
        rank0 = SimpleNamespace(
            position=None,
            check_fenced=lambda: None,
            release=lambda: None,
            next_task=lambda step, _: Portion(PlanRecord(step, [], [], 0, 0, 0), {}, [[]], []),
            note_skipped=lambda step, _: said.append(("skipped", step)),
            end_step=lambda step, *_: said.append(("logged", step)),
            publish=lambda version, _: said.append(("published", version)),
            export=lambda _: said.append("exported"),
            finish=lambda: said.append("finished"),
        )
        checkpoints = SimpleNamespace(
            poll=list, wait=list,
            save=lambda trainer, *_: said.append(("saved", trainer.step)) or [Saved(trainer.step)],
        )  # fmt: skip
        events = SimpleNamespace(emit=lambda *_, **__: None)
        save = saving.Saving(
            config.actor, RunPaths(config.run_dir), world, trainer, checkpoints, rank0, events,
            num_steps=num_steps, source=config.model.path,
        )  # fmt: skip
        try:
            stages = actor.Stages(save, checks=[lambda: check(trainer)])
            reader = SimpleNamespace(rows=lambda record, rows, columns: [])
            actor.run(config, world, trainer, reader, rank0, stages)
        except TrainingError:
            said.append("failed")
        return said

    return go


def test_the_step_that_ends_training_is_neither_published_nor_saved_nor_counted(train):
    said = train(num_steps=4, bad={2, 3, 4})
    assert said[-2:] == [("skipped", 4), "failed"]
    assert ("saved", 1) in said and ("logged", 3) in said
    assert not {("saved", 4), ("published", 4), ("logged", 4), "finished"} & {*said}


def test_a_checkpoint_that_is_due_after_a_skipped_update_waits_for_one_that_is_not(train):
    said = train(num_steps=6, bad={2, 4, 6}, save_every=2)
    assert [what[1] for what in said if what[0] == "saved"] == [3, 5, 6]
    assert said[-1] in ("finished", "exported")


def test_engines_are_compared_before_the_update_and_what_that_ends_is_not_published(train):
    steps = []

    def check(trainer):
        steps.append(trainer.step)
        if trainer.step == 1:
            raise TrainingError("another model")

    said = train(num_steps=3, bad=(), check=check)
    assert steps == [0, 1]
    assert said[-1] == "failed" and ("saved", 1) in said
    assert ("published", 2) not in said and ("saved", 2) not in said


def skip_of(pool, **batch):
    metrics = pool.train(**batch)
    assert metrics[0]["skipped"] == 1.0
    said = pool.skip()
    assert said[0] == said[1]
    return said[0]


@pytest.mark.parametrize("grid", ["dp2", "cp2", "pp2", "tp2"])
def test_the_samples_are_named_whose_loss_is_not_finite(ranks, folder, grid):
    rows, advantages = trajectories(12)
    rows = [row._replace(guid=100 + row.guid // 4, sibling=row.guid % 4) for row in rows]
    pool = opened(ranks, folder, grid, budget=40)
    before = pool.weights()[0]
    broken = advantages.copy()
    broken[[5, 10]] = np.nan, np.inf
    batch = {"rows": rows, "advantages": broken, "num_portions": 2}
    skip = skip_of(pool, **batch)
    assert (skip.reason, skip.num_samples, skip.in_a_row) == ("the loss is not finite", 2, 1)
    assert sorted(sample[:2] for sample in skip.samples) == [(101, 1), (102, 2)]
    assert {sample.what for sample in skip.samples} == {"loss"}
    for sample in skip.samples:
        held = pool.micro_batches_of(rows=rows, num_portions=2)
        mine = held[sample.dp_rank if grid == "dp2" else 0][sample.micro_batch]
        assert (sample.guid, sample.sibling) in mine
    assert skip_of(pool, **batch).in_a_row == 2
    assert equal(pool.weights()[0], before)
    metrics = pool.train(rows=rows, advantages=advantages)[0]
    assert (metrics["skipped"], pool.skip()) == (0.0, [None, None])
    assert skip_of(pool, **batch).in_a_row == 1
