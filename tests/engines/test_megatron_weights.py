"""Hugging Face checkpoints into the trainer and out again, bitwise, on any grid."""

import math

import megatron_worker as worker
import numpy as np
import pytest
import torch
from megatron_worker import VOCAB, Ranks, job
from safetensors.torch import load_file

DENSE_GRIDS = {  # of four ranks; replicas fill them up
    "replicas": {},
    "tp2": {"tensor_parallel": 2},
    "tp4 on 2 key-value heads": {"tensor_parallel": 4},
    "pp2": {"pipeline_parallel": 2},
    "pp2 vpp2": {"pipeline_parallel": 2, "virtual_pipeline": 2},
    "cp2": {"context_parallel": 2},
    "tp2 pp2": {"tensor_parallel": 2, "pipeline_parallel": 2},
}
EXPERT_GRIDS = {
    "replicas": {},
    "ep2": {"expert_parallel": 2},
    "etp2": {"tensor_parallel": 2, "expert_tensor_parallel": 2},
    "tp2 ep2": {"tensor_parallel": 2, "expert_parallel": 2},
    "pp2 ep2": {"pipeline_parallel": 2, "expert_parallel": 2},
    "tp2 ep2 etp2": {
        "tensor_parallel": 2, "expert_parallel": 2, "expert_tensor_parallel": 2,
    },
    "pp2 vpp2": {"pipeline_parallel": 2, "virtual_pipeline": 2},
}  # fmt: skip


@pytest.fixture(scope="module")
def ranks():
    pool = Ranks(4)
    yield pool
    pool.close()


SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "intermediate_size": 48, "num_hidden_layers": 4,
    "max_position_embeddings": 64, "initializer_range": 0.08,
}  # fmt: skip


def save(folder, *, experts=0, tied=False, **options):
    """A random model of 4 layers; with experts in layers 1 to 3, if with any."""
    from transformers import (
        Qwen3Config,
        Qwen3ForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    torch.set_num_threads(1)
    torch.manual_seed(0)
    if experts:
        config = Qwen3MoeConfig(
            **SIZES, tie_word_embeddings=tied, num_experts=experts, num_experts_per_tok=2,
            moe_intermediate_size=24, norm_topk_prob=True, mlp_only_layers=[0],
        )  # fmt: skip
        model = Qwen3MoeForCausalLM(config)
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=tied))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()  # norms, too, so that a swapped one is noticed
    model.save_pretrained(folder, **options)
    return folder


def stored(folder):
    tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {
        "tied": {"tied": True},
        "untied": {},
        "experts": {"experts": 4},
        "tied experts": {"experts": 4, "tied": True},
        # As transformers holds them in memory: one tensor for all experts of a layer.
        "fused experts": {"experts": 4, "save_original_format": False},
    }
    folders = {
        name: save(tmp_path_factory.mktemp("model"), **options) for name, options in made.items()
    }
    folders["files"] = save(tmp_path_factory.mktemp("model"), max_shard_size="20KB")
    assert len(list(folders["files"].glob("*.safetensors"))) > 3
    return folders


def load_and_export(ranks, folder, grid, **options):
    replica = math.prod(grid.get(f"{x}_parallel", 1) for x in ("tensor", "pipeline", "context"))
    config = job(folder, actor=grid | {"data_parallel": 4 // replica})
    return ranks.call(worker.round_trip, config=config, **options)


def model_order(*, experts=0, tied=False):
    """Names in the order of the model, which is the same on every grid."""
    names = ["model.embed_tokens.weight"]
    for layer in range(4):
        parts = ["input_layernorm"]
        parts += [f"self_attn.{x}" for x in ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm")]
        parts += ["self_attn.o_proj", "post_attention_layernorm"]
        if experts and layer:
            numbers = range(experts)
            parts += ["mlp.gate"]
            parts += [f"mlp.experts.{n}.{x}_proj" for n in numbers for x in ("gate", "up")]
            parts += [f"mlp.experts.{n}.down_proj" for n in numbers]
        else:
            parts += [f"mlp.{x}_proj" for x in ("gate", "up", "down")]
        names += [f"model.layers.{layer}.{part}.weight" for part in parts]
    return [*names, "model.norm.weight", *([] if tied else ["lm_head.weight"])]


def check(answers, truth, order):
    """Every rank was given every weight, bitwise and in that order."""
    for weights in answers:
        assert [name for name, _ in weights] == order
        for name, weight in weights:
            assert np.array_equal(weight, truth[name].numpy()), name


@pytest.mark.parametrize("grid", DENSE_GRIDS)
def test_a_dense_model_comes_back_bitwise_on_every_rank(ranks, folders, grid):
    for kind in ("tied", "untied", "files"):
        answers = load_and_export(ranks, folders[kind], DENSE_GRIDS[grid])
        check(answers, stored(folders[kind]), model_order(tied=kind == "tied"))


@pytest.mark.parametrize("grid", EXPERT_GRIDS)
def test_a_mixture_comes_back_bitwise_on_every_rank(ranks, folders, grid):
    for kind in ("experts", "tied experts"):
        answers = load_and_export(ranks, folders[kind], EXPERT_GRIDS[grid])
        check(answers, stored(folders[kind]), model_order(experts=4, tied=kind != "experts"))
    # As transformers holds them in memory: one tensor for all experts of a layer.
    answers = load_and_export(ranks, folders["fused experts"], EXPERT_GRIDS[grid])
    check(answers, stored(folders["experts"]), model_order(experts=4))


@pytest.mark.parametrize("bucket_bytes", [1, 10_000])
def test_the_size_of_buckets_changes_nothing(ranks, folders, bucket_bytes):
    grid = {"pipeline_parallel": 2, "expert_parallel": 2}
    answers = load_and_export(ranks, folders["experts"], grid, bucket_bytes=bucket_bytes)
    check(answers, stored(folders["experts"]), model_order(experts=4))
