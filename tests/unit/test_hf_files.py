"""Checkpoints that are not what their config.json says; new ones are complete or not there."""

import json

import numpy as np
import pytest
import torch
from hf_checkpoint import EXPERTS, INDEX, QWEN3, write
from safetensors import SafetensorError
from safetensors.torch import load_file

from relax_hpc.errors import ConfigError
from relax_hpc.roles.facts import Facts
from relax_hpc.runtime.files import storage
from relax_hpc.trainer.checkpoints.saving import save_hf
from relax_hpc.trainer.models import hf_folder
from relax_hpc.trainer.models.hf_files import HfFiles
from relax_hpc.trainer.models.names import Parameter, TensorPiece


def check(folder):
    Facts(folder).check_weights(folder)


def fuse(weights, layers="01", number=4):
    for layer in layers:
        prefix = f"model.layers.{layer}.mlp.experts."
        for name in [name for name in weights if name.startswith(prefix)]:
            del weights[name]
        weights[prefix + "gate_up_proj"] = np.zeros((number, 12, 8), np.float16)
        weights[prefix + "down_proj"] = np.zeros((number, 8, 6), np.float16)


LOCAL = {key: value for key, value in EXPERTS.items() if key != "num_experts"}
TWICE = {"lm_head.weight": np.zeros((8, 8), np.float16)}


@pytest.mark.parametrize(
    ("config", "change", "num_files"),
    [
        (QWEN3, None, 3),
        (QWEN3, lambda weights: weights.update(TWICE), 1),  # the matrix that it is tied to
        (EXPERTS, fuse, 1),  # as transformers has them in memory
        (LOCAL | {"num_local_experts": 4}, None, 1),
    ],
)
def test_what_config_json_says_is_accepted(tmp_path, config, change, num_files):
    check(write(tmp_path, config, change, num_files))


NORM = "model.layers.1.self_attn.k_norm.weight"
HEAD = "lm_head.weight"
CHANGES = {
    "a tensor is missing": (QWEN3, lambda w: w.pop(NORM),
        f"has no tensor {NORM}, which model_type 'qwen3' in config.json asks for"),
    "biases": (QWEN3,
        lambda w: w.update({f"model.layers.{n}.self_attn.q_proj.bias": np.zeros(8) for n in "01"}),
        "has 2 tensors that model_type 'qwen3' in config.json does not have, the first is "
        "model.layers.0.self_attn.q_proj.bias"),
    "another vocabulary": (QWEN3,
        lambda w: w.update({"model.embed_tokens.weight": np.zeros((12, 8))}),
        "model.embed_tokens.weight has 12 rows, but vocab_size in config.json is 8"),
    "another output matrix than the embedding that it is tied to": (QWEN3,
        lambda w: w.update({HEAD: np.eye(8, dtype=np.float16)}),
        "tie_word_embeddings = true in config.json, but there is an lm_head.weight other than "),
    "fewer fused experts": (EXPERTS | {"mlp_only_layers": [0]}, lambda w: fuse(w, "1", 3),
        "experts.gate_up_proj is [3, 12, 8], but config.json asks for [4, 12, 8]"),
}  # fmt: skip


@pytest.mark.parametrize("case", CHANGES)
def test_other_tensors_than_config_json_says_are_refused_in_one_line(tmp_path, case):
    config, change, message = CHANGES[case]
    with pytest.raises(ConfigError, match=r"^model\.path = [^\n]*$") as error:
        check(write(tmp_path, config, change))
    assert message in str(error.value)


def cut(folder):
    file = folder / "1.safetensors"
    file.write_bytes(file.read_bytes()[:-7])


FILES = {
    "truncated": (cut, "1.safetensors is damaged or not complete"),
    "several missing": (
        lambda f: [(f / f"{n}.safetensors").unlink() for n in (0, 2)],
        f"{INDEX} names 0.safetensors, 2.safetensors, which are not there",
    ),
    "not in its file": (
        lambda f: (f / "1.safetensors").write_bytes((f / "2.safetensors").read_bytes()),
        f"1.safetensors has no tensor model.layers.0.input_layernorm.weight, though {INDEX} says",
    ),
    "a whole model beside an index of others": (
        lambda f: (f / "model.safetensors").write_bytes((f / "0.safetensors").read_bytes()),
        f"has model.safetensors beside {INDEX}, which names other files",
    ),
}


def test_ranks_compare_a_repeated_output_matrix_part_by_part(tmp_path):
    other = np.zeros((8, 8), np.float16)
    other[5] = 1
    write(tmp_path, QWEN3, lambda w: w.update({"lm_head.weight": other}))
    with HfFiles(tmp_path) as files:
        for part in (0, 1, 3):
            files.check_tied(part, 4)
        for whole in ((2, 4), (0, 1), (1, 2)):
            with pytest.raises(ConfigError, match="lm_head"):
                files.check_tied(*whole)


@pytest.mark.parametrize("case", FILES)
def test_files_that_are_not_whole_are_refused_in_one_line(tmp_path, case):
    damage, message = FILES[case]
    write(tmp_path, QWEN3, num_files=3)
    damage(tmp_path)
    with pytest.raises(ConfigError) as error:
        check(tmp_path)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_query_groups_take_turns_and_may_be_shared_by_ranks():
    rows = {"q": (8, 3), "k": (2, 3), "v": (2, 3)}
    packed = Parameter(("qkv",), rows, "rows", groups=2)
    # One rank: q0-3, k0, v0, then q4-7, k1, v1.
    group = [(0, 0, 0, 4), (1, 0, 4, 1), (2, 0, 5, 1), (0, 4, 6, 4), (1, 1, 10, 1), (2, 1, 11, 1)]
    assert list(packed.pieces(0, 1)) == [TensorPiece(s, 0, *rest) for s, *rest in group]
    # Four ranks of three rows: the second has q3, k0, v0; the third q4-6.
    second = [(0, 3, 0, 1), (1, 0, 1, 1), (2, 0, 2, 1)]
    assert list(packed.pieces(1, 4)) == [TensorPiece(s, 0, *rest) for s, *rest in second]
    assert list(packed.pieces(2, 4)) == [TensorPiece(0, 0, 4, 0, 3)]
    assert packed.shard_shape(4) == (3, 3)


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    (folder / "original").mkdir(parents=True)
    (folder / "config.json").write_text('{"vocab_size": 3, "torch_dtype": "bfloat16"}')
    for name in ("tokenizer.json", "model.safetensors", "model.safetensors.index.json", "x.gguf"):
        (folder / name).write_text("old")
    return folder


WEIGHTS = {"b": torch.arange(6.0).view(2, 3), "a": torch.ones(4), "c": torch.zeros(2)}


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_has_the_new_weights_and_the_small_files_of_its_source(tmp_path, source):
    save_hf(tmp_path / "new", iter(WEIGHTS.items()), source, write=True)
    assert names(tmp_path / "new") == ["config.json", "model.safetensors", "tokenizer.json"]
    loaded = load_file(tmp_path / "new" / "model.safetensors")
    assert all(torch.equal(loaded[name], WEIGHTS[name]) for name in WEIGHTS)
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    assert config == {"vocab_size": 3, "torch_dtype": "float32"}
    assert names(tmp_path) == ["new", "source"]


def test_an_interrupted_export_leaves_what_was_there(tmp_path, source):
    def broken():
        yield "a", torch.zeros(4)
        raise RuntimeError("a rank died")

    new = tmp_path / "new"
    with pytest.raises(RuntimeError):
        save_hf(new, broken(), source, write=True)
    assert not new.exists()
    save_hf(new, iter(WEIGHTS.items()), source, write=True)
    with pytest.raises(RuntimeError):
        save_hf(new, broken(), source, write=True)
    assert load_file(new / "model.safetensors").keys() == WEIGHTS.keys()
    save_hf(new, iter({"d": torch.ones(1)}.items()), source, write=True)
    assert load_file(new / "model.safetensors").keys() == {"d"}
    assert names(tmp_path) == ["new", "source"]


def test_an_export_of_a_run_waits_for_room(tmp_path, source, monkeypatch):
    left, save = [2], hf_folder.save_file

    def full(*args, **settings):
        if left[0]:
            left[0] -= 1
            raise SafetensorError("I/O error: No space left on device (os error 28)")
        save(*args, **settings)

    monkeypatch.setattr(hf_folder, "save_file", full)
    with pytest.raises(OSError, match="No space left"):  # a command waits for nothing
        hf_folder.write(tmp_path / "new", WEIGHTS.items(), source)
    left[0] = 2
    storage.settle(60)
    try:
        hf_folder.write(tmp_path / "new", WEIGHTS.items(), source)
    finally:
        storage.settle(0)
    assert left == [0]
    assert load_file(tmp_path / "new" / "model.safetensors").keys() == WEIGHTS.keys()
