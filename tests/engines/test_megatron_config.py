"""The settings that a job may make of the transformer, and the learning-rate schedule."""

import json
from dataclasses import fields

import pytest
from megatron.core.transformer import TransformerConfig
from trainers import FULL, job, selective

from relax_hpc.config.actor import ReferenceConfig
from relax_hpc.config.model import Layout, OptimizerConfig, learning_rate
from relax_hpc.config.run import RunConfig
from relax_hpc.errors import ConfigError
from relax_hpc.roles.training import build
from relax_hpc.trainer.megatron import settings
from relax_hpc.trainer.megatron.settings import transformer_config
from relax_hpc.trainer.models.registry import FAMILIES, read_architecture

QWEN3 = {
    "model_type": "qwen3", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128, "head_dim": 16,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
}  # fmt: skip
QWEN3_MOE = QWEN3 | {
    "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "norm_topk_prob": True,
}  # fmt: skip

OURS = frozenset(
    (
        "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups",
        "kv_channels", "softmax_scale", "layernorm_epsilon", "activation_func", "hidden_dropout",
        "attention_dropout", "batch_p2p_comm", "overlap_p2p_comm", "variable_seq_lengths",
        "deallocate_pipeline_outputs", "perform_initialization", "use_cpu_initialization",
        "calculate_per_token_loss", "mrope_section", "gradient_accumulation_fusion",
        "persist_layer_norm", "apply_rope_fusion", "masked_softmax_fusion", "bias_dropout_fusion",
        "bias_activation_fusion",
    )
)  # fmt: skip
"""Fields that the trainer sets, besides those of a key and those that the family decides."""


def made(folder, grid="one", transformer=(), **fields):
    """Settings of Megatron's for a job with these, of a model with these fields."""
    if fields:
        mixture(folder, **fields)
    config = job(folder, grid, transformer=dict(transformer))
    return transformer_config(config.actor, read_architecture(folder), config.model.dtype)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    return tmp_path


def mixture(folder, **fields):
    """The folder with a model of these fields, of those of experts if they are not all."""
    record = fields if "model_type" in fields else QWEN3_MOE | fields
    (folder / "config.json").write_text(json.dumps(record))
    return folder


# R14: a field acts here, or is refused


def test_every_field_of_megatrons_transformer_has_its_place_in_the_tables(folder):
    """A field that a new Megatron brings fails here: somebody has to look where it is read."""
    known = {field.name for field in fields(TransformerConfig)}
    shape = read_architecture(mixture(folder))
    ours = set(FAMILIES["qwen3_moe"].transformer(shape)) | OURS
    by_key = set(settings._BY_KEY)
    classes = [
        settings.OBEYED, settings.OBEYED_BY_EXPERTS,
        set(settings.REASONS), ours - by_key, by_key,
    ]  # fmt: skip
    assert set().union(*classes) == known
    assert sum(map(len, classes)) == len(known), "a field has two places"


@pytest.mark.parametrize("has_experts", [False, True])
def test_every_field_that_does_not_act_is_refused_with_what_to_do(folder, has_experts):
    shape = read_architecture(mixture(folder) if has_experts else folder)
    ours = dict.fromkeys([*OURS, "bf16"], True) | FAMILIES[shape.model_type].transformer(shape)
    every = Layout(tensor_parallel=2, pipeline_parallel=2, virtual_pipeline=2)
    found = settings.list_refused(ours, every, shape.model_type)
    taken = set(settings.OBEYED)
    taken |= settings.OBEYED_BY_EXPERTS if has_experts else set()
    assert found.keys() | taken == {field.name for field in fields(TransformerConfig)}
    assert not taken & found.keys()
    assert all("remove it" in why or why.partition("use ")[2] for why in found.values())


FIELDS_THAT_DO_NOT_ACT = [
    ({"fp8": "hybrid"}, "fp8 = 'hybrid': needs Transformer Engine"),
    ({"num_layers": 3}, r"actor\.transformer\.num_layers = 3.*remove it"),
    ({"recompute_granularty": "full"}, r"recompute_granularty.*did you mean recompute_granular"),
    ({"recompute_granularity": "sometimes"}, "is not one of 'full', 'selective'"),
    ({"recompute_granularity": "full"}, "Megatron-core refuses it"),  # but no method
    ({"cuda_graph_impl": "local"}, "CUDA graphs need micro-batches of one length"),
    ({"params_dtype": "fp16"}, "is set by model.dtype; use that"),
    ({"moe_z_loss_coeff": 0.1}, "a model of model_type 'qwen3' has no experts; remove it"),
    ({"recompute_modules": ["mlp"]}, r"only with actor.*recompute_granularity = \"selective\""),
    (selective("core_attn", "mlp"), r"core_attn \(attention keeps no scores\); use 'mlp'"),
    (selective("moe"), r"\['moe'\]: use 'mlp', which this model has"),
    ({"overlap_p2p_comm_warmup_flush": True}, "only with actor.layout.virtual_pipeline > 1"),
    ({"disable_bf16_reduced_precision_matmul": True}, 'only with model.dtype = "bfloat16"; set th'),
]
OF_EXPERTS = [
    ({"moe_aux_loss_coeff": 0.01}, "moe_aux_loss_coeff = 0.01: .*load_balancing_type, e.g."),
    ({"moe_router_load_balancing_type": "aux_loss"}, "only with .*moe_aux_loss_coeff"),
    ({"moe_router_num_groups": 2}, "only with actor.transformer.moe_router_group_topk"),
    ({"moe_router_bias_update_rate": 0.1}, "moe_router_enable_expert_bias = true"),
    (selective("mlp"), r"\['mlp'\]: use 'moe', which this model has"),
]


@pytest.mark.parametrize(
    ("has_experts", "table", "message"),
    [*((False, *case) for case in FIELDS_THAT_DO_NOT_ACT), *((True, *case) for case in OF_EXPERTS)],
)
def test_a_field_without_effect_in_this_job_is_refused(folder, has_experts, table, message):
    with pytest.raises(ConfigError, match=message):
        made(mixture(folder) if has_experts else folder, transformer=table)


def test_a_model_that_is_no_actor_takes_what_of_the_actors_table_acts_in_it(folder):
    table = {
        "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.01,
        "num_layers_in_first_pipeline_stage": 1, "clone_scatter_output_in_embedding": False,
        **FULL,
    }  # fmt: skip
    actor = job(folder).actor.model_copy(update={"transformer": table})
    reference = ReferenceConfig(placement="own", layout=Layout()).megatron(actor)
    found = transformer_config(reference, read_architecture(folder), "float32")
    assert (found.recompute_granularity, found.moe_aux_loss_coeff) == ("full", 0.0)
    assert found.num_layers_in_first_pipeline_stage is None


@pytest.mark.parametrize(
    ("fields", "grid", "message"),
    [
        ({}, "tp3", "tensor_parallel = 3: .* 4 attention heads"),
        ({"num_key_value_heads": 3}, "tp2", "parallel = 2: .* 3 key-value heads, nor they it"),
        ({}, "pp2_vpp2", "pipeline_parallel x virtual_pipeline = 4: .* 2 layers"),
        ({}, "dp2_ep2", "expert_parallel = 2: .* no experts"),
        (QWEN3_MOE, "ep3_dp15", "expert_parallel = 3: does not divide the model's 8 experts"),
        (QWEN3_MOE, "etp5_dp15", "expert_tensor_parallel = 5: .* 32 channels of an expert"),
    ],
)
def test_a_grid_must_divide_the_model(folder, fields, grid, message):
    with pytest.raises(ConfigError, match=message):
        made(folder, grid, **(QWEN3 | fields))


HALF, QUARTER = {"final_lr_fraction": 0.5}, 0.25 * 2**-0.5  # cos(pi / 4) / 4
TO_0, TO_TENTH = {"final_lr_fraction": 0.0}, {"final_lr_fraction": 0.1}
SIXTEEN = 0.2 + 1.8 * (1 - 0.5**0.5)  # by square root, half of the way is behind after a quarter


@pytest.mark.parametrize(
    ("settings", "steps", "expected"),
    [
        (HALF | {"warmup_steps": 4}, 14, {1: 0.25, 2: 0.5, 4: 1.0, 9: 0.75, 14: 0.5, 20: 0.5}),
        (TO_0, 3, {1: 1.0, 2: 0.5, 3: 0.0}),
        (
            HALF | {"warmup_steps": 4, "decay": "cosine"},
            16,
            {2: 0.5, 4: 1.0, 7: 0.75 + QUARTER, 10: 0.75, 13: 0.75 - QUARTER, 16: 0.5, 20: 0.5},
        ),
        (
            TO_TENTH | {"lr": 2.0, "warmup_steps": 2, "decay": "sqrt", "decay_steps": 8},
            20,
            {1: 1.0, 2: 2.0, 7: 2.0, 12: 2.0, 14: 1.1, 16: SIXTEEN, 20: 0.2, 30: 0.2},
        ),
        (TO_0 | {"warmup_steps": 5, "decay_steps": 100}, 15, {4: 0.8, 5: 1.0, 10: 0.5, 15: 0.0}),
        ({"warmup_steps": 2, "decay": "constant"}, 9, {1: 0.5, 2: 1.0, 5: 1.0, 9: 1.0}),
    ],
    ids=["linear", "no warm-up", "cosine", "warm-up, stable, decay", "long decay", "constant"],
)
def test_the_learning_rate_rises_and_falls_as_it_is_told(settings, steps, expected):
    config = OptimizerConfig(**{"lr": 1.0} | settings)
    assert {at: learning_rate(config, at, steps) for at in expected} == pytest.approx(expected)


def test_the_rate_of_a_policy_that_stands_still_at_first_begins_with_its_first_update():
    """Of 17 steps 3 are the critic's alone: 1/4 in step 4, 1 in step 7, halfway down in step 12."""
    config = OptimizerConfig(lr=1.0, warmup_steps=4, **HALF)
    rates = [learning_rate(config, step, 17, still=3) for step in (4, 5, 7, 12, 17)]
    assert rates == pytest.approx([0.25, 0.5, 1.0, 0.75, 0.5])


def test_the_trainer_of_a_job_is_told_how_long_its_policy_stands_still(monkeypatch):
    monkeypatch.setattr(build, "MegatronTrainer", lambda *_, **settings: settings["still_steps"])
    tree = {"name": "a", "model": {"path": "m"}, "prompts": {"train": "p"}}
    tree |= {"schedule": {"num_steps": 9}, "algorithm": {"preset": "ppo"}}
    config = RunConfig.model_validate(tree | {"critic": {"warmup_steps": 3}})
    assert build.trainer_of(config, None, None) == 3


@pytest.mark.parametrize(
    ("aggregation", "tokens", "exponent"),
    [("token", 4095, None), ("sequence", 4095, 21), ("constant", 32768, 24)],
)
def test_the_loss_scale_of_float16_begins_higher_where_tokens_weigh_less(
    monkeypatch, aggregation, tokens, exponent
):
    monkeypatch.setattr(build, "MegatronTrainer", lambda *given, **_: given[2].megatron)

    def told(dtype="float16", **megatron):
        tables = {"algorithm": {"aggregation": aggregation}, "optimizer": {"megatron": megatron}}
        tree = job("m", dtype=dtype, **tables).model_dump()
        tree["rollout"]["max_new_tokens"] = tokens
        return build.trainer_of(RunConfig.model_validate(tree), None, None)

    assert told() == ({} if exponent is None else {"initial_loss_scale": 2.0**exponent})
    assert told("bfloat16") == {}
    assert told(initial_loss_scale=8.0) == {"initial_loss_scale": 8.0}


def test_a_decay_that_ends_where_it_begins_is_refused():
    for asked in ({"decay": "cosine"}, {"decay": "sqrt"}, {"decay_steps": 9}):
        key, value = next(iter(asked.items()))
        with pytest.raises(ValueError, match=f"{key} = {value!r}: .* final_lr_fraction is 1; set"):
            OptimizerConfig(**asked)
        OptimizerConfig(**asked, final_lr_fraction=0.9)
    with pytest.raises(ValueError, match=r"final_lr_fraction = 0\.5: .*constant.*use linear"):
        OptimizerConfig(decay="constant", final_lr_fraction=0.5)
    again = OptimizerConfig.model_validate_json(OptimizerConfig().model_dump_json())
    assert again == OptimizerConfig()
