"""Models of Llama's form: what Hugging Face computes, on every grid, and back again bitwise."""

import json

import megatron_worker as worker
import numpy as np
import pytest
import torch
import weights_worker
from megatron_reference import clear_gradient, collect
from megatron_reference import reference as hugging_face
from megatron_worker import job
from safetensors.torch import load_file
from tiny_models import ROWS, by_transformers, check, distance, linked, make, write

from relax_hpc.errors import ConfigError
from relax_hpc.models.registry import read_architecture

GRIDS = {
    "one": (1, {}),
    "tp2": (2, {"tensor_parallel": 2}),
    "pp2": (2, {"pipeline_parallel": 2}),
    "cp2": (2, {"context_parallel": 2}),
    "dp2": (2, {"data_parallel": 2}),
}
MODELS = {
    "llama": ("llama", {}),
    "tied llama": ("llama", {"tie_word_embeddings": True, "head_dim": None}),
    "mistral": ("mistral", {}),
}


@pytest.fixture(scope="module", params=MODELS)
def truth(request, tmp_path_factory):
    from transformers import AutoModelForCausalLM

    family, changes = MODELS[request.param]
    folder = make(tmp_path_factory.mktemp("model"), family, num_hidden_layers=4, **changes)
    torch.set_num_threads(1)
    return hugging_face(folder, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))


@pytest.mark.long
@pytest.mark.parametrize("grid", GRIDS)
def test_a_grid_equals_hugging_face(ranks, truth, grid):
    """Logprobs, loss, gradients, and the weights after two updates with torch's AdamW."""
    size, layout = GRIDS[grid]
    pool, batch = ranks[size], {"rows": truth.rows, "advantages": truth.advantages}
    config = job(truth.folder, layout=layout, optimizer={"weight_decay": 0.1})
    pool.call(worker.open_trainer, config=config)
    logprobs = collect(pool.call(worker.logprobs, rows=truth.rows))
    for mine, theirs in zip(logprobs, truth.logprobs, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=2e-6, atol=5e-6)
    for gradients in pool.call(worker.gradients, **batch):
        assert gradients.keys() == truth.gradients[0].keys()
        for name, theirs in truth.gradients[0].items():
            np.testing.assert_allclose(gradients[name], theirs, atol=1e-5, err_msg=name)
    pool.call(worker.open_trainer, config=config)
    for step in range(2):
        metrics = pool.call(worker.train, **batch)
        assert metrics[0]["grad_norm"] == pytest.approx(truth.norms[step], rel=1e-5)
        for weights in pool.call(worker.weights):
            for name, theirs in truth.steps[step].items():
                clear = clear_gradient(truth, name) & clear_gradient(truth, name, step)
                assert np.abs(weights[name] - theirs)[clear].max() < 1e-5, (name, step)


@pytest.mark.long
@pytest.mark.parametrize("grid", ["tp2", "pp2"])
def test_what_is_exported_is_bitwise_what_was_read_and_transformers_reads_it(
    ranks, truth, tmp_path, grid
):
    size, layout = GRIDS[grid]
    ranks[size].call(weights_worker.load, config=job(truth.folder, layout=layout))
    out = tmp_path / "out"
    ranks[size].call(weights_worker.save_hf, folder=out, source=truth.folder, writer=0)
    (was,) = truth.folder.glob("*.safetensors")
    was = load_file(was)
    found = {n: w for file in out.glob("*.safetensors") for n, w in load_file(file).items()}
    assert found.keys() == was.keys()
    assert all(torch.equal(found[name], was[name]) for name in was)
    ours, theirs = (by_transformers(folder) for folder in (out, truth.folder))
    assert all(map(np.array_equal, ours, theirs))


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
    folder = linked(tmp_path, weights["mistral"], "mistral", sliding_window=20)
    shape = read_architecture(folder)
    assert (shape.max_positions, shape.is_window) == (20, True)
    assert shape.said_positions == "a sliding window of 20 (config.json: sliding_window)"
    longest = max(len(row.token_ids) for row in ROWS)
    plain = by_transformers(weights["mistral"])
    # The last token that says something of another one is that before the last.
    for window, is_seen in ((longest - 1, True), (longest - 2, False)):
        write(folder, "mistral", sliding_window=window)
        assert (distance(by_transformers(folder), plain) < 1e-5) == is_seen
    for window, longest in ((None, 64), (64, 64), (4096, 64), (63, 63)):
        write(folder, "mistral", sliding_window=window)
        assert read_architecture(folder).max_positions == longest
    write(folder, "mistral", max_position_embeddings=9000, sliding_window=None)
    record = json.loads((folder / "config.json").read_text())
    assert read_architecture(folder).max_positions == 4096  # nothing said
    (folder / "config.json").write_text(json.dumps(record | {"sliding_window": None}))
    assert read_architecture(folder).max_positions == 9000
    for wrong in (0, True, "4096"):
        write(folder, "mistral", sliding_window=wrong)
        with pytest.raises(ConfigError, match=r"sliding_window = .*: a positive integer is expec"):
            read_architecture(folder)


@pytest.mark.parametrize(
    ("name", "value"),
    [("attention_bias", True), ("mlp_bias", True), ("pretraining_tp", 2), ("hidden_act", "gelu"),
     ("rope_interleaved", True), ("architectures", ["MistralForCausalLM"])],
)  # fmt: skip
def test_what_is_not_computed_is_refused_by_name(tmp_path, name, value):
    write(tmp_path, "llama", **{name: value})
    with pytest.raises(ConfigError) as refused:
        read_architecture(tmp_path)
    assert str(refused.value).startswith(f"{tmp_path / 'config.json'}: {name} = {value!r}: only ")
