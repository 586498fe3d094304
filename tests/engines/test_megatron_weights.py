"""Hugging Face checkpoints into the trainer and out again, bitwise, on any grid."""

import numpy as np
import pytest
import torch
from hf_logprobs import hf_logprobs
from megatron_reference import reference as hugging_face
from safetensors.torch import load_file
from trainers import (
    VOCAB,
    assert_a_grid_equals,
    assert_close,
    collect,
    equal,
    job,
    size_of,
    trajectories,
)
from transformers import (
    AutoModelForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

pytestmark = pytest.mark.long

DENSE_GRIDS = [
    "one", "tp2", "tp4", "pp2", "pp2_vpp2", "cp2", "tp2_pp2",
]  # fmt: skip
"""Of four ranks; replicas fill them up. On two key-value heads."""
EXPERT_GRIDS = ["one", "ep2", "tp2_etp2", "tp2_ep2", "pp2_ep2", "tp2_ep2_etp2", "pp2_vpp2"]


@pytest.fixture(scope="module")
def ranks(ranks):
    return ranks[4]


SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "intermediate_size": 48, "num_hidden_layers": 4,
    "max_position_embeddings": 64, "initializer_range": 0.08,
}  # fmt: skip


def save(folder, *, experts=0, tied=False, **options):
    """A random model of 4 layers; with experts in layers 1 to 3, if with any."""
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


def load(ranks, folder, grid):
    return ranks.load_model(config=job(folder, f"{grid}_dp{4 // size_of(grid)}"))


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


def check(ranks, truth, order, **options):
    """Every rank is given every weight, bitwise and in that order."""
    for weights, _ in ranks.export(**options):
        assert [name for name, _ in weights] == order
        for name, weight in weights:
            assert np.array_equal(weight, truth[name].numpy()), name
    for to_all in (False, True):
        answers = ranks.gathered_twice(bucket_bytes=20_000, to_all=to_all)
        assert [len(versions) for _, versions in answers] == [2, *[2 * to_all] * 3]
        for specs, versions in answers:
            assert specs == [(name, tuple(truth[name].shape)) for name in order]
            for factor, found in enumerate(versions, start=1):
                for (name, _), tensor in zip(specs, found, strict=True):
                    assert np.array_equal(tensor, factor * truth[name].numpy()), name


@pytest.mark.parametrize("grid", DENSE_GRIDS)
def test_a_dense_model_comes_back_bitwise_on_every_rank(ranks, folders, grid):
    for kind in ("tied", "untied", "files"):
        load(ranks, folders[kind], grid)
        check(ranks, stored(folders[kind]), model_order(tied=kind == "tied"))


@pytest.mark.parametrize("grid", EXPERT_GRIDS)
def test_a_mixture_comes_back_bitwise_on_every_rank(ranks, folders, grid):
    for kind in ("experts", "tied experts"):
        load(ranks, folders[kind], grid)
        check(ranks, stored(folders[kind]), model_order(experts=4, tied=kind != "experts"))
    # As transformers holds them in memory: one tensor for all experts of a layer.
    load(ranks, folders["fused experts"], grid)
    check(ranks, stored(folders["experts"]), model_order(experts=4))


def test_the_size_of_buckets_changes_the_number_of_collectives_only(ranks, folders):
    load(ranks, folders["experts"], "pp2_ep2")
    for bucket_bytes in (1, 10_000):
        check(ranks, stored(folders["experts"]), model_order(experts=4), bucket_bytes=bucket_bytes)
    # Which stage has what, with its length. A bucket: what each stage passes on, and what ranks
    # that share experts gather.
    for _, collectives in ranks.export():
        assert collectives == [
            "all_gather", "all_gather", "all_gather_into_tensor", "broadcast", "broadcast",
        ]  # fmt: skip


def test_a_rank_reads_what_it_holds_and_opens_a_file_once(ranks, folders):
    for kind, grid in (("files", "tp2_pp2"), ("fused experts", "pp2_ep2")):
        for loaded in load(ranks, folders[kind], grid):
            assert loaded.num_read == loaded.num_held
            assert set(loaded.num_opened.values()) == {1}
    assert len(loaded.num_opened) == 1


@pytest.mark.parametrize("kind", ["tied", "experts"])
def test_transformers_loads_what_is_exported(ranks, folders, tmp_path, kind):
    load(ranks, folders[kind], "tp2_pp2")
    out = tmp_path / "out"
    ranks.save_hf(folder=out, source=folders[kind], writer=2)
    assert len(list(out.glob("model-*.safetensors"))) > 1
    assert stored(out).keys() == stored(folders[kind]).keys()
    ours, theirs = (
        AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (out, folders[kind])
    )
    assert equal(ours, theirs)


def test_ranks_that_share_a_key_value_head_compute_what_hugging_face_does(ranks, folders):
    rows, _ = trajectories(4)
    model = AutoModelForCausalLM.from_pretrained(folders["untied"])
    with torch.no_grad():
        expected = [hf_logprobs(model, row.token_ids) for row in rows]
    ranks.open_trainer(config=job(folders["untied"], "tp4"))
    for found in ranks.logprobs(rows=rows):
        assert_close(collect([found]), expected, atol=1e-4)


def test_qwen2_computes_and_comes_back_as_hugging_face_has_it(ranks, tmp_path):
    """An architecture that is one file: biases instead of query and key norms."""
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=False))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.normal_()
    model.save_pretrained(tmp_path)
    truth = hugging_face(tmp_path, model, num_steps=1)
    for grid in ("tp2_pp2", "cp2"):
        config = job(tmp_path, f"{grid}_dp{4 // size_of(grid)}", optimizer={"weight_decay": 0.1})

        def opened(config=config):
            ranks.open_trainer(config=config)
            return ranks

        assert_a_grid_equals(truth, opened)
        load(ranks, tmp_path, grid)
        for weights, _ in ranks.export():
            assert equal(dict(weights), stored(tmp_path))
