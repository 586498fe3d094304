"""A run whose training failed: what it published and saved is from before, and it says so."""

from types import SimpleNamespace

import numpy as np
import pytest
from trainers import job, opened, trajectories

from relax_hpc.bus.plan import PlanRecord
from relax_hpc.config.run import SftRunConfig
from relax_hpc.errors import TrainingError
from relax_hpc.roles.actor import loop as actor
from relax_hpc.roles.dealing.portions import Portion
from relax_hpc.roles.sft import loop as sft
from relax_hpc.roles.training import duties as skips
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


def test_a_broken_model_ends_training_at_once_and_bad_samples_after_a_while():
    skips.stop_if_stuck(SimpleNamespace(**vars(BAD), in_a_row=2))
    with pytest.raises(TrainingError, match="3 updates in a row were skipped"):
        skips.stop_if_stuck(SimpleNamespace(**vars(BAD), in_a_row=3))
    broken = SimpleNamespace(**vars(BAD) | {"is_model": True}, in_a_row=1)
    with pytest.raises(TrainingError, match="its weights are broken"):
        skips.stop_if_stuck(broken)


class Trainer:
    """Skips the updates of `bad` steps."""

    dp_rank, costs, skip, step = 0, {}, None, 0

    def expect_saves(self):
        pass

    def __init__(self, bad):
        self.bad, self.in_a_row = bad, 0

    def accumulate(self, *_, last, mini_batches=()):
        assert last

    def update(self):
        self.step += 1
        self.in_a_row = self.in_a_row + 1 if self.step in self.bad else 0
        self.skip = SimpleNamespace(**vars(BAD), in_a_row=self.in_a_row) if self.in_a_row else None
        return {}

    def stream_weights(self):
        return iter(())


class Rank0:
    """Rank 0 of either kind of run."""

    position = None

    def __init__(self, kind, said):
        self.kind, self.said = kind, said

    def heldout(self):
        return [sft.RankBatch([], [])]

    def next_task(self, step, timers):
        if self.kind == "sft":
            return [sft.RankBatch([], [])]
        return Portion(PlanRecord(step, [], [], 0, 0, 0), {}, [[]], [])

    def check_fenced(self):
        pass

    def release(self):
        pass

    def note_skipped(self, step, skip):
        self.said.append(("skipped", step))

    def end_step(self, step, fields, timers):
        self.said.append(("logged", step))

    def publish(self, version, tensors):
        self.said.append(("published", version))
        return False

    def export(self, tensors):
        self.said.append("exported")

    def finish(self):
        self.said.append("finished")


@pytest.fixture
def train(tmp_path):
    """Runs `num_steps` whose `bad` ones are skipped; what happened, in order."""

    def go(kind, num_steps, bad, save_every=1, check=lambda trainer: None):
        said, trainer = [], Trainer(bad)
        tree = {
            "name": "run", "run_root": str(tmp_path), "model": {"path": "unused"},
            "actor": {"save_every": save_every},
        }  # fmt: skip
        if kind == "sft":
            config = SftRunConfig.model_validate(
                tree | {"sft": {"train": "unused", "batch_size": 1, "num_steps": num_steps}}
            )
        else:
            config = job("unused").model_validate(
                tree | {"prompts": {"train": "unused"}, "schedule": {"num_steps": num_steps}}
            )
        rank0, world = Rank0(kind, said), SoloWorld()
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
            if kind == "sft":
                sft.run(config, world, trainer, rank0, save, lambda: None)
            else:
                stages = actor.Stages(save, checks=[lambda: check(trainer)])
                reader = SimpleNamespace(rows=lambda record, rows, columns: [])
                actor.run(config, world, trainer, reader, rank0, stages)
        except TrainingError:
            said.append("failed")
        return said

    return go


@pytest.mark.parametrize("kind", ["rl", "sft"])
def test_the_step_that_ends_training_is_neither_published_nor_saved_nor_counted(train, kind):
    said = train(kind, num_steps=4, bad={2, 3, 4})
    assert said[-2:] == [("skipped", 4), "failed"]
    assert ("saved", 1) in said and ("logged", 3) in said
    for what in (("saved", 4), ("published", 4), ("logged", 4), "finished", "exported"):
        assert what not in said


@pytest.mark.parametrize("kind", ["rl", "sft"])
def test_a_checkpoint_that_is_due_after_a_skipped_update_waits_for_one_that_is_not(train, kind):
    said = train(kind, num_steps=6, bad={2, 4, 6}, save_every=2)
    assert [what[1] for what in said if what[0] == "saved"] == [3, 5, 6]
    assert said[-1] in ("finished", "exported")


def test_engines_are_compared_before_the_update_and_what_that_ends_is_not_published(train):
    steps = []

    def check(trainer):
        steps.append(trainer.step)
        if trainer.step == 1:
            raise TrainingError("another model")

    said = train("rl", num_steps=3, bad=(), check=check)
    assert steps == [0, 1]
    assert said[-1] == "failed" and ("saved", 1) in said
    assert ("published", 2) not in said and ("saved", 2) not in said
