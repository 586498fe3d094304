"""Weights through shared memory to an engine of two ranks, whose towers see and hear by halves."""

import pytest
from houses import house_of, publish, trainer
from seer import ask
from sglang_under_test import SGLANG_PYTHON
from test_weights_seeing import assert_seen_by, shown, towers  # noqa: F401

pytestmark = [
    pytest.mark.soak, pytest.mark.sglang,
    pytest.mark.skipif(not SGLANG_PYTHON, reason="needs SGLang"),
]  # fmt: skip


HALVES = 5e-6  # nats, float32: sums of two ranks


@pytest.mark.parametrize("towers", ["vl", "omni"], indirect=True)
def test_every_version_of_a_tower_reaches_both_ranks_of_an_engine(towers, tmp_path):  # noqa: F811
    seer, folders = towers[0], [each.folder for each in towers]
    prompts = [shown(seer, tmp_path, number) for number in (1, 2)]
    house = house_of("sglang", folders, tmp_path, count=1, ranks_each=2, lanes=True)
    with house as house, trainer(house) as ranks:
        house.announce()
        seer.process = house.engines[0]
        for version in range(4):
            done = publish(ranks, house, version, check=True)
            assert (done["members"], done["again"]) == (house.ids, False)
            assert done["verified"]["equal"], done["verified"]
            for prompt in prompts:
                [made] = ask(seer, [prompt])
                assert_seen_by(towers, version, prompt, made, most=HALVES)
