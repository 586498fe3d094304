"""A loss of one's own in a file: its ratio and its mean are of sequences."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import sequence_ratio
import torch
from trainers import opened, trajectories

from relax_hpc.algorithms.algorithm import algorithm_of
from relax_hpc.algorithms.composition import objective_of
from relax_hpc.config import job_file
from relax_hpc.errors import ConfigError

TREE = {
    "name": "run", "model": {"path": "m"}, "prompts": {"train": "t"}, "schedule": {"num_steps": 1},
}  # fmt: skip


def test_its_settings_are_chosen_by_name_and_survive_a_resolved_job():
    keys = sequence_ratio.algorithm(epsilon=0.1) | {"epochs_per_step": 2}
    config = job_file.validate(TREE | {"algorithm": keys}, source="job")
    again = type(config).model_validate_json(config.model_dump_json())
    for each in (config, again):
        assert (each.algorithm.loss.epsilon, each.epochs_per_step) == (0.1, 2)
        assert each.algorithm.loss.name.endswith("/sequence_ratio.py:SequenceRatio")
    wrong = TREE | {"algorithm": sequence_ratio.algorithm(clip_low=0.1)}
    with pytest.raises(ConfigError, match=r"algorithm\.loss\.clip_low = 0\.1: unknown key"):
        job_file.validate(wrong, source="job")
    alone = TREE | {"algorithm": keys, "rollout": {"samples_per_prompt": 1}}
    with pytest.raises(ConfigError, match="compares siblings of a prompt; use 2 or more"):
        job_file.validate(alone, source="job")


class Packed(SimpleNamespace):
    def with_columns(self, **columns):
        return Packed(**vars(self) | {"columns": self.columns | columns})


def loss_of(**settings):
    return objective_of(algorithm_of(**sequence_ratio.algorithm(**settings))).loss


def test_its_loss_is_the_one_worked_by_hand():
    """Sequences of 2, 1 and 0 trained tokens, and padding; ratios 2, 1/4, and none."""
    nan = math.nan
    log_ratio = torch.tensor([nan, 2.0, 0.0, nan, -2.0, nan, nan]) * math.log(2)
    old = torch.tensor([0.0, -1.0, -2.0, 0.0, -3.0, -1.0, 0.0])
    tokens = Packed(
        loss_mask=torch.tensor([False, True, True, False, True, False, False]),
        sequence_ids=torch.tensor([0, 0, 0, 1, 1, 2, 3]),
        groups=torch.tensor([5, 5, 6, -1]),
        columns={
            "old_logprobs": old,
            "advantages": torch.tensor([3.0, 3.0, 3.0, -1.0, -1.0, nan, nan]),
            "weights": torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0]),
            "counts": torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0]),
        },
    )
    logprobs = (old + log_ratio).requires_grad_()
    value, metrics, denominator = loss_of(epsilon=1.5)(logprobs, tokens)
    assert value.item() == pytest.approx(-(2 * 3 - 0.25), rel=1e-6)
    assert denominator.item() == 2
    assert metrics["loss/ratio"].item() == pytest.approx(2 + 2 + 0.25)
    value.backward()  # -A s / n of each token
    expected = torch.tensor([0, -3.0, -3.0, 0, 0.25, 0, 0])
    torch.testing.assert_close(logprobs.grad, expected)
    clipped, _, _ = loss_of(epsilon=0.5)(logprobs, tokens)
    assert clipped.item() == pytest.approx(-(1.5 * 3 - 0.5), rel=1e-6)


def test_it_trains_alike_in_any_split_into_micro_batches_portions_and_ranks(ranks, folder):
    """At first all ratios are 1: the loss is minus the mean advantage of the sequences."""
    found = []
    splits = [
        ("one", 100_000, 1),
        ("one", 20, 3),
        ("dp2", 20, 1),
        ("dp2", 50, 5),
        ("tp2", 50, 1),
        ("cp2", 50, 1),
    ]
    rows, advantages = trajectories(24)
    sizes = np.array([int(row.loss_mask[1:].sum()) for row in rows])
    batch = {
        "rows": rows, "advantages": advantages, "loss": "sequence_ratio",
        "weights": np.ones(len(rows)),
    }  # fmt: skip
    for grid, budget, num_portions in splits:
        pool = opened(ranks, folder, grid, budget=budget)
        found.append(pool.train(**batch, num_portions=num_portions)[0])
    mean = float(advantages[sizes > 0].mean())
    for metrics in found:
        assert metrics["loss"] == pytest.approx(-mean, rel=1e-4, abs=1e-6)
        assert metrics["grad_norm"] == pytest.approx(found[0]["grad_norm"], rel=1e-4)
    # A mean over tokens has this gradient if a row is worth more, the fewer tokens it has.
    worth = advantages * sizes.sum() / (np.count_nonzero(sizes) * np.maximum(sizes, 1))
    by_token = opened(ranks, folder).train(rows=rows, advantages=worth)[0]
    assert found[0]["grad_norm"] == pytest.approx(by_token["grad_norm"], rel=1e-4)
