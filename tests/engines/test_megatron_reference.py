"""Weights that take turns in the trainer's model, and the reference policy made of them."""

import forward_worker
import megatron_worker as worker
import numpy as np
import pytest
import torch
from hf_logprobs import hf_logprobs
from megatron_reference import collect
from megatron_worker import VOCAB, job, trajectories

pytestmark = pytest.mark.long

LAYOUTS = {
    "tp2": (2, {"tp": 2}),
    "dp2": (2, {"dp": 2}),
    "pp2": (2, {"layout": {"pipeline_parallel": 2}}),
    "cp2": (2, {"layout": {"context_parallel": 2}}),
    "ep2": (2, {"dp": 2, "layout": {"expert_parallel": 2}}),
}
ROWS, ADVANTAGES = trajectories(12)
BATCH = {"rows": ROWS, "advantages": ADVANTAGES}

each_layout = pytest.mark.parametrize("layout", LAYOUTS)


@pytest.fixture(scope="module")
def policies(tmp_path_factory):
    """Two policies of one shape: (folder, logprobs of ROWS by Hugging Face) each."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return [made(Qwen3ForCausalLM, Qwen3Config, n, tmp_path_factory.mktemp("p")) for n in (0, 1)]


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory):
    """Likewise, of 4 experts, 2 for each token."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    return [
        made(Qwen3MoeForCausalLM, Qwen3MoeConfig, n, tmp_path_factory.mktemp("m"), **experts)
        for n in (0, 1)
    ]


def made(model_class, config_class, seed, folder, **options):
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    config = config_class(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, intermediate_size=64, max_position_embeddings=256,
        tie_word_embeddings=False, initializer_range=0.08,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4}, **options,
    )  # fmt: skip
    model = model_class(config).float()
    model.save_pretrained(folder)
    with torch.no_grad():
        return folder, [hf_logprobs(model, row.token_ids).numpy() for row in ROWS]


def open_layout(ranks, folder, layout, **more):
    size, options = LAYOUTS[layout]
    pool = ranks[size]
    pool.call(worker.open_trainer, config=job(folder, **(options | more)))
    return pool


def assert_close(found, expected):
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)


@pytest.mark.parametrize("fail", [False, True])
@each_layout
def test_swapped_weights_are_the_kept_ones_and_leave_no_trace(
    ranks, policies, mixtures, layout, fail
):
    dtype = "bfloat16" if fail else "float32"
    folder, _ = (mixtures if layout == "ep2" else policies)[0]
    pool = open_layout(ranks, folder, layout, dtype=dtype)
    for found in pool.call(forward_worker.swap, **BATCH, fail=fail):
        assert found["trained"]
        assert found["not swapped in"] == found["changed"] == []
        # two sets, which replicas share; context-parallel ranks are replicas, too
        size, replicas = 2 if fail else 4, 2 if layout in ("dp2", "cp2") else 1
        if layout == "ep2":  # experts have no replicas, the rest has two
            assert size < found["bytes of a weight"] < 2 * size
        else:
            assert found["bytes of a weight"] == 2 * size / replicas


@each_layout
def test_reference_logprobs_in_the_trainer_are_the_references(ranks, policies, mixtures, layout):
    (folder, own), (other, expected) = mixtures if layout == "ep2" else policies
    pool = open_layout(ranks, folder, layout)
    pool.call(forward_worker.open_reference, path=other)
    assert_close(collect(pool.call(worker.logprobs, rows=ROWS)), own)
    for _ in range(2):
        pool.call(worker.train, **BATCH)
        before = collect(pool.call(worker.logprobs, rows=ROWS))
        assert_close(collect(pool.call(forward_worker.ref_logprobs, rows=ROWS)), expected)
        after = collect(pool.call(worker.logprobs, rows=ROWS))
        assert all(map(np.array_equal, before, after))
        assert not any(map(np.allclose, before, expected))


def test_training_is_the_same_with_and_without_a_reference_bitwise(ranks, policies):
    found = []
    for path in (None, policies[1][0]):
        pool = open_layout(ranks, policies[0][0], "dp2", dtype="bfloat16")
        for _ in range(2):
            if path:
                pool.call(forward_worker.open_reference, path=path)
                pool.call(forward_worker.ref_logprobs, rows=ROWS)
            metrics = pool.call(worker.train, **BATCH)
        found.append((metrics, collect(pool.call(worker.logprobs, rows=ROWS))))
    assert found[0][0] == found[1][0]
    assert all(map(np.array_equal, found[0][1], found[1][1]))


@pytest.mark.parametrize(
    ("saved", "loaded"), [("tp2", ["tp2", "pp2", "dp2"]), ("ep2", ["ep2", "tp2"])]
)
def test_a_refreshed_reference_is_the_policy_of_that_step_also_after_a_restart(
    ranks, policies, mixtures, tmp_path, saved, loaded
):
    folder, first = (mixtures if saved == "ep2" else policies)[0]
    pool = open_layout(ranks, folder, saved)
    pool.call(forward_worker.open_reference)
    pool.call(worker.save, folder=tmp_path / "step-0")
    pool.call(worker.train, **BATCH)
    pool.call(forward_worker.refresh)
    refreshed = collect(pool.call(worker.logprobs, rows=ROWS))
    pool.call(worker.train, **BATCH)
    trained = collect(pool.call(worker.logprobs, rows=ROWS))
    found = collect(pool.call(forward_worker.ref_logprobs, rows=ROWS))
    assert all(map(np.array_equal, found, refreshed))
    pool.call(worker.save, folder=tmp_path / "step-2")

    for layout in loaded:
        pool = open_layout(ranks, folder, layout)
        pool.call(forward_worker.open_reference)
        pool.call(worker.load, folder=tmp_path / "step-0")  # has none: it is the first policy
        assert_close(collect(pool.call(forward_worker.ref_logprobs, rows=ROWS)), first)
        pool.call(worker.load, folder=tmp_path / "step-2")
        for _ in range(2):
            reference = collect(pool.call(forward_worker.ref_logprobs, rows=ROWS))
            assert_close(reference, refreshed)
            own = collect(pool.call(worker.logprobs, rows=ROWS))
            assert_close(own, trained)
        if layout == saved:
            assert all(map(np.array_equal, reference, refreshed))
            assert all(map(np.array_equal, own, trained))


@pytest.mark.parametrize("layout", ["tp2", "pp2", "cp2"])
def test_a_model_that_only_scores_equals_hugging_face_and_holds_no_gradients(
    ranks, policies, layout
):
    folder, expected = policies[1]
    size, options = LAYOUTS[layout]
    config = job(folder, **options)
    # groups of the layout: made by the trainer's opening, as elsewhere
    open_layout(ranks, folder, layout)
    assert ranks[size].call(forward_worker.open_scorer, config=config) == [[]] * size
    micro_batches = [[3, 0, 7], [1, 2], [], [4, 5, 6], [8, 9, 10, 11]]
    for found in ranks[size].call(
        forward_worker.scorer_logprobs, rows=ROWS, micro_batches=micro_batches
    ):
        assert_close(found, expected)


@pytest.mark.parametrize("layout", ["tp2", "dp2", "pp2"])
def test_the_kl_term_leaves_the_reference_alone_and_pulls_others_back(ranks, policies, layout):
    pool = open_layout(ranks, policies[0][0], layout)
    pool.call(forward_worker.open_reference)
    at_reference = pool.call(forward_worker.train_with_kl, **BATCH, coefficient=1.0)[0]
    assert at_reference["kl/mean"] == pytest.approx(0, abs=1e-9)
    assert at_reference["grad_norm"] == pytest.approx(0, abs=1e-5)
    pool = open_layout(ranks, policies[0][0], layout)
    pool.call(forward_worker.open_reference, path=policies[1][0])
    kl = [
        pool.call(forward_worker.train_with_kl, **BATCH, coefficient=1.0)[0]["kl/mean"]
        for _ in range(4)
    ]
    assert kl[0] > 0.1 and kl[3] < kl[2] < kl[1] < kl[0]
    assert pool.call(forward_worker.train_with_kl, **BATCH, coefficient=0.0)[0]["grad_norm"] == 0
