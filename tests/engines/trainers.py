"""Jobs and batches of tests, and trainers of them on the ranks of a pool."""

import re
from math import prod
from types import SimpleNamespace

import numpy as np
import torch

from relax_hpc.config.run import RunConfig
from relax_hpc.schema import FinishReason, Trajectory
from relax_hpc.trainer.megatron.checkpoint_files import StoredCheckpoint

VOCAB = 128
AXES = {
    "tp": "tensor_parallel", "pp": "pipeline_parallel", "vpp": "virtual_pipeline",
    "cp": "context_parallel", "dp": "data_parallel", "ep": "expert_parallel",
    "etp": "expert_tensor_parallel",
}  # fmt: skip
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def selective(*modules):
    """Settings that recompute these modules of every layer."""
    return {"recompute_granularity": "selective", "recompute_modules": [*modules]}


def layout_of(grid):
    """The layout of a grid by its name: tp2_dp2, or one."""
    return {AXES[axis]: int(size) for axis, size in re.findall(r"([a-z]+)(\d+)", grid)}


def size_of(grid):
    """Its ranks, on which those of experts lie."""
    return prod(layout_of(grid).get(AXES[axis], 1) for axis in ("tp", "pp", "cp", "dp"))


def job(folder, grid="one", *, budget=64, **tables):
    """A RunConfig; `tables` are merged into its sections."""
    tree = {
        "name": "test",
        "model": {"path": str(folder), "dtype": tables.pop("dtype", "float32")},
        "prompts": {"train": "unused"},
        "rollout": {"temperature": tables.pop("temperature", 1.0)} | tables.pop("rollout", {}),
        "actor": {
            "layout": layout_of(grid) | tables.pop("layout", {}),
            "tokens_per_micro_batch": budget,
            "optimizer": {"lr": 1e-3, "clip_grad": 0.0} | tables.pop("optimizer", {}),
            "transformer": tables.pop("transformer", {}),
        }
        | tables.pop("actor", {}),
        "algorithm": tables.pop("algorithm", {}),
        "schedule": {"num_steps": 100} | tables.pop("schedule", {}),
    }
    assert not tables
    return RunConfig.model_validate(tree)


def opened(ranks, folder, grid="one", **options):
    """The ranks of a grid, with a trainer of this job."""
    ranks[size_of(grid)].open_trainer(config=job(folder, grid, **options))
    return ranks[size_of(grid)]


def trajectories(num, seed=0, longest=20):
    """Random ones, and advantages; some have a tool's tokens between those that were sampled."""
    rng = np.random.default_rng(seed)
    made = []
    for guid in range(num):
        prompt = int(rng.integers(2, 5))
        length = prompt + int(rng.integers(1, longest - 4))
        mask = np.zeros(length, np.uint8)
        mask[prompt:] = rng.random(length - prompt) < 0.8
        logprobs = np.where(mask, rng.normal(-3, 1, length), 0).astype(np.float32)
        made.append(
            Trajectory(
                guid=guid, sibling=0, prompt_index=guid, seed=0,
                token_ids=rng.integers(0, VOCAB, length).astype(np.int32), prompt_len=prompt,
                loss_mask=mask, columns={"rollout_logprobs": logprobs},
                version_runs=np.array([[prompt, 0]], np.int32), finish=FinishReason.STOP,
                reward=0.0,
            )
        )  # fmt: skip
    return made, rng.normal(size=num).astype(np.float32)


def batch_of(rows, advantages, **found):
    """A batch as the functions of ranks take it, and what is known of it."""
    batch = {"rows": rows, "advantages": advantages}
    return SimpleNamespace(rows=rows, advantages=advantages, batch=batch, **found)


def num_tokens(rows):
    return int(sum(row.loss_mask.sum() for row in rows))


def valued(rows, advantages):
    """The rows with what they are worth."""
    return [
        row.with_columns(advantages=np.asarray(worth, np.float32))
        for row, worth in zip(rows, advantages, strict=True)
    ]


def collect(per_rank):
    """[{row: logprobs}] of the ranks -> logprobs by row."""
    merged = {row: values for part in per_rank for row, values in part.items()}
    return [merged[row] for row in sorted(merged)]


def contents(checkpoint):
    """Its tensors by their keys."""
    stored = StoredCheckpoint(checkpoint)
    return {key: stored.tensor(key) for key in stored.shapes()}


def equal(found, expected):
    """Whether tensors by name, or one after the other, are the same bit by bit."""
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(
            _same(found[name], tensor) for name, tensor in expected.items()
        )
    return all(map(_same, found, expected)) and len(found) == len(expected)


def _same(one, other):
    if torch.is_tensor(one) and torch.is_tensor(other):
        return one.dtype == other.dtype and torch.equal(one, other)
    return np.array_equal(one, other)


def assert_close(found, expected, atol=1e-5, rtol=1e-7):
    """Of tensors by name, or one after the other."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        found, names = [found[name] for name in expected], list(expected)
        expected = list(expected.values())
    else:
        names = range(len(expected))
    for name, mine, theirs in zip(names, found, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=atol, rtol=rtol, err_msg=str(name))


def clear_gradient(reference, name, step=0):
    """Returns where Adam's normalised step is not rounding noise."""
    return np.abs(reference.gradients[step][name]) > 1e-5


def assert_updated(found, expected, reference, *steps):
    """Weights are the expected ones where Adam's steps, by number, are no rounding noise."""
    for name, theirs in expected.items():
        clear = np.all([clear_gradient(reference, name, step) for step in steps or (0,)], axis=0)
        away = np.abs(found[name] - theirs)[clear]
        assert away.size == 0 or away.max() < 1e-5, (name, steps)


def assert_a_grid_equals(reference, opened, *, rtol=1e-7, atol=1e-5):
    """Logprobs, loss, gradients, and the weights after each of the reference's updates."""
    pool = opened()
    assert_close(collect(pool.logprobs(rows=reference.rows)), reference.logprobs, atol, rtol)
    for gradients in pool.gradients(**reference.batch):
        assert_close(gradients, reference.gradients[0])
    pool = opened()
    for step, expected in enumerate(reference.steps):
        metrics = pool.train(**reference.batch)
        assert all(rank == metrics[0] for rank in metrics)
        assert abs(metrics[0]["loss"] - reference.losses[step]) < 1e-5
        # Adam hardly sees the gradient's scale; its norm does.
        np.testing.assert_allclose(metrics[0]["grad_norm"], reference.norms[step], rtol=1e-5)
        for weights in pool.weights():
            assert weights.keys() == expected.keys()
            assert_updated(weights, expected, reference, 0, step)
    return metrics[0]
