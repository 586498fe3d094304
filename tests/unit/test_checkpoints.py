"""Which checkpoint counts: after crashes, on bad storage, when trainers supersede each other."""

import errno
import os
import threading

import pytest
from fake_part import NAMES, FakePart

from relax_hpc.bus.plan import PlanPosition
from relax_hpc.errors import BusError, CheckpointError, FencedError
from relax_hpc.runtime.comm.world import SoloWorld
from relax_hpc.trainer.checkpoints import store
from relax_hpc.trainer.checkpoints.store import MAX_FAILURES, Checkpoints, find


class Trainer:
    """Its checkpoint is not whole without NAMES, and damaged if its weight is no number."""

    def __init__(self, step, weight=0):
        self.step, self.weight, self.hold = step, weight, None
        self.fails, self.copies = None, []

    def checkpoint_part(self, *, copy):
        self.copies.append(copy)
        part = FakePart({"weight0": str(self.weight)}, self.hold)
        if self.fails:
            part.write = self.fails
        return part

    def damage(self, folder):
        return None if (folder / NAMES).exists() else f"{folder / NAMES}: is not there"

    def load(self, folder):
        content = (folder / "weight0").read_text()
        if not content.isdigit():
            raise CheckpointError(f"{folder / 'weight0'}: is damaged")
        self.weight = int(content)


def checkpoints_in(root, keep=2, **kwargs):
    return Checkpoints(root, SoloWorld(), PlanPosition, keep=keep, **kwargs)


def save(root, step, fence=1, weight=None, keep=2, keep_every=0, **kwargs):
    trainer = Trainer(step, step if weight is None else weight)
    checkpoints = checkpoints_in(root, keep=keep, keep_every=keep_every)
    return checkpoints.save(trainer, PlanPosition(fence, step, step), **kwargs)


def steps_in(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_is_loaded_and_old_ones_go(tmp_path):
    for step in (3, 6, 9):
        (saved,) = save(tmp_path, step)
        assert (saved.step, saved.failure, saved.num_bytes) == (step, None, 4)
    checkpoints, trainer = checkpoints_in(tmp_path), Trainer(0)
    assert [c.step for c in checkpoints.complete()] == [6, 9]
    assert checkpoints.resume(trainer).position == PlanPosition(1, 9, 9) and trainer.weight == 9
    assert steps_in(tmp_path) == ["step_00000006", "step_00000009"]


def test_steps_that_are_multiples_are_kept_for_good_and_do_not_hold_up_what_is_released(tmp_path):
    for step in range(1, 10):
        save(tmp_path, step, keep_every=3)
    assert [c.step for c in checkpoints_in(tmp_path).complete()] == [8, 9]
    assert steps_in(tmp_path / "kept") == ["step_00000003", "step_00000006"]
    assert find(tmp_path, 3) == tmp_path / "kept/step_00000003"
    assert find(tmp_path, None) == tmp_path / "step_00000009"
    with pytest.raises(CheckpointError, match="no checkpoint of step 4; there are 3, 6, 8, 9"):
        find(tmp_path, 4)


def test_one_that_a_superseded_trainer_slipped_in_is_passed_over(tmp_path):
    save(tmp_path, 3, fence=2)
    save(tmp_path, 6, fence=1, weight=666)
    checkpoints = checkpoints_in(tmp_path, is_valid=lambda p: p.fence == 2)
    trainer = Trainer(0)
    assert checkpoints.resume(trainer).step == 3
    assert trainer.weight == 3
    checkpoints = checkpoints_in(tmp_path, is_valid=lambda p: False)
    with pytest.raises(BusError, match="none of the checkpoints is of this run's plan"):
        checkpoints.resume(trainer)


def test_a_superseded_trainer_replaces_nothing(tmp_path):
    save(tmp_path, 3, fence=2)
    with pytest.raises(FencedError, match="was saved under plan fence 2, this trainer's is 1"):
        save(tmp_path, 3, fence=1, weight=666)

    def fenced():
        raise FencedError("another trainer took over")

    with pytest.raises(FencedError, match="took over"):
        save(tmp_path, 6, fence=1, weight=666, check_fenced=fenced)
    trainer = Trainer(0)
    assert checkpoints_in(tmp_path).resume(trainer).step == 3
    assert trainer.weight == 3


@pytest.mark.parametrize(
    ("file", "content", "named"),
    [
        (NAMES, None, NAMES),
        ("weight0", "9x", "weight0: is damaged"),
        ("progress.json", '{"step": 9, "position": [1]}', "progress.json"),
    ],
)
def test_of_a_torn_one_the_one_before_is_loaded_and_the_file_is_named(
    tmp_path, file, content, named
):
    for step in (6, 9):
        save(tmp_path, step)
    torn = tmp_path / "step_00000009" / file
    torn.write_text(content) if content else torn.unlink()
    told, trainer = [], Trainer(0)
    resumed = checkpoints_in(tmp_path).resume(trainer, lambda step, why: told.append((step, why)))
    assert (resumed.step, trainer.weight) == (6, 6)
    ((step, why),) = told
    assert step == 9 and named in why
    # It counts no more, so that the next save deletes nothing on its account.
    assert [c.step for c in checkpoints_in(tmp_path).complete()] == [6]
    assert len(list((tmp_path / "torn").iterdir())) == 1
    save(tmp_path, 7)
    assert [c.step for c in checkpoints_in(tmp_path).complete()] == [6, 7]


def test_without_any_whole_one_the_error_says_so_and_nothing_is_moved(tmp_path):
    for step in (6, 9):
        save(tmp_path, step)
        (tmp_path / f"step_{step:08d}" / NAMES).unlink()
    with pytest.raises(CheckpointError, match=r"none of the 2 checkpoints is whole.*begin again"):
        checkpoints_in(tmp_path).resume(Trainer(0))
    assert steps_in(tmp_path) == ["step_00000006", "step_00000009"]
    assert checkpoints_in(tmp_path / "empty").resume(Trainer(0)) is None


def test_without_any_whole_one_the_newest_is_taken_that_was_kept_for_good(tmp_path, caplog):
    for step in range(1, 10):
        save(tmp_path, step, keep_every=2)
    kept = tmp_path / "kept"
    assert steps_in(kept) == [f"step_{step:08d}" for step in (2, 4, 6)]
    for folder in (tmp_path / "step_00000008", tmp_path / "step_00000009", kept / "step_00000006"):
        (folder / NAMES).unlink()
    told, trainer = [], Trainer(0)
    for _ in range(2):  # it may be killed before it saves
        resumed = checkpoints_in(tmp_path).resume(trainer, lambda step, why: told.append(step))
        assert (resumed.folder, trainer.weight) == (kept / "step_00000004", 4)
        assert "looking at what is kept for good: none else is whole" in caplog.text
    assert (told, len(list((tmp_path / "torn").iterdir()))) == ([9, 8, 6], 3)
    lacking = checkpoints_in(tmp_path, lacks=lambda position: "step 5" * (position.step == 4))
    assert lacking.resume(trainer).step == 2


def test_training_goes_on_while_it_is_written_and_it_counts_when_it_is_complete(tmp_path):
    hold, trainer = threading.Event(), Trainer(3, weight=3)
    trainer.hold = hold
    checkpoints = checkpoints_in(tmp_path, beside_training=True)
    assert checkpoints.save(trainer, PlanPosition(1, 3, 3)) == []
    assert trainer.copies == [True]
    trainer.step, trainer.weight = 4, 4
    assert checkpoints.poll() == []
    assert checkpoints.complete() == []
    hold.set()
    (saved,) = checkpoints.wait()
    assert (saved.step, [c.step for c in checkpoints.complete()]) == (3, [3])
    assert (tmp_path / "step_00000003/weight0").read_text() == "3"
    assert checkpoints.poll() == checkpoints.wait() == []


def test_a_save_waits_for_the_one_before_it_and_says_so(tmp_path, caplog):
    hold, trainer = threading.Event(), Trainer(3, weight=3)
    trainer.hold = hold
    checkpoints = checkpoints_in(tmp_path, beside_training=True)
    checkpoints.save(trainer, PlanPosition(1, 3, 3))
    trainer.step = 6
    threading.Timer(0.05, hold.set).start()
    with caplog.at_level("WARNING", "relax_hpc"):
        (saved,) = checkpoints.save(trainer, PlanPosition(1, 6, 6))
    assert saved.step == 3 and saved.wait_s > 0
    assert "of step 3 is still being written" in caplog.text
    assert [saved.step for saved in checkpoints.wait()] == [6]


def full(folder, **_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder / "weight0"))


def test_a_save_that_fails_is_tried_again_and_after_some_in_a_row_the_actor_ends(tmp_path):
    save(tmp_path, 3)
    checkpoints, trainer = checkpoints_in(tmp_path, beside_training=True), Trainer(6)
    for repeat in range(2):
        for _ in range(MAX_FAILURES - 1):
            trainer.fails = full
            checkpoints.save(trainer, PlanPosition(1, 6, 6))
            (failed,) = checkpoints.wait()
            assert failed.step == trainer.step
            assert "weight0: cannot be written: No space left on device" in failed.failure
            assert [c.step for c in checkpoints.complete()][-1] == (3, 6)[repeat]
            trainer.step += 1
        if repeat == 0:
            trainer.step, trainer.fails = 6, None  # one that succeeds: counting begins anew
            checkpoints.save(trainer, PlanPosition(1, 6, 6))
            assert checkpoints.wait()[0].failure is None
            trainer.step = 7
    checkpoints.save(trainer, PlanPosition(1, 6, 6))
    with pytest.raises(CheckpointError, match=r"3 saves in a row failed, .*weight0"):
        checkpoints.wait()
    assert steps_in(tmp_path) == ["step_00000003", "step_00000006"]


def test_what_a_killed_save_left_is_removed_and_nothing_else(tmp_path):
    save(tmp_path, 3)
    for name in (".step_00000006.0a1b2c3d.draft", ".step_00000002.0a1b2c3d.old", ".mine", "notes"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "part").write_text("half")
    assert checkpoints_in(tmp_path).resume(Trainer(0)).step == 3
    assert steps_in(tmp_path) == [".mine", "notes", "step_00000003"]


def test_an_old_one_that_cannot_be_removed_does_not_fail_the_new_one(tmp_path, monkeypatch, caplog):
    for step in (1, 2):
        save(tmp_path, step)
    monkeypatch.setattr(store.shutil, "rmtree", full)
    (saved,) = save(tmp_path, 3)
    assert saved.failure is None and "an old checkpoint cannot be removed" in caplog.text
    assert [c.step for c in checkpoints_in(tmp_path).complete()] == [2, 3]
    monkeypatch.undo()
    (saved,) = save(tmp_path, 4)
    assert saved.failure is None
    assert steps_in(tmp_path) == ["step_00000003", "step_00000004"], "and what was left is gone"
