"""Checkpoints that are not what their config.json says are refused before anything is queued."""

import json

import numpy as np
import pytest
from hf_checkpoint import EXPERTS, INDEX, QWEN3, tensors, write

from relax_hpc.errors import ConfigError
from relax_hpc.models import registry
from relax_hpc.models.hf_files import HfFiles
from relax_hpc.models.names import Parameter, Piece
from relax_hpc.roles.training import check as training_check


@pytest.fixture(params=[QWEN3, EXPERTS], ids=["dense", "experts"])
def config(request):
    return request.param


def check(folder):
    training_check.check_weights(folder, registry.read_architecture(folder))


@pytest.mark.parametrize("num_files", [1, 3])
def test_what_config_json_says_is_accepted(tmp_path, config, num_files):
    check(write(tmp_path, config, num_files=num_files))


def test_a_tied_output_matrix_may_be_repeated(tmp_path):
    twice = {"lm_head.weight": np.zeros((8, 8), np.float16)}
    check(write(tmp_path, QWEN3, lambda w: w.update(twice)))


def test_experts_may_be_fused_as_transformers_has_them_in_memory(tmp_path):
    def fuse(weights):
        for layer in range(2):
            prefix = f"model.layers.{layer}.mlp.experts."
            for name in [name for name in weights if name.startswith(prefix)]:
                del weights[name]
            weights[prefix + "gate_up_proj"] = np.zeros((4, 12, 8), np.float16)
            weights[prefix + "down_proj"] = np.zeros((4, 8, 6), np.float16)

    check(write(tmp_path, EXPERTS, fuse))


def test_the_number_of_experts_has_two_names(tmp_path):
    local = {key: value for key, value in EXPERTS.items() if key != "num_experts"}
    check(write(tmp_path, local | {"num_local_experts": 4}))


NORM = "model.layers.1.self_attn.k_norm.weight"
CHANGES = {
    "a tensor is missing": (
        QWEN3,
        lambda w: w.pop(NORM),
        f"has no tensor {NORM}, which model_type 'qwen3' in config.json asks for",
    ),
    "an expert is missing": (
        EXPERTS,
        lambda w: w.pop("model.layers.1.mlp.experts.3.up_proj.weight"),
        "has no tensor model.layers.1.mlp.experts.3.up_proj.weight",
    ),
    "no output matrix": (
        QWEN3 | {"tie_word_embeddings": False},
        lambda w: w.pop("lm_head.weight"),
        "has no tensor lm_head.weight",
    ),
    "biases": (
        QWEN3,
        lambda w: w.update({f"model.layers.{n}.self_attn.q_proj.bias": np.zeros(8) for n in "01"}),
        "has 2 tensors that model_type 'qwen3' in config.json does not have, the first is "
        "model.layers.0.self_attn.q_proj.bias",
    ),
    "another vocabulary": (
        QWEN3,
        lambda w: w.update({"model.embed_tokens.weight": np.zeros((12, 8))}),
        "model.embed_tokens.weight has 12 rows, but vocab_size in config.json is 8",
    ),
    "another shape": (
        QWEN3,
        lambda w: w.update({NORM: np.zeros(4)}),
        f"{NORM} is [4], but config.json asks for [2]",
    ),
    "another output matrix than the embedding that it is tied to": (
        QWEN3,
        lambda w: w.update({"lm_head.weight": np.eye(8, dtype=np.float16)}),
        "tie_word_embeddings = true in config.json, but there is an lm_head.weight other than "
        "model.embed_tokens.weight; set it to false to train both, or remove the tensor",
    ),
    "an output matrix of another type": (
        QWEN3,
        lambda w: w.update({"lm_head.weight": np.zeros((8, 8), np.float32)}),
        "there is an lm_head.weight other than model.embed_tokens.weight",
    ),
    "fewer fused experts": (
        EXPERTS | {"mlp_only_layers": [0]},
        lambda w: [
            *(w.pop(name) for name in list(w) if ".1.mlp.experts." in name),
            w.update(
                {
                    "model.layers.1.mlp.experts.gate_up_proj": np.zeros((3, 12, 8)),
                    "model.layers.1.mlp.experts.down_proj": np.zeros((3, 8, 6)),
                }
            ),
        ],
        "experts.gate_up_proj is [3, 12, 8], but config.json asks for [4, 12, 8]",
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_other_tensors_than_config_json_says_are_refused_in_one_line(tmp_path, case):
    config, change, message = CHANGES[case]
    with pytest.raises(ConfigError) as error:
        check(write(tmp_path, config, change))
    said = str(error.value)
    assert said.startswith(f"model.path = {tmp_path}: ")
    assert message in said and "\n" not in said


def cut(folder):
    file = folder / "1.safetensors"
    file.write_bytes(file.read_bytes()[:-7])


FILES = {
    "truncated": (cut, "1.safetensors is damaged or not complete"),
    "empty": (lambda f: (f / "1.safetensors").write_bytes(b""), "1.safetensors is damaged or not"),
    "missing": (
        lambda f: (f / "1.safetensors").unlink(),
        f"{INDEX} names 1.safetensors, which is not there; download it again",
    ),
    "several missing": (
        lambda f: [(f / f"{n}.safetensors").unlink() for n in (0, 2)],
        f"{INDEX} names 0.safetensors, 2.safetensors, which are not there",
    ),
    "no weight_map": (lambda f: (f / INDEX).write_text("{}"), f"{INDEX} has no weight_map"),
    "no JSON": (lambda f: (f / INDEX).write_text("{"), f"{INDEX}: is not JSON"),
    "not in its file": (
        lambda f: (f / "1.safetensors").write_bytes((f / "2.safetensors").read_bytes()),
        f"1.safetensors has no tensor model.layers.0.input_layernorm.weight, though {INDEX} says",
    ),
    "a whole model beside an index of others": (
        lambda f: (f / "model.safetensors").write_bytes((f / "0.safetensors").read_bytes()),
        f"has model.safetensors beside {INDEX}, which names other files: transformers would read "
        "the one, SGLang the others; remove what is not the model",
    ),
    "no index": (
        lambda f: (f / INDEX).unlink(),
        f"has neither model.safetensors nor {INDEX}; download the weights in the safetensors",
    ),
}


def test_an_index_of_a_single_file_is_no_other_model(tmp_path):
    write(tmp_path, QWEN3)
    names = list(tensors(tmp_path))
    index = {"weight_map": dict.fromkeys(names, "model.safetensors")}
    (tmp_path / INDEX).write_text(json.dumps(index))
    check(tmp_path)


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
    assert list(packed.pieces(0, 1)) == [Piece(s, 0, *rest) for s, *rest in group]
    # Four ranks of three rows: the second has q3, k0, v0; the third q4-6.
    second = [(0, 3, 0, 1), (1, 0, 1, 1), (2, 0, 2, 1)]
    assert list(packed.pieces(1, 4)) == [Piece(s, 0, *rest) for s, *rest in second]
    assert list(packed.pieces(2, 4)) == [Piece(0, 0, 4, 0, 3)]
    assert packed.shard_shape(4) == (3, 3)


def test_a_rank_has_its_part_of_the_gate_above_its_part_of_the_other():
    both = Parameter(("fc1",), {"gate": (6, 5), "up": (6, 5)}, "gate_up")
    assert list(both.pieces(1, 2)) == [Piece(0, 0, 3, 0, 3), Piece(1, 0, 3, 3, 3)]
    down = Parameter(("fc2",), {"down": (5, 6)}, "columns")
    assert list(down.pieces(1, 2)) == [Piece(0, 1, 3, 0, 3)]
