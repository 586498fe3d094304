"""Tables of a job that are Megatron's own: what is taken, and what is said of the rest."""

import re

import numpy as np
import pytest
from trainers import job, opened, trajectories

from relax_hpc.errors import ConfigError
from relax_hpc.trainer.megatron.settings import ddp_config, optimizer_config

pytestmark = pytest.mark.long


def made(dtype="float32", ddp=(), **megatron):
    optimizer = {"lr": 2e-5, "ddp": dict(ddp), "megatron": megatron}
    settings = job("unused", dtype=dtype, optimizer=optimizer).actor.optimizer
    return ddp_config(settings, dtype), optimizer_config(settings, dtype)


DDP, OVERLAPS = "actor.optimizer.ddp.", "overlap_grad_reduce"
NONE = "Megatron-core's DistributedDataParallelConfig has no such field; did you mean"


@pytest.mark.parametrize(
    ("tables", "text"),
    [
        ({"adam_beta1": -0.1}, "megatron.adam_beta1 = -0.1: use 0 or"),
        ({"ddp": {"overlap_grad_reduc": 1}}, f"{DDP}overlap_grad_reduc = 1: {NONE} {OVERLAPS}?"),
        ({"lr": 1.0}, "megatron.lr = 1.0: is set by actor.optimizer.lr; use that"),
        ({"optimizer": "sgd"}, "optimizer = 'sgd': the optimizer is AdamW; remove it"),
        ({"ddp": {OVERLAPS: "yes"}}, f"{DDP}{OVERLAPS} = 'yes': is not true or false"),
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
