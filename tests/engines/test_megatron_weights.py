"""Hugging Face checkpoints into the trainer and out again, bitwise, on any grid."""

import numpy as np
import pytest
from safetensors.torch import load_file
from tiny_models import make
from trainers import equal, job, size_of

pytestmark = pytest.mark.long

DENSE = ["one", "tp2", "tp4", "pp2", "pp2_vpp2", "cp2", "tp2_pp2"]
"""Of four ranks; replicas fill them up. On two key-value heads."""
EXPERTS = ["one", "ep2", "tp2_etp2", "tp2_ep2", "pp2_ep2", "tp2_ep2_etp2", "pp2_vpp2"]
GRIDS = {"tied": DENSE, "untied": DENSE, "experts": EXPERTS, "tied experts": EXPERTS}
HELD = {"untied": "files", "experts": "fused experts"}
"""The same model in several files, or as transformers has it in memory: one tensor for all experts
of a layer."""


@pytest.fixture(scope="module")
def ranks(ranks):
    return ranks[4]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    tied, some = {"tie_word_embeddings": True}, {"mlp_only_layers": [0], "norm_topk_prob": True}
    made = {
        "tied": ("qwen3", tied),
        "untied": ("qwen3", {}),
        "files": ("qwen3", {"saving": {"max_shard_size": "20KB"}}),
        "experts": ("qwen3_moe", some),
        "tied experts": ("qwen3_moe", some | tied),
        "fused experts": ("qwen3_moe", some | {"saving": {"save_original_format": False}}),
    }
    return {
        kind: make(tmp_path_factory.mktemp("model"), family, num_hidden_layers=4, **changes)
        for kind, (family, changes) in made.items()
    }


def stored(folder):
    return {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}


def load(ranks, folder, grid):
    return ranks.load_model(config=job(folder, f"{grid}_dp{4 // size_of(grid)}"))


@pytest.fixture(scope="module")
def orders(ranks, folders):
    """The names in the order of the model, which is the same on every grid."""
    found = {}
    for kind in GRIDS:
        load(ranks, folders[kind], "one")
        found[kind] = [name for name, _ in ranks.export()[0]]
    return found


@pytest.mark.parametrize(("kind", "grid"), [(k, g) for k, grids in GRIDS.items() for g in grids])
def test_a_model_comes_back_bitwise_on_every_rank(ranks, folders, orders, kind, grid):
    truth, order = stored(folders[kind]), orders[kind]
    assert sorted(order) == sorted(truth)
    for held in filter(None, (kind, HELD.get(kind))):
        load(ranks, folders[held], grid)
        for weights in ranks.export():
            assert [name for name, _ in weights] == order
            assert equal(dict(weights), truth)
        for to_all in (False, True):
            answers = ranks.gathered_twice(bucket_bytes=20_000, to_all=to_all)
            assert [len(versions) for _, versions in answers] == [2, *[2 * to_all] * 3]
            for specs, versions in answers:
                assert specs == [(name, tuple(truth[name].shape)) for name in order]
                for factor, found in enumerate(versions, start=1):
                    for name, tensor in zip(order, found, strict=True):
                        assert np.array_equal(tensor, factor * truth[name].numpy()), name
