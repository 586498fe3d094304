"""Means over tokens, sequences and prompts, by hand; and what an algorithm may ask for."""

import numpy as np
import pytest
import torch

from relax_hpc import job_file
from relax_hpc.algorithms import aggregation, table
from relax_hpc.algorithms.algorithm import Algorithm, Needs, Settings
from relax_hpc.algorithms.segments import mean_over, sum_over
from relax_hpc.errors import ConfigError
from relax_hpc.roles import table as roles
from relax_hpc.roles.dealing.portions import values_of

LENGTHS = np.array([2, 6, 4, 0])
GROUPS = np.array([0, 0, 1, 1])
TREE = {
    "name": "run", "model": {"path": "m"}, "prompts": {"train": "t"}, "schedule": {"num_steps": 1},
    "rollout": {"samples_per_prompt": 2},
}  # fmt: skip


def test_weights_make_the_means_that_they_are_named_after():
    """With a loss of 1 per token, and twice that in the second row, over 4 rows."""
    loss = LENGTHS * np.array([1, 2, 1, 1])
    assert (aggregation.sequence_mean(LENGTHS) * loss).sum() == 1 + 2 + 1 + 0
    weights = aggregation.prompt_mean(LENGTHS, GROUPS, 2)
    assert (weights * loss).sum() / 2 == (2 + 12) / 8 + 4 / 4
    assert (aggregation.constant(LENGTHS, 8) * loss).sum() == (2 + 12 + 4) / 8


def test_a_prompt_counts_once_however_many_rows_its_episodes_have():
    """With a loss of 1 per token: two episodes a prompt, of which one is 6 tokens in two rows."""
    lengths, groups = np.array([2, 5, 1, 4, 0]), np.array([0, 0, 0, 1, 1])
    loss = aggregation.prompt_mean(lengths, groups, 2) * lengths
    assert [loss[:3].sum(), loss[3:].sum()] == [2, 2]
    assert (aggregation.sequence_mean(lengths) * lengths).tolist() == [1, 1, 1, 1, 0]


def test_sums_over_sequences_heed_the_mask_and_send_the_gradient_home():
    nan = torch.nan
    values = torch.tensor([nan, 1.0, 3.0, 5.0, nan], requires_grad=True)
    mask = torch.tensor([False, True, True, True, False])
    ids = torch.tensor([0, 0, 0, 1, 2])
    assert sum_over(values, ids, mask, 3).tolist() == [4, 5, 0]
    means = mean_over(values, ids, mask, 3)
    assert means.tolist() == [2, 5, 0]
    (means * torch.tensor([1.0, 10.0, 100.0])).sum().backward()
    assert values.grad.tolist() == [0, 0.5, 0.5, 10, 0]


class Mine(Settings):
    name: str = "mine"


def mine(needs=None, **more):
    needs = needs or Needs()
    return Algorithm("mine", Mine, lambda *_: None, needs=lambda _: needs, **more)


@pytest.fixture
def job(monkeypatch):
    def make(algorithm, **tables):
        monkeypatch.setitem(table.ALGORITHMS, "mine", algorithm)
        tree = TREE | {"algorithm": {"name": "mine"}} | tables
        return job_file.validate(tree, source="job")

    return make


def test_what_it_needs_decides_what_is_read_and_what_is_refused(job):
    ref = Needs({"ragged/ref_logprobs": "algorithm.name = 'mine'"})
    with pytest.raises(ConfigError, match=r"algorithm\.name = 'mine': needs a reference; set"):
        job(mine(ref))
    config = job(mine(ref), reference={"placement": "own"})
    assert config.columns == {"ragged/ref_logprobs"}
    roles.check_columns(config)
    values = job(mine(Needs({"ragged/values": "algorithm.name = 'mine'"})))
    assert values.columns == {"ragged/values"}
    with pytest.raises(ConfigError, match="needs the column ragged/values, which the role critic"):
        roles.check_columns(values)


def test_siblings_and_whole_batches_are_as_it_needs_them(job):
    portions = {"actor": {"portion_micro_batches": 1, "tokens_per_micro_batch": 100}}
    assert job(mine(), **portions).tokens_per_portion < np.inf
    assert job(mine(Needs(whole_batches=True)), **portions).tokens_per_portion == np.inf
    with pytest.raises(ConfigError, match="mine compares siblings of a prompt; use 3 or more"):
        job(mine(Needs(min_siblings=3)))


def test_rows_are_dealt_with_the_weights_of_its_aggregation(job):
    weights = lambda _, rows: aggregation.sequence_mean(rows.response_lengths)  # noqa: E731
    settings = job(mine(weights=weights)).algorithm
    index = type(
        "Index", (), {"rewards": np.zeros(4), "response_len": LENGTHS, "segment": np.zeros(4)}
    )
    columns, teaching = values_of(index, settings, 2)
    assert columns["weights"].tolist() == [1 / 2, 1 / 6, 1 / 4, 1]
    assert columns["advantages"].tolist() == [1, 1, 1, 1] and teaching.tolist() == [0, 1, 2, 3]
