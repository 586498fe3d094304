"""When a save counts as done: what ranks report to each other, one answer at a time."""

import pytest
from role_fakes import CheckpointPart

from relax_hpc.errors import CheckpointError, FencedError
from relax_hpc.trainer.checkpoints.store import PendingSave, Saved, _SaveState


class World:
    """Two ranks; this one hears what the test says of the other."""

    size = 2

    def __init__(self, rank=0):
        self.rank, self.other = rank, _SaveState(True, None, None)

    def allgather(self, mine):
        return [mine, self.other] if self.rank == 0 else [self.other, mine]


class Source:
    step = 6

    def checkpoint_part(self, *, copy):
        return CheckpointPart({"weight": "12345"})


def begin(folder, world, publish=lambda: None):
    save = PendingSave.begin(Source(), folder / "draft", world, publish, copy=True, timeout_s=20)
    assert save._ended.wait(20)
    return save


def test_a_save_is_not_done_while_a_rank_still_writes_from_its_copy(tmp_path):
    world = World()
    save = begin(tmp_path, world)
    world.other = _SaveState(False, None, None)
    assert save.poll() is None
    world.other = _SaveState(True, None, None)
    saved = save.poll()
    assert (saved.step, saved.num_bytes, saved.failure) == (6, 5, None)


def test_another_rank_takes_what_rank_0_says_and_publishes_nothing(tmp_path):
    world, published = World(rank=1), []
    save = begin(tmp_path, world, lambda: published.append(True))
    assert save.poll() is None  # rank 0 has not published it yet
    world.other = _SaveState(True, None, done := Saved(6, num_bytes=10))
    assert save.poll() is done and save.wait() is done
    assert published == []


@pytest.mark.parametrize("error", [CheckpointError("disk full"), FencedError("took over")])
def test_a_failure_of_another_rank_is_everybodys_and_a_fence_ends_the_actor(tmp_path, error):
    world = World()
    save = begin(tmp_path, world)
    world.other = _SaveState(True, error, None)
    if isinstance(error, FencedError):
        with pytest.raises(FencedError):
            save.poll()
    else:
        assert str(save.poll()) == "disk full"
    assert save._cancelled.is_set()
