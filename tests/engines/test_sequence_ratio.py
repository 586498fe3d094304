"""An algorithm of one file and a line of the table: its ratio and its mean are of sequences."""

import math
from types import SimpleNamespace

import megatron_worker as worker
import numpy as np
import pytest
import torch
from megatron_reference import dense
from megatron_worker import job, trajectories
from sequence_ratio import GSPO

from relax_hpc import job_file
from relax_hpc.algorithms import table
from relax_hpc.algorithms.algorithm import Rows
from relax_hpc.errors import ConfigError

LAYOUTS = {
    "tp1": (1, {}),
    "dp2": (2, {"dp": 2}),
    "tp2": (2, {"tp": 2}),
    "cp2": (2, {"layout": {"context_parallel": 2}}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    dense(folder, tied=False)
    return folder


TREE = {
    "name": "run", "model": {"path": "m"}, "prompts": {"train": "t"}, "schedule": {"num_steps": 1},
}  # fmt: skip


def test_its_settings_are_chosen_by_name_and_survive_a_resolved_job(monkeypatch):
    with pytest.raises(ConfigError, match="there is no algorithm 'gspo'; use grpo"):
        job_file.validate(TREE | {"algorithm": {"name": "gspo"}}, source="job")
    monkeypatch.setitem(table.ALGORITHMS, "gspo", GSPO)
    tree = TREE | {"algorithm": {"name": "gspo", "epsilon": 0.1, "epochs_per_step": 2}}
    config = job_file.validate(tree, source="job")
    again = type(config).model_validate_json(config.model_dump_json())
    for each in (config, again):
        assert (each.algorithm.epsilon, each.epochs_per_step) == (0.1, 2)
    wrong = TREE | {"algorithm": {"name": "gspo", "clip_low": 0.1}}
    with pytest.raises(ConfigError, match=r"algorithm\.clip_low = 0\.1: unknown key"):
        job_file.validate(wrong, source="job")
    alone = TREE | {"algorithm": {"name": "gspo"}, "rollout": {"samples_per_prompt": 1}}
    with pytest.raises(ConfigError, match="gspo compares siblings of a prompt; use 2 or more"):
        job_file.validate(alone, source="job")


def test_its_loss_is_the_one_worked_by_hand():
    """Sequences of 2, 1 and 0 trained tokens, and padding; ratios 2, 1/4, and none."""
    nan = math.nan
    log_ratio = torch.tensor([nan, 2.0, 0.0, nan, -2.0, nan, nan]) * math.log(2)
    old = torch.tensor([0.0, -1.0, -2.0, 0.0, -3.0, -1.0, 0.0])
    tokens = SimpleNamespace(
        loss_mask=torch.tensor([False, True, True, False, True, False, False]),
        sequence_ids=torch.tensor([0, 0, 0, 1, 1, 2, 3]),
        groups=torch.tensor([5, 5, 6, -1]),
        columns={
            "old_logprobs": old,
            "advantages": torch.tensor([3.0, 3.0, 3.0, -1.0, -1.0, nan, nan]),
        },
    )
    logprobs = (old + log_ratio).requires_grad_()
    loss = GSPO.loss(GSPO.settings(name="gspo", epsilon=1.5), frozenset())
    value, _, denominator = loss(logprobs, tokens)
    assert value.item() == pytest.approx(-(2 * 3 - 0.25), rel=1e-6)
    assert denominator.item() == 2
    value.backward()  # -A s / n of each token
    expected = torch.tensor([0, -3.0, -3.0, 0, 0.25, 0, 0])
    torch.testing.assert_close(logprobs.grad, expected)
    clipped, _, _ = GSPO.loss(GSPO.settings(name="gspo", epsilon=0.5), frozenset())(
        logprobs, tokens
    )
    assert clipped.item() == pytest.approx(-(1.5 * 3 - 0.5), rel=1e-6)


def test_its_advantages_are_of_groups():
    rewards = np.array([[1, 0, 0, 1], [1, 1, 1, 1]], np.float32)
    worth = GSPO.advantages(None, Rows(rewards, np.ones(8, np.int64), np.repeat([0, 1], 4)))
    assert worth.tolist() == [[0.5, -0.5, -0.5, 0.5], [0, 0, 0, 0]]
    assert GSPO.teaches(None, worth).tolist() == [[True] * 4, [False] * 4]


def test_it_trains_alike_in_any_split_into_micro_batches_portions_and_ranks(ranks, folder):
    """At first all ratios are 1: the loss is minus the mean advantage of the sequences."""
    found = []
    splits = (
        ("tp1", 100_000, 1),
        ("tp1", 20, 3),
        ("dp2", 20, 1),
        ("dp2", 50, 5),
        ("tp2", 50, 1),
        ("cp2", 50, 1),
    )
    rows, advantages = trajectories(24)
    batch = {"rows": rows, "advantages": advantages, "loss": "gspo"}
    for layout, budget, num_portions in splits:
        size, options = LAYOUTS[layout]
        pool = ranks[size]
        pool.call(worker.open_trainer, config=job(folder, **options, budget=budget))
        found.append(pool.call(worker.train, **batch, num_portions=num_portions)[0])
    sizes = np.array([int(row.loss_mask[1:].sum()) for row in rows])
    mean = float(advantages[sizes > 0].mean())
    for metrics in found:
        assert metrics["loss"] == pytest.approx(-mean, rel=1e-4, abs=1e-6)
        assert metrics["grad_norm"] == pytest.approx(found[0]["grad_norm"], rel=1e-4)
    # A mean over tokens has this gradient if a row is worth more, the fewer tokens it has.
    worth = advantages * sizes.sum() / (np.count_nonzero(sizes) * np.maximum(sizes, 1))
    ranks[1].call(worker.open_trainer, config=job(folder))
    by_token = ranks[1].call(worker.train, rows=rows, advantages=worth)[0]
    assert found[0]["grad_norm"] == pytest.approx(by_token["grad_norm"], rel=1e-4)
