"""Tables of a job that are Megatron's own: what is taken, and what is said of the rest."""

import json
import re

import megatron_worker as worker
import numpy as np
import pytest
from megatron_worker import job, trajectories

from relax_hpc.engines.megatron.optimizer.settings import ddp_config, optimizer_config
from relax_hpc.errors import ConfigError
from relax_hpc.job_file import validate
from relax_hpc.roles.training import check as training_check

pytestmark = pytest.mark.long


def made(**actor):
    """Both configurations of a job with these tables of the optimizer."""
    dtype, optimizer = actor.pop("dtype", "float32"), actor.pop("optimizer", {})
    config = job("unused", dtype=dtype, optimizer=optimizer | actor)
    settings = config.actor.optimizer
    return ddp_config(settings, dtype), optimizer_config(settings, dtype)


def refused(text, **actor):
    with pytest.raises(ConfigError, match=re.escape(text)) as error:
        made(**actor)
    assert "\n" not in str(error.value)


def test_fields_of_a_job_reach_megatron_beside_ours():
    optimizer = {"lr": 2e-5, "megatron": {"adam_eps": 1e-15, "hysteresis": 1}}
    ddp, adam = made(optimizer=optimizer, ddp={"overlap_grad_reduce": True, "bucket_size": 1000})
    assert (ddp.overlap_grad_reduce, ddp.bucket_size, ddp.grad_reduce_in_fp32) == (True, 1000, True)
    assert (adam.adam_eps, adam.hysteresis, adam.lr, adam.adam_beta2) == (1e-15, 1, 2e-5, 0.95)


def test_the_decay_of_adams_moments_is_megatrons_to_take_and_below_1():
    _, adam = made(optimizer={"megatron": {"adam_beta2": 0.98}})
    assert (adam.adam_beta1, adam.adam_beta2) == (0.9, 0.98)
    for name, value in (("adam_beta1", -0.1), ("adam_beta2", 1.0)):
        refused(f"megatron.{name} = {value}: use 0 or", optimizer={"megatron": {name: value}})


def test_an_unknown_field_is_an_error_that_names_the_nearest():
    refused(
        "actor.optimizer.ddp.overlap_grad_reduc = True: Megatron-core's "
        "DistributedDataParallelConfig has no "
        "such field; did you mean overlap_grad_reduce?",
        ddp={"overlap_grad_reduc": True},
    )
    refused("did you mean adam_eps?", optimizer={"megatron": {"adam_epsilon": 1e-6}})


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("lr", 1.0, "is set by actor.optimizer.lr; use that"),
        ("exp_avg_dtype", "bf16", "is set by actor.optimizer.moments; use that"),
        ("optimizer_cpu_offload", True, "is set by actor.optimizer.offload; use that"),
        ("bf16", True, "is set by model.dtype; use that"),
        ("optimizer", "sgd", "the optimizer is AdamW; remove it"),
    ],
)
def test_a_field_that_is_ours_is_an_error_that_names_the_key_that_sets_it(field, value, reason):
    refused(f"actor.optimizer.megatron.{field} = {value!r}: {reason}",
            optimizer={"megatron": {field: value}})  # fmt: skip


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("yes", "is not true or false"),
        (1, "is not true or false"),
        ([True], "is not true or false"),
    ],
)
def test_a_value_of_another_type_is_an_error(value, expected):
    refused(f"actor.optimizer.ddp.overlap_grad_reduce = {value!r}: {expected}",
            ddp={"overlap_grad_reduce": value})  # fmt: skip
    refused("actor.optimizer.ddp.bucket_size = 1.5: is not a whole number",
            ddp={"bucket_size": 1.5})  # fmt: skip
    refused("actor.optimizer.megatron.adam_eps = 'small': is not a number",
            optimizer={"megatron": {"adam_eps": "small"}})  # fmt: skip


def test_gathering_weights_later_is_refused_since_they_are_published_at_once():
    refused("weights are published right after an update", ddp={"overlap_param_gather": True})


def test_sums_of_gradients_in_float16_are_refused():
    refused("float16 ends at 65504", dtype="float16", ddp={"grad_reduce_in_fp32": False})


def test_every_field_of_megatrons_is_taken_or_refused_with_a_reason():
    """A field that a new Megatron adds is taken: it has to be thought about first."""
    from dataclasses import fields

    from relax_hpc.engines.megatron.optimizer import settings as module

    for target, reasons, taken in (
        (
            module.DistributedDataParallelConfig,
            module._DDP_REFUSED,
            "grad_reduce_in_fp32 overlap_grad_reduce bucket_size nccl_ub "
            "pad_buckets_for_high_nccl_busbw reduce_scatter_with_fp32_accumulation "
            "disable_symmetric_registration",
        ),
        (
            module.MegatronOptimizerConfig,
            module._OPTIMIZER_REFUSED,
            "apply_wd_to_qk_layernorm loss_scale initial_loss_scale min_loss_scale "
            "loss_scale_window hysteresis adam_beta1 adam_beta2 adam_eps",
        ),
    ):
        assert {field.name for field in fields(target)} == set(reasons) | set(taken.split())


def test_submitting_a_wrong_table_is_refused_before_anything_is_queued(folder):
    (folder / "config.json").write_text((folder / "config.json").read_text())
    config = job(folder, optimizer={"ddp": {"bucket_sise": 1}})
    with pytest.raises(ConfigError, match=r"actor\.optimizer\.ddp\.bucket_sise = 1.*bucket_size"):
        training_check.check_trainer(config)


def test_a_table_in_a_table_is_refused_when_the_job_is_read():
    tree = json.loads(job("unused").model_dump_json())
    tree["actor"]["optimizer"]["ddp"] = {"bucket_size": {"of": 1}}
    with pytest.raises(ConfigError, match=r"actor\.optimizer\.ddp\.bucket_size.*is a table"):
        validate(tree, source="job")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from engine_fixtures import save_checkpoint

    return save_checkpoint(tmp_path_factory.mktemp("models") / "qwen3", 0)


@pytest.fixture(scope="module")
def ranks(ranks):
    return ranks[2]


OVERLAP = {"overlap_grad_reduce": True, "bucket_size": 5000}


@pytest.mark.parametrize(
    "layout",
    [
        {"data_parallel": 2},
        {"pipeline_parallel": 2, "virtual_pipeline": 1},
        {"context_parallel": 2},
    ],
    ids=["dp2", "pp2", "cp2"],
)
def test_summing_gradients_on_the_way_gives_the_same_update(ranks, folder, layout):
    """In portions, of which the last may be empty; also if nobody says which is the last."""
    rows, advantages = trajectories(8)
    weights = []
    for table, portions_of_steps, tell_last in (
        ({}, (1, 1, 1), True),
        (OVERLAP, (1, 1, 1), True),
        (OVERLAP, (3, 3, 3), True),
        (OVERLAP, (9, 9, 9), True),
        (OVERLAP, (3, 3, 3), False),
        (OVERLAP, (1, 3, 2), True),  # Megatron learns in the first step when a gradient is whole
    ):
        config = job(folder, budget=40, layout=layout, optimizer={"ddp": table})
        ranks.call(worker.open_trainer, config=config)
        batch = {"rows": rows, "advantages": advantages, "tell_last": tell_last}
        for num_portions in portions_of_steps:
            ranks.call(worker.train, num_portions=num_portions, **batch)
        weights.append(ranks.call(worker.weights)[0])
    for other in weights[1:]:
        for name in other:
            # Adam blows up what rounding leaves of a gradient that is almost 0.
            assert np.mean(np.abs(weights[0][name] - other[name]) > 2e-5) < 1e-3, name


def test_gradients_in_bfloat16_train_nearly_as_those_in_float32(ranks, folder):
    rows, _ = trajectories(8)
    batch = {"rows": rows, "advantages": np.ones(8, np.float32), "num_steps": 6}
    norms, gains = [], []
    for in_fp32 in (True, False):
        optimizer = {"lr": 3e-3, "clip_grad": 1.0, "ddp": {"grad_reduce_in_fp32": in_fp32}}
        config = job(folder, dp=2, dtype="bfloat16", actor={"optimizer": optimizer})
        ranks.call(worker.open_trainer, config=config)
        assert ranks.call(worker.gradient_types) == 2 * [
            {"torch.float32" if in_fp32 else "torch.bfloat16"}
        ]
        norms.append(ranks.call(worker.train, **batch | {"num_steps": 1})[0]["grad_norm"])
        ranks.call(worker.train, **batch)
        found = ranks.call(worker.logprobs, rows=rows)
        gains.append(np.mean([x.mean() for rank in found for x in rank.values()]))
    assert norms[1] == pytest.approx(norms[0], rel=0.01)
    assert gains[1] == pytest.approx(gains[0], abs=0.05)
