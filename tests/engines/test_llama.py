"""Models of Llama's form: what Hugging Face computes, on every grid, and back again bitwise."""

import json

import pytest
import torch
from megatron_reference import reference as hugging_face
from tiny_models import ROWS, by_transformers, check, distance, linked, make, write
from trainers import assert_a_grid_equals, opened

from relax_hpc.errors import ConfigError
from relax_hpc.trainer.models.registry import read_architecture

MODELS = {
    "llama": ("llama", {}),
    "tied llama": ("llama", {"tie_word_embeddings": True, "head_dim": None}),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
}


@pytest.fixture(scope="module", params=MODELS)
def truth(request, tmp_path_factory):
    from transformers import AutoModelForCausalLM

    family, changes = MODELS[request.param]
    folder = make(tmp_path_factory.mktemp("model"), family, num_hidden_layers=4, **changes)
    torch.set_num_threads(1)
    return hugging_face(folder, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))


@pytest.mark.long
@pytest.mark.parametrize("grid", ["one", "tp2", "pp2", "cp2", "dp2"])
def test_a_grid_equals_hugging_face(ranks, truth, grid):
    decays = {"optimizer": {"weight_decay": 0.1}}
    assert_a_grid_equals(
        truth, lambda: opened(ranks, truth.folder, grid, **decays), rtol=2e-6, atol=5e-6
    )


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2"])
def test_trainer_and_embedded_engine_compute_what_transformers_does(ranks, weights, family):
    check(ranks, weights[family], by_transformers(weights[family]), engine=True)


@pytest.mark.parametrize(
    "changes",
    [{"num_key_value_heads": None}, {"head_dim": None}, {"num_attention_heads": 2}],
    ids=["no key-value heads said", "no head_dim said", "heads that are all"],
)
def test_shapes_that_a_file_leaves_out_are_those_of_transformers(ranks, tmp_path, changes):
    folder = make(tmp_path, "llama", **changes)
    check(ranks, folder, by_transformers(folder), engine=True)
    said = read_architecture(folder)
    record = json.loads((folder / "config.json").read_text())
    nothing = dict.fromkeys(key for key, value in changes.items() if value is None)
    (folder / "config.json").write_text(json.dumps(record | nothing))  # null is nothing, too
    assert read_architecture(folder) == said


def test_texts_of_mistral_are_no_longer_than_its_window(ranks, weights, tmp_path):
    folder = linked(tmp_path, weights["mistral"], "mistral")
    longest = max(len(row.token_ids) for row in ROWS)
    plain = by_transformers(weights["mistral"])
    # The last token that says something of another one is that before the last.
    for window, is_seen in ((longest - 1, True), (longest - 2, False)):
        write(folder, "mistral", sliding_window=window)
        assert (distance(by_transformers(folder), plain) < 1e-5) == is_seen
    for window, longest in ((None, 64), (64, 64), (4096, 64), (63, 63)):
        shape = read_architecture(write(folder, "mistral", sliding_window=window))
        assert (shape.max_positions, shape.is_window) == (longest, longest < 64)
    write(folder, "mistral", max_position_embeddings=9000, sliding_window=None)
    record = json.loads((folder / "config.json").read_text())
    assert read_architecture(folder).max_positions == 4096  # nothing said
    (folder / "config.json").write_text(json.dumps(record | {"sliding_window": None}))
    assert read_architecture(folder).max_positions == 9000
    write(folder, "mistral", sliding_window=0)
    with pytest.raises(ConfigError, match=r"sliding_window = 0: a positive integer is expected"):
        read_architecture(folder)
