"""Hugging Face checkpoints into the trainer and out again, bitwise, on any grid."""

import math

import megatron_worker
import numpy as np
import pytest
import torch
import weights_worker as worker
from megatron_reference import collect
from megatron_reference import reference as hugging_face
from megatron_worker import VOCAB, job, trajectories
from safetensors.torch import load_file

pytestmark = pytest.mark.long

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
def ranks(ranks):
    return ranks[4]


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


def load(ranks, folder, grid):
    replica = math.prod(grid.get(f"{x}_parallel", 1) for x in ("tensor", "pipeline", "context"))
    config = job(folder, layout=grid | {"data_parallel": 4 // replica})
    return ranks.call(worker.load, config=config)


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
    for weights, _ in ranks.call(worker.export, **options):
        assert [name for name, _ in weights] == order
        for name, weight in weights:
            assert np.array_equal(weight, truth[name].numpy()), name
    for to_all in (False, True):
        answers = ranks.call(worker.gathered, bucket_bytes=20_000, to_all=to_all)
        assert [len(versions) for _, versions in answers] == [2, *[2 * to_all] * 3]
        for specs, versions in answers:
            assert specs == [(name, tuple(truth[name].shape)) for name in order]
            for factor, found in enumerate(versions, start=1):
                for (name, _), tensor in zip(specs, found, strict=True):
                    assert np.array_equal(tensor, factor * truth[name].numpy()), name


@pytest.mark.parametrize("grid", DENSE_GRIDS)
def test_a_dense_model_comes_back_bitwise_on_every_rank(ranks, folders, grid):
    for kind in ("tied", "untied", "files"):
        load(ranks, folders[kind], DENSE_GRIDS[grid])
        check(ranks, stored(folders[kind]), model_order(tied=kind == "tied"))


@pytest.mark.parametrize("grid", EXPERT_GRIDS)
def test_a_mixture_comes_back_bitwise_on_every_rank(ranks, folders, grid):
    for kind in ("experts", "tied experts"):
        load(ranks, folders[kind], EXPERT_GRIDS[grid])
        check(ranks, stored(folders[kind]), model_order(experts=4, tied=kind != "experts"))
    # As transformers holds them in memory: one tensor for all experts of a layer.
    load(ranks, folders["fused experts"], EXPERT_GRIDS[grid])
    check(ranks, stored(folders["experts"]), model_order(experts=4))


MIXED = {"pipeline_parallel": 2, "expert_parallel": 2}


def test_the_size_of_buckets_changes_the_number_of_collectives_only(ranks, folders):
    load(ranks, folders["experts"], MIXED)
    for bucket_bytes in (1, 10_000):
        check(ranks, stored(folders["experts"]), model_order(experts=4), bucket_bytes=bucket_bytes)
    # Which stage has what, with its length. A bucket: what each stage passes on, and what ranks
    # that share experts gather.
    for _, collectives in ranks.call(worker.export):
        assert collectives == [
            "all_gather", "all_gather", "all_gather_into_tensor", "broadcast", "broadcast",
        ]  # fmt: skip


def test_a_rank_reads_what_it_holds_and_opens_a_file_once(ranks, folders):
    for kind, grid in (("files", DENSE_GRIDS["tp2 pp2"]), ("fused experts", MIXED)):
        for loaded in load(ranks, folders[kind], grid):
            assert loaded.num_read == loaded.num_held
            assert set(loaded.num_opened.values()) == {1}
    assert len(loaded.num_opened) == 1


def test_other_values_than_weights_have_their_names_and_their_own_type(ranks, folders):
    for kind, grid in (("tied", DENSE_GRIDS["tp2 pp2"]), ("experts", MIXED)):
        load(ranks, folders[kind], grid)
        truth = stored(folders[kind])
        for squares in ranks.call(worker.export_squares):
            for name, square in squares:
                assert square.dtype == np.float64
                assert np.array_equal(square, truth[name].double().numpy() ** 2), name


@pytest.mark.parametrize("kind", ["tied", "experts"])
def test_transformers_loads_what_is_exported(ranks, folders, tmp_path, kind):
    from transformers import AutoModelForCausalLM

    load(ranks, folders[kind], {"pipeline_parallel": 2, "tensor_parallel": 2})
    out = tmp_path / "out"
    ranks.call(worker.save_hf, folder=out, source=folders[kind], writer=2)
    assert len(list(out.glob("model-*.safetensors"))) > 1
    assert stored(out).keys() == stored(folders[kind]).keys()
    ours, theirs = (
        AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (out, folders[kind])
    )
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_ranks_that_share_a_key_value_head_compute_what_hugging_face_does(ranks, folders):
    from transformers import AutoModelForCausalLM

    rows, _ = trajectories(4)
    model = AutoModelForCausalLM.from_pretrained(folders["untied"])
    ranks.call(megatron_worker.open_trainer, config=job(folders["untied"], tp=4))
    for found in ranks.call(megatron_worker.logprobs, rows=rows):
        for number, row in enumerate(rows):
            ids = torch.from_numpy(row.token_ids.astype(np.int64))
            with torch.no_grad():
                expected = model(input_ids=ids[None]).logits[0].log_softmax(-1)
            expected = expected[:-1].gather(1, ids[1:, None])[:, 0]
            np.testing.assert_allclose(found[number][1:], expected, atol=1e-4)


def test_qwen2_computes_and_comes_back_as_hugging_face_has_it(ranks, tmp_path):
    """An architecture that is one file: biases instead of query and key norms."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=False))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.normal_()
    model.save_pretrained(tmp_path)
    truth = hugging_face(tmp_path, model, num_steps=1)
    for grid in ({"tensor_parallel": 2, "pipeline_parallel": 2}, {"context_parallel": 2}):
        replicas = 4 // math.prod(grid.values())
        config = job(tmp_path, layout=grid | {"data_parallel": replicas})
        ranks.call(megatron_worker.open_trainer, config=config)
        logprobs = collect(ranks.call(megatron_worker.logprobs, rows=truth.rows))
        for mine, theirs in zip(logprobs, truth.logprobs, strict=True):
            np.testing.assert_allclose(mine, theirs, atol=1e-5)
        batch = {"rows": truth.rows, "advantages": truth.advantages}
        for gradients in ranks.call(megatron_worker.gradients, **batch):
            assert gradients.keys() == truth.gradients[0].keys()
            for name, theirs in truth.gradients[0].items():
                np.testing.assert_allclose(gradients[name], theirs, atol=1e-5, err_msg=name)
        load(ranks, tmp_path, grid)
        saved = stored(tmp_path)
        for weights, _ in ranks.call(worker.export):
            assert all(np.array_equal(weight, saved[name].numpy()) for name, weight in weights)
            assert len(weights) == len(saved)
