"""Tables of a job that are Megatron's own: what is taken, and what is said of the rest."""

import json
import re
from dataclasses import fields

import numpy as np
import pytest
from trainers import job, opened, trajectories

from relax_hpc.config.job_file import validate
from relax_hpc.errors import ConfigError
from relax_hpc.roles.training import check as training_check
from relax_hpc.trainer.megatron import settings
from relax_hpc.trainer.megatron.settings import ddp_config, optimizer_config

pytestmark = pytest.mark.long


def made(dtype="float32", ddp=(), **megatron):
    """Both configurations of a job with these tables of the optimizer."""
    optimizer = {"lr": 2e-5, "ddp": dict(ddp), "megatron": megatron}
    settings = job("unused", dtype=dtype, optimizer=optimizer).actor.optimizer
    return ddp_config(settings, dtype), optimizer_config(settings, dtype)


def test_fields_of_a_job_reach_megatron_beside_ours():
    ddp, adam = made(
        "float16", {"overlap_grad_reduce": True, "bucket_size": 1000},
        adam_eps=1e-15, hysteresis=1, adam_beta2=0.98,
    )  # fmt: skip
    assert (ddp.overlap_grad_reduce, ddp.bucket_size, ddp.grad_reduce_in_fp32) == (True, 1000, True)
    assert (adam.adam_eps, adam.hysteresis, adam.lr) == (1e-15, 1, 2e-5)
    assert (adam.adam_beta1, adam.adam_beta2) == (0.9, 0.98)
    assert made()[1].adam_beta2 == 0.95


DDP, OVERLAPS = "actor.optimizer.ddp.", "overlap_grad_reduce"
NONE = "Megatron-core's DistributedDataParallelConfig has no such field; did you mean"


@pytest.mark.parametrize(
    ("tables", "text"),
    [
        ({"adam_beta1": -0.1}, "megatron.adam_beta1 = -0.1: use 0 or"),
        ({"adam_beta2": 1.0}, "megatron.adam_beta2 = 1.0: use 0 or"),
        ({"ddp": {"overlap_grad_reduc": 1}}, f"{DDP}overlap_grad_reduc = 1: {NONE} {OVERLAPS}?"),
        ({"adam_epsilon": 1e-6}, "did you mean adam_eps?"),
        ({"lr": 1.0}, "megatron.lr = 1.0: is set by actor.optimizer.lr; use that"),
        ({"exp_avg_dtype": "bf16"}, "= 'bf16': is set by actor.optimizer.moments; use that"),
        ({"optimizer_cpu_offload": True}, "is set by actor.optimizer.offload; use that"),
        ({"bf16": True}, "megatron.bf16 = True: is set by model.dtype; use that"),
        ({"optimizer": "sgd"}, "optimizer = 'sgd': the optimizer is AdamW; remove it"),
        ({"ddp": {OVERLAPS: "yes"}}, f"{DDP}{OVERLAPS} = 'yes': is not true or false"),
        ({"ddp": {OVERLAPS: 1}}, f"{OVERLAPS} = 1: is not true or false"),
        ({"ddp": {OVERLAPS: [True]}}, f"{OVERLAPS} = [True]: is not true or false"),
        ({"ddp": {"bucket_size": 1.5}}, f"{DDP}bucket_size = 1.5: is not a whole number"),
        ({"adam_eps": "small"}, "megatron.adam_eps = 'small': is not a number"),
        ({"ddp": {"overlap_param_gather": True}}, "weights are published right after an update"),
        ({"dtype": "float16", "ddp": {"grad_reduce_in_fp32": False}}, "float16 ends at 65504"),
        # R14, of the tables beside the transformer's: a field that acts only beside another.
        ({"hysteresis": 2}, 'megatron.hysteresis = 2: has an effect only with model.dtype = "floa'),
        ({"ddp": {"bucket_size": 5}}, f"bucket_size = 5: has an effect only with {DDP}{OVERLAPS}"),
    ],
)
def test_a_field_that_is_not_taken_is_refused_with_the_reason(tables, text):
    with pytest.raises(ConfigError, match=re.escape(text)) as error:
        made(**tables)
    assert "\n" not in str(error.value)


def test_every_field_of_megatrons_is_taken_or_refused_with_a_reason():
    """A field that a new Megatron adds is taken: it has to be thought about first."""
    for target, reasons, taken in (
        (
            settings.DistributedDataParallelConfig,
            settings._DDP_REFUSED,
            "grad_reduce_in_fp32 overlap_grad_reduce bucket_size nccl_ub "
            "pad_buckets_for_high_nccl_busbw reduce_scatter_with_fp32_accumulation "
            "disable_symmetric_registration",
        ),
        (
            settings.MegatronOptimizerConfig,
            settings._OPTIMIZER_REFUSED,
            "apply_wd_to_qk_layernorm loss_scale initial_loss_scale min_loss_scale "
            "loss_scale_window hysteresis adam_beta1 adam_beta2 adam_eps",
        ),
    ):
        assert {field.name for field in fields(target)} == set(reasons) | set(taken.split())


def test_submitting_a_wrong_table_is_refused_before_anything_is_queued(folder):
    config = job(folder, optimizer={"ddp": {"bucket_sise": 1}})
    with pytest.raises(ConfigError, match=r"actor\.optimizer\.ddp\.bucket_sise = 1.*bucket_size"):
        training_check.check_trainer(config)


def test_a_table_in_a_table_is_refused_when_the_job_is_read():
    tree = json.loads(job("unused").model_dump_json())
    tree["actor"]["optimizer"]["ddp"] = {"bucket_size": {"of": 1}}
    with pytest.raises(ConfigError, match=r"actor\.optimizer\.ddp\.bucket_size.*is a table"):
        validate(tree, source="job")


@pytest.fixture(scope="module")
def folder(checkpoints):
    return checkpoints[0]


OVERLAP = {"overlap_grad_reduce": True, "bucket_size": 5000}


@pytest.mark.parametrize("grid", ["dp2", "pp2", "cp2"])
def test_summing_gradients_on_the_way_gives_the_same_update(ranks, folder, grid):
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
        pool = opened(ranks, folder, grid, budget=40, optimizer={"ddp": table})
        batch = {"rows": rows, "advantages": advantages, "tell_last": tell_last}
        for num_portions in portions_of_steps:
            pool.train(num_portions=num_portions, **batch)
        weights.append(pool.weights()[0])
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
        pool = opened(ranks, folder, "dp2", dtype="bfloat16", actor={"optimizer": optimizer})
        kind = "torch.float32" if in_fp32 else "torch.bfloat16"
        assert pool.gradient_types() == 2 * [{kind}]
        norms.append(pool.train(**batch | {"num_steps": 1})[0]["grad_norm"])
        pool.train(**batch)
        found = pool.logprobs(rows=rows)
        gains.append(np.mean([x.mean() for rank in found for x in rank.values()]))
    assert norms[1] == pytest.approx(norms[0], rel=0.01)
    assert gains[1] == pytest.approx(gains[0], abs=0.05)
