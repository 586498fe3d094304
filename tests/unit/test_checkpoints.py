"""Which checkpoint counts when trainers supersede each other."""

import pytest

from relax_hpc.bus.plan import PlanPosition
from relax_hpc.comm.world import SoloWorld
from relax_hpc.errors import BusError, FencedError
from relax_hpc.roles.checkpoints import Checkpoints


class Trainer:
    def __init__(self, step, weight=0):
        self.step, self.weight = step, weight

    def save(self, folder):
        (folder / "weight").write_text(str(self.weight))

    def load(self, folder):
        self.weight = int((folder / "weight").read_text())


def save(root, step, epoch, weight, **kwargs):
    checkpoints = Checkpoints(root, SoloWorld(), PlanPosition, keep=2)
    checkpoints.save(Trainer(step, weight), PlanPosition(epoch, step, step), **kwargs)


def test_the_newest_is_loaded_and_old_ones_go(tmp_path):
    for step in (3, 6, 9):
        save(tmp_path, step, epoch=1, weight=step)
    checkpoints = Checkpoints(tmp_path, SoloWorld(), PlanPosition, keep=2)
    assert [c.step for c in checkpoints.complete()] == [6, 9]
    trainer = Trainer(0)
    assert checkpoints.resume(trainer).position == PlanPosition(1, 9, 9)
    assert trainer.weight == 9


def test_one_that_a_superseded_trainer_slipped_in_is_passed_over(tmp_path):
    save(tmp_path, 3, epoch=2, weight=3)
    save(tmp_path, 6, epoch=1, weight=666)
    checkpoints = Checkpoints(
        tmp_path, SoloWorld(), PlanPosition, keep=2, is_valid=lambda p: p.epoch == 2
    )
    trainer = Trainer(0)
    assert checkpoints.resume(trainer).step == 3
    assert trainer.weight == 3
    checkpoints = Checkpoints(tmp_path, SoloWorld(), PlanPosition, keep=2, is_valid=lambda p: False)
    with pytest.raises(BusError, match="none of the checkpoints is of this run's plan"):
        checkpoints.resume(trainer)


def test_a_superseded_trainer_replaces_nothing(tmp_path):
    save(tmp_path, 3, epoch=2, weight=3)
    with pytest.raises(FencedError, match="was saved under plan epoch 2, this trainer's is 1"):
        save(tmp_path, 3, epoch=1, weight=666)

    def fenced():
        raise FencedError("another trainer took over")

    with pytest.raises(FencedError, match="took over"):
        save(tmp_path, 6, epoch=1, weight=666, check_fenced=fenced)
    trainer = Trainer(0)
    assert Checkpoints(tmp_path, SoloWorld(), PlanPosition, keep=2).resume(trainer).step == 3
    assert trainer.weight == 3


def test_a_resumed_trainer_saves_a_step_again(tmp_path):
    save(tmp_path, 3, epoch=1, weight=1)
    save(tmp_path, 3, epoch=2, weight=2)
    trainer = Trainer(0)
    assert (
        Checkpoints(tmp_path, SoloWorld(), PlanPosition, keep=2).resume(trainer).position.epoch == 2
    )
    assert trainer.weight == 2
