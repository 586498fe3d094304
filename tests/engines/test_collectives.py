"""Values that ranks of the trainer tell each other: as they were, and never executed."""

import math
import pickle
from pathlib import Path

import torch.distributed as dist

from relax_hpc.runtime.comm.torch_group import all_gather_json, broadcast_json

NUMBERS = [0.1, -0.0, 5e-324, 2**63, math.inf, -math.inf, math.nan]


def exchange():
    mine = [dist.get_rank(), {"ä": NUMBERS[: dist.get_rank() * 7], "none": None}]
    return all_gather_json(mine), [broadcast_json(mine, source) for source in (0, 1)]


def test_every_rank_is_told_the_same_to_the_last_bit(ranks):
    said = [[0, {"ä": [], "none": None}], [1, {"ä": NUMBERS, "none": None}]]
    for gathered, broadcast in ranks[2].call(exchange):
        assert str(gathered) == str(broadcast) == str(said)  # text, since nan is not nan


def leave_a_mark(folder):
    (Path(folder) / str(dist.get_rank())).touch()


class Bomb:
    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return leave_a_mark, (self.folder,)


def deceive(folder):
    """Rank 0 says what torch's own collectives would; rank 1 makes of it what it can."""
    said, bomb = [], Bomb(folder)
    for lie, hear in (
        (lambda: dist.broadcast_object_list([bomb], 0), lambda: broadcast_json(None, 0)),
        (lambda: dist.all_gather_object([0, 0], bomb), lambda: all_gather_json(None)),
    ):
        try:
            hear() if dist.get_rank() else lie()
        except (ValueError, pickle.UnpicklingError) as error:
            said.append(type(error))
    return said


def test_a_pickle_in_the_place_of_a_value_is_an_error_and_is_not_executed(ranks, tmp_path):
    _, said = ranks[2].call(deceive, folder=str(tmp_path))
    assert said == [UnicodeDecodeError] * 2
    assert [mark.name for mark in tmp_path.iterdir()] == ["0"]  # the liar's own
