"""Weights through shared memory, from each rank of a trainer to the engine's rank beside it."""

import pytest
import torch
from engine_fixtures import EOS, prompt_of, reference_logprobs, sampled
from houses import at_that_moment, freeze, house_of, kill, publish, trainer

pytestmark = pytest.mark.long

LAYOUTS = {"alone": ("embedded", 2, 1), "pairs": ("embedded", 4, 1), "sglang": ("sglang", 1, 2)}
"""Kind and number of engines, and ranks of each, beside the two ranks of the trainer."""


@pytest.fixture(scope="module", params=LAYOUTS)
def shared(request, checkpoints, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    kind, count, ranks = LAYOUTS[request.param]
    with house_of(kind, checkpoints, folder, count=count, ranks_each=ranks, lanes=True) as house:
        yield house


def logprobs_are_those_of(house, engine, checkpoint):
    [found] = sampled(
        engine, prompt_of(7), [1], max_new_tokens=12, stop_token_ids=(EOS,), ignore_eos=False
    )
    expected = reference_logprobs(checkpoint, prompt_of(7), found.token_ids)
    return torch.tensor(found.logprobs).sub(expected).abs().max() <= 1e-4


def test_every_version_reaches_every_rank_of_every_engine_bit_for_bit(house):
    with trainer(house) as ranks:
        for version in (0, 1, 2, 4):
            done = publish(ranks, house, version, check=True)
            assert (done["members"], done["fenced"], done["again"]) == (house.ids, [], False)
            assert done["verified"]["equal"]
            for engine in house.engines:
                assert engine.client().version() == version
                assert logprobs_are_those_of(house, engine, house.checkpoints[version % 3])
        publish(ranks, house, 5)  # without a check it is the same
        assert logprobs_are_those_of(house, house.engines[0], house.checkpoints[2])


def test_a_tensor_that_engines_do_not_know_is_named_and_no_rank_waits_for_it(house):
    for bend, named in (("shape", "model.embed_tokens.weight"), ("name", "model.nothing.weight")):
        house.announce()
        # Longer than this test waits for the ranks.
        with trainer(house, timeout_s=1000, bend=bend) as ranks:
            fenced, again = [], True
            while again:
                done = publish(ranks, house, 1)
                assert done["members"] == []
                fenced, again = fenced + done["fenced"], done["again"]
        assert sorted(fenced) == house.ids
        for entry in house.roster.members.values():
            assert (entry.state, named in entry.reason) == ("FENCED", True), entry
        assert all(engine.alive for engine in house.engines)
    house.announce()
    with trainer(house) as ranks:
        assert publish(ranks, house, 1, check=True)["verified"]["equal"]


@pytest.mark.parametrize("shared", ["alone", "pairs"], indirect=True)
@pytest.mark.parametrize(("act", "timeout_s"), [(freeze, 4), (kill, 30)])
def test_an_engine_that_stops_in_an_update_is_fenced_and_the_others_get_all_of_it(
    house, act, timeout_s
):
    with trainer(house, timeout_s) as ranks:
        assert publish(ranks, house, 1)["members"] == house.ids
        with at_that_moment(ranks, house, "in", act):
            done = publish(ranks, house, 2)
        assert (done["members"], done["fenced"], done["again"]) == ([], ["rollout-1"], True)
        done = publish(ranks, house, 2, check=True)
        others = [name for name in house.ids if name != "rollout-1"]
        assert (done["members"], done["again"]) == (others, False)
        assert done["verified"]["equal"]
