"""The settings that a job may make of the transformer, and the learning-rate schedule."""

import json

import pytest
from megatron_worker import job

from relax_hpc.config.optimizer import OptimizerConfig
from relax_hpc.config.run import RunConfig
from relax_hpc.engines.megatron.optimizer.learning_rate import learning_rate
from relax_hpc.engines.megatron.transformer import transformer_config
from relax_hpc.errors import ConfigError
from relax_hpc.models.registry import read_architecture
from relax_hpc.roles.training import build

QWEN3 = {
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "head_dim": 16,
}

QWEN3_MOE = QWEN3 | {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}


def megatron(config, shape):
    return transformer_config(config.actor, shape, config.model.dtype)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    return tmp_path


def test_a_field_of_the_job_reaches_megatron(folder):
    config = job(folder, transformer={"recompute_granularity": "selective"})
    made = megatron(config, read_architecture(folder))
    assert made.recompute_granularity == "selective"
    assert (made.num_layers, made.num_query_groups, made.kv_channels) == (2, 2, 16)
    assert (made.qk_layernorm, made.add_qkv_bias, made.num_moe_experts) == (True, False, None)


def mixture(folder, **fields):
    (folder / "config.json").write_text(json.dumps(QWEN3_MOE | fields))
    return folder


def test_a_mixture_of_experts_reaches_megatron(folder):
    made = megatron(job(folder), read_architecture(mixture(folder)))
    assert (made.num_moe_experts, made.moe_ffn_hidden_size, made.moe_router_topk) == (8, 32, 2)
    assert (made.ffn_hidden_size, made.moe_router_dtype) == (128, "fp32")
    assert made.moe_router_load_balancing_type == "none"
    assert made.moe_layer_freq == 1


@pytest.mark.parametrize("norm_topk_prob", [False, True])
def test_router_weights_are_normalised_over_the_chosen_experts_if_the_model_says_so(
    folder, norm_topk_prob
):
    shape = read_architecture(mixture(folder, norm_topk_prob=norm_topk_prob))
    assert megatron(job(folder), shape).moe_router_pre_softmax is not norm_topk_prob


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"decoder_sparse_step": 2}, [0, 1, 0, 1]),
        ({"mlp_only_layers": [0]}, [0, 1, 1, 1]),
        ({"mlp_only_layers": [1], "decoder_sparse_step": 2}, [0, 0, 0, 1]),
    ],
)
def test_dense_layers_among_those_with_experts_are_where_hugging_face_has_them(
    folder, fields, pattern
):
    shape = read_architecture(mixture(folder, num_hidden_layers=4, **fields))
    assert megatron(job(folder), shape).moe_layer_freq == pattern


def test_the_job_may_ask_for_a_balancing_loss_but_not_for_other_experts(folder):
    balance = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.01}
    shape = read_architecture(mixture(folder))
    made = megatron(job(folder, transformer=balance), shape)
    assert made.moe_router_load_balancing_type == "aux_loss"
    assert made.moe_aux_loss_coeff == 0.01
    with pytest.raises(ConfigError, match=r"moe_router_topk = 4.*remove it"):
        megatron(job(folder, transformer={"moe_router_topk": 4}), shape)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_experts": None}, "num_experts = None: a positive integer is expected"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok = 9: there are num_experts = 8"),
        ({"norm_topk_prob": 1}, "norm_topk_prob = 1: true or false"),
        ({"mlp_only_layers": [0, 1]}, "leave no layer with experts"),
    ],
)
def test_a_mixture_that_makes_no_sense_is_refused_by_key(folder, fields, message):
    with pytest.raises(ConfigError, match=message):
        read_architecture(mixture(folder, **fields))


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"expert_parallel": 3}, "expert_parallel = 3: does not divide the model's 8 experts"),
        ({"expert_tensor_parallel": 5}, "expert_tensor_parallel = 5: .* 32 channels of an expert"),
    ],
)
def test_expert_parallelism_must_divide_the_experts(folder, layout, message):
    config = job(folder, layout=layout | {"data_parallel": 15})
    with pytest.raises(ConfigError, match=message):
        megatron(config, read_architecture(mixture(folder)))


def test_an_unknown_transformer_field_is_an_error_that_names_the_nearest(folder):
    config = job(folder, transformer={"recompute_granularty": "full"})
    with pytest.raises(ConfigError, match=r"recompute_granularty.*did you mean recompute_granular"):
        megatron(config, read_architecture(folder))


def test_a_field_that_the_model_decides_is_not_the_jobs_to_set(folder):
    config = job(folder, transformer={"num_layers": 3})
    with pytest.raises(ConfigError, match=r"actor\.transformer\.num_layers = 3.*remove it"):
        megatron(config, read_architecture(folder))


def test_a_value_megatron_refuses_is_a_config_error(folder):
    config = job(folder, transformer={"recompute_granularity": "sometimes"})
    with pytest.raises(ConfigError, match="is not one of 'full', 'selective'"):
        megatron(config, read_architecture(folder))
    config = job(folder, transformer={"recompute_granularity": "full"})  # but no method
    with pytest.raises(ConfigError, match="Megatron-core refuses it"):
        megatron(config, read_architecture(folder))


@pytest.mark.parametrize(
    ("fields", "layout", "message"),
    [
        ({}, {"tensor_parallel": 3}, "tensor_parallel = 3: .* 4 attention heads"),
        ({"vocab_size": 130}, {"tensor_parallel": 4}, "parallel = 4: .* 130 vocabulary entries"),
        ({"intermediate_size": 126}, {"tensor_parallel": 4}, "4: .* 126 feed-forward channels"),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 3, "head_dim": 16},
            {"tensor_parallel": 2},
            "tensor_parallel = 2: does not divide the model's 3 key-value heads, nor they it",
        ),
        ({}, {"pipeline_parallel": 4}, "pipeline_parallel = 4: .* 2 layers"),
        (
            {},
            {"pipeline_parallel": 2, "virtual_pipeline": 2},
            "pipeline_parallel x virtual_pipeline = 4: .* 2 layers",
        ),
        ({}, {"data_parallel": 2, "expert_parallel": 2}, "expert_parallel = 2: .* no experts"),
    ],
)
def test_a_grid_must_divide_the_model(folder, fields, layout, message):
    (folder / "config.json").write_text(json.dumps(QWEN3 | fields))
    with pytest.raises(ConfigError, match=message):
        megatron(job(folder, layout=layout), read_architecture(folder))


def test_ranks_may_share_a_key_value_head(folder):
    made = megatron(job(folder, tp=4), read_architecture(folder))
    assert (made.tensor_model_parallel_size, made.num_query_groups) == (4, 2)


def test_stages_may_be_uneven_if_the_job_says_how(folder):
    (folder / "config.json").write_text(json.dumps(QWEN3 | {"num_hidden_layers": 3}))
    uneven = {"num_layers_in_first_pipeline_stage": 1}
    config = job(folder, layout={"pipeline_parallel": 2}, transformer=uneven)
    made = megatron(config, read_architecture(folder))
    assert (made.num_layers, made.num_layers_in_first_pipeline_stage) == (3, 1)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "gpt2"),
        ("rope_scaling", {"type": "dynamic"}),
        ("hidden_act", "gelu"),
    ],
)
def test_another_architecture_is_refused_by_name(folder, key, value):
    (folder / "config.json").write_text(json.dumps(QWEN3 | {key: value}))
    with pytest.raises(ConfigError, match="is supported"):
        read_architecture(folder)


def test_the_learning_rate_rises_and_falls_linearly():
    config = OptimizerConfig(lr=1.0, warmup_steps=4, final_lr_fraction=0.5)
    rates = [learning_rate(config, step, 14) for step in (1, 2, 4, 9, 14, 20)]
    assert rates == pytest.approx([0.25, 0.5, 1.0, 0.75, 0.5, 0.5])


def test_without_warm_up_the_first_step_has_the_full_rate():
    config = OptimizerConfig(lr=1.0, final_lr_fraction=0.0)
    assert [learning_rate(config, step, 3) for step in (1, 2, 3)] == pytest.approx([1, 0.5, 0])


def test_the_learning_rate_falls_by_half_a_cosine():
    config = OptimizerConfig(lr=1.0, warmup_steps=4, final_lr_fraction=0.5, decay="cosine")
    rates = [learning_rate(config, step, 16) for step in (2, 4, 7, 10, 13, 16, 20)]
    quarter = 0.25 * 2**-0.5  # cos(pi / 4) / 4
    assert rates == pytest.approx([0.5, 1.0, 0.75 + quarter, 0.75, 0.75 - quarter, 0.5, 0.5])


def test_the_learning_rate_stays_and_falls_over_the_last_steps():
    """Warm-up, stable, decay: by square root, half of the way is behind after a quarter."""
    config = OptimizerConfig(
        lr=2.0, warmup_steps=2, decay="sqrt", decay_steps=8, final_lr_fraction=0.1
    )
    rates = [learning_rate(config, step, 20) for step in (1, 2, 7, 12, 14, 16, 20, 30)]
    sixteen = 0.2 + 1.8 * (1 - 0.5**0.5)
    assert rates == pytest.approx([1.0, 2.0, 2.0, 2.0, 1.1, sixteen, 0.2, 0.2])


def test_a_decay_longer_than_the_run_begins_after_the_warm_up():
    config = OptimizerConfig(lr=1.0, warmup_steps=5, decay_steps=100, final_lr_fraction=0.0)
    rates = [learning_rate(config, step, 15) for step in (4, 5, 10, 15)]
    assert rates == pytest.approx([0.8, 1.0, 0.5, 0.0])


def test_the_rate_of_a_policy_that_stands_still_at_first_begins_with_its_first_update():
    """Of 17 steps 3 are the critic's alone: 1/4 in step 4, 1 in step 7, halfway down in step 12."""
    config = OptimizerConfig(lr=1.0, warmup_steps=4, final_lr_fraction=0.5)
    rates = [learning_rate(config, step, 17, still=3) for step in (4, 5, 7, 12, 17)]
    assert rates == pytest.approx([0.25, 0.5, 1.0, 0.75, 0.5])


def test_the_trainer_of_a_job_is_told_how_long_its_policy_stands_still(monkeypatch):
    monkeypatch.setattr(build, "MegatronTrainer", lambda *_, **settings: settings["still_steps"])
    tables = {"algorithm": {"preset": "ppo"}, "critic": {"warmup_steps": 3}}
    alone = {"name": "a", "model": {"path": "m"}, "prompts": {"train": "p"}}
    config = RunConfig.model_validate(alone | tables | {"schedule": {"num_steps": 9}})
    assert build.trainer_of(config, None, None) == 3


@pytest.mark.parametrize(
    ("aggregation", "tokens", "exponent"),
    [
        ("token", 4095, None),
        ("sequence_sum", 4095, None),
        ("sequence", 4095, 21),
        ("prompt", 4096, 22),
        ("constant", 32768, 24),
    ],
)
def test_the_loss_scale_of_float16_begins_higher_where_tokens_weigh_less(
    monkeypatch, aggregation, tokens, exponent
):
    monkeypatch.setattr(build, "MegatronTrainer", lambda *given, **_: given[2].megatron)

    def told(dtype="float16", **megatron):
        tree = {
            "name": "a", "model": {"path": "m", "dtype": dtype}, "prompts": {"train": "p"},
            "algorithm": {"aggregation": aggregation}, "rollout": {"max_new_tokens": tokens},
            "schedule": {"num_steps": 9}, "actor": {"optimizer": {"megatron": megatron}},
        }  # fmt: skip
        return build.trainer_of(RunConfig.model_validate(tree), None, None)

    assert told() == ({} if exponent is None else {"initial_loss_scale": 2.0**exponent})
    assert told("bfloat16") == {}
    assert told(initial_loss_scale=8.0) == {"initial_loss_scale": 8.0}


def test_a_constant_learning_rate_is_one():
    config = OptimizerConfig(lr=1.0, warmup_steps=2, decay="constant")
    assert [learning_rate(config, step, 9) for step in (1, 2, 5, 9)] == [0.5, 1.0, 1.0, 1.0]
    with pytest.raises(ValueError, match=r"final_lr_fraction = 0\.5: .*constant.*use linear"):
        OptimizerConfig(decay="constant", final_lr_fraction=0.5)


def test_a_decay_that_ends_where_it_begins_is_refused():
    for asked in ({"decay": "cosine"}, {"decay": "sqrt"}, {"decay_steps": 9}):
        key, value = next(iter(asked.items()))
        with pytest.raises(ValueError, match=f"{key} = {value!r}: .* final_lr_fraction is 1; set"):
            OptimizerConfig(**asked)
        OptimizerConfig(**asked, final_lr_fraction=0.9)
    again = OptimizerConfig.model_validate_json(OptimizerConfig().model_dump_json())
    assert again == OptimizerConfig()
