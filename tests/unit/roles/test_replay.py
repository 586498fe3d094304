"""A step that is trained again: where it begins, what is refused, and how it is compared."""

import json
import shutil
from pathlib import Path

import fake_slurm
import pytest
from bus_fixtures import PRODUCERS, SIBLINGS, make_bus, produce, whole_batch
from role_fakes import config

from relax_hpc.bus.plan import PlanPosition, read_chain
from relax_hpc.bus.sequencer import Sequencer
from relax_hpc.errors import ConfigError
from relax_hpc.roles.context import Replay
from relax_hpc.runs import replay
from relax_hpc.runs.replay import Compared
from relax_hpc.runs.resume import resume
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.runtime.telemetry.events import EventWriter
from relax_hpc.trainer.checkpoints import saving

STEPS = 4
JOB = config(rollout__samples_per_prompt=SIBLINGS, schedule__num_steps=STEPS)


@pytest.fixture
def run(tmp_path):
    """A run of four steps of two groups each, with checkpoints of steps 1 and 2."""
    paths = RunPaths(tmp_path)
    bus = make_bus(tmp_path)
    for number, name in enumerate(PRODUCERS):
        produce(bus, name, range(number, 2 * STEPS, 2))
    sequencer = Sequencer(bus, prompts_per_step=2, position=None)
    positions = [(whole_batch(sequencer, step, timeout_s=5), sequencer.position)
                 for step in range(1, STEPS + 1)]  # fmt: skip
    sequencer.close()
    for step in (1, 2):
        keep(paths.checkpoints, step, positions[step - 1][1])
    return paths


def keep(folder, step, position):
    folder = folder / f"step_{step:08d}"
    folder.mkdir(parents=True)
    (folder / "progress.json").write_text(json.dumps({"step": step, "position": list(position)}))


def shards_of(paths, step):
    chain = read_chain(paths.bus)
    return {
        paths.bus.shard(part.producer, part.fence, part.seq)
        for record in chain.steps
        if record.step == step
        for part in record.parts
    }


def test_it_begins_at_the_checkpoint_before_the_step_or_the_nearest_one_or_the_model(run):
    folder = run.checkpoints / "step_00000002"
    assert replay.plan(run, JOB, 3) == Replay(run.root, 3, 3, folder)
    assert replay.plan(run, JOB, 4) == Replay(run.root, 4, 3, folder)
    assert replay.plan(run, JOB, 2).first == 2
    assert replay.plan(run, JOB, 1) == Replay(run.root, 1, 1, None)


def test_files_of_the_steps_before_the_checkpoint_are_not_looked_up(run, monkeypatch):
    """There may be a hundred thousand of them."""
    real, asked = Path.exists, []
    monkeypatch.setattr(Path, "exists", lambda path: (asked.append(path), real(path))[1])
    assert replay.plan(run, JOB, 4).first == 3
    assert {path for path in asked if path.suffix == ".h5"} == shards_of(run, 3) | shards_of(run, 4)


def test_one_that_is_kept_for_good_counts_and_one_of_a_superseded_trainer_does_not(run):
    kept = run.checkpoints / "kept"
    kept.mkdir()
    (run.checkpoints / "step_00000002").rename(kept / "step_00000002")
    keep(run.checkpoints, 3, (1, 1, 3))  # record 1 is not the end of step 3
    assert replay.plan(run, JOB, 4) == Replay(run.root, 4, 3, kept / "step_00000002")


def test_shards_that_were_deleted_are_told_with_the_setting_that_keeps_them(run):
    shards_of(run, 1).pop().unlink()
    with pytest.raises(ConfigError) as error:
        replay.plan(run, JOB, 1)
    assert "--step 1: its shards were deleted" in str(error.value)
    assert "2 to 4 are there; bus.keep_steps (here 2)" in str(error.value)
    assert replay.plan(run, JOB, 2).first == 2, "it begins behind them"


def test_a_run_goes_on_from_what_is_kept_for_good_only_if_no_shard_since_may_be_deleted(run):
    positions = [PlanPosition(1, step, step) for step in range(1, STEPS + 1)]
    assert [saving.lack_of(run, each) for each in positions] == [""] * STEPS
    sequencer = Sequencer(run.bus, prompts_per_step=2, position=positions[-1])
    sequencer.release(2)
    sequencer.close()
    lacks = [saving.lack_of(run, each) for each in positions]
    said = "shards of step 2 may have been deleted since; bus.keep_steps keeps them"
    assert lacks == [said, "", "", ""]


def test_without_a_checkpoint_a_run_begins_again_only_if_the_shards_of_step_1_are_there(
    run, tmp_path, monkeypatch
):
    saving.check_begin(run)
    shards_of(run, 2).pop().unlink()
    saving.check_begin(run)
    gone = shards_of(run, 1).pop()
    gone.unlink()
    with pytest.raises(ConfigError, match=f"has no checkpoint any more.*{gone} was deleted once"):
        saving.check_begin(run)
    other = tmp_path / "other"
    other.mkdir()
    slurm = fake_slurm.make(other, monkeypatch)
    slurm.leaves(1)
    shutil.copytree(run.bus.root, RunPaths(slurm.run_dir).bus.root)
    with pytest.raises(ConfigError, match="has no checkpoint any more, and step 1 cannot be"):
        resume(slurm.run_dir)
    assert slurm.asked("sbatch") == []
    keep(RunPaths(slurm.run_dir).checkpoints, 1, (1, 1, 1))
    assert resume(slurm.run_dir).job_id == "9"


def test_a_step_that_was_not_trained_is_refused(run):
    with pytest.raises(ConfigError, match=r"--step 1: .* has trained no step; choose one of them"):
        replay.read_step(run, 1)
    with EventWriter(run.events("actor", 0), "actor", 0) as events:
        events.emit("step", step=1, loss=0.25)
        events.emit("step", step=2, loss=0.5)
        events.emit("step", step=2, loss=0.75)  # again, after a restart
    assert replay.read_step(run, 2)["loss"] == 0.75
    with pytest.raises(ConfigError, match="has trained 1 to 2"):
        replay.read_step(run, 3)


def test_a_run_that_goes_on_is_refused_and_so_is_one_of_which_nobody_knows(tmp_path, monkeypatch):
    slurm = fake_slurm.make(tmp_path, monkeypatch)
    slurm.says("7+0|RUNNING", "7+1|RUNNING")
    with pytest.raises(ConfigError, match="is running as job 7 and deletes shards as it goes"):
        replay.replay(slurm.run_dir, 1)
    slurm.is_silent()
    with pytest.raises(ConfigError, match=r"is not known.*--ended"):
        replay.replay(slurm.run_dir, 1)
    with pytest.raises(ConfigError, match="has trained no step"):
        replay.replay(slurm.run_dir, 1, ended=True)


def test_only_how_and_where_it_is_computed_may_differ():
    assert replay.change(JOB, ["actor.layout.data_parallel=2"]).actor.layout.world_size == 2
    for wrong in ("actor.optimizer.lr=1", "seed=3", "schedule.num_steps=9", "actor.save_every=1"):
        with pytest.raises(ConfigError, match=f"--set {wrong}: a step is trained again with"):
            replay.change(JOB, [wrong])


def compared(same_grid, **numbers):
    recorded = {"loss": 0.5, "grad_norm": 100.0, "lr": 1e-6}
    found = replay.numbers(recorded, recorded | numbers)
    return Compared(Replay(Path("r"), 3, 3, None), Path("f"), same_grid, found)


@pytest.mark.parametrize(
    ("numbers", "difference", "same_grid", "other_grid"),
    [
        ({}, 0.0, True, True), ({"loss": 0.5 + 2**-40}, 2**-40, False, True),
        ({"loss": 0.50002}, 2e-5, False, False),
        ({"grad_norm": 100.0005}, 5e-6, False, True),  # of 100
        ({"grad_norm": 100.002}, 2e-5, False, False), ({"loss": None}, float("inf"), False, False),
        ({"lr": 1.0}, 0.0, True, True),  # is shown, and judges nothing
    ],
)  # fmt: skip
def test_bit_by_bit_at_the_same_grid_and_nearly_at_another(
    numbers, difference, same_grid, other_grid
):
    assert compared(True, **numbers).difference == pytest.approx(difference, rel=1e-3)
    assert compared(True, **numbers).is_equal is same_grid
    assert compared(False, **numbers).is_equal is other_grid
