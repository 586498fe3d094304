"""Means over tokens, sequences and prompts, by hand; and what an algorithm may ask for."""

from typing import NamedTuple

import numpy as np
import pytest
import torch

from relax_hpc import job_file
from relax_hpc.algorithms.aggregation import row_weights, token_weights
from relax_hpc.algorithms.part import Advantage, Needs
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


@pytest.mark.parametrize(
    ("mean", "expected"),
    [
        ("sequence_sum", (2 + 12 + 4 + 0) / 4),
        ("prompt", ((2 + 12) / 8 + 4 / 4) / 2),
        ("constant", (2 + 12 + 4) / 8 / 4),
    ],
)
def test_weights_make_the_means_that_they_are_named_after(mean, expected):
    """With a loss of 1 per token, and twice that in the second row, over 4 rows of 2 prompts."""
    weights, counts = row_weights(mean, LENGTHS, GROUPS, 8)
    loss = LENGTHS * np.array([1, 2, 1, 1])
    assert (weights * loss).sum() / counts.sum() == pytest.approx(expected)


def test_a_mean_over_tokens_needs_no_weights():
    assert row_weights("token", LENGTHS, GROUPS, 8) is None


def test_a_prompt_counts_once_however_many_rows_its_episodes_have():
    """With a loss of 1 per token: two episodes a prompt, of which one is 6 tokens in two rows."""
    lengths, groups = np.array([2, 5, 1, 4, 0]), np.array([0, 0, 0, 1, 1])
    weights, counts = row_weights("prompt", lengths, groups, 8)
    loss = weights * lengths
    assert [loss[:3].sum(), loss[3:].sum()] == [1, 1]
    assert counts.tolist() == [1 / 3] * 3 + [1 / 2] * 2
    weights, counts = row_weights("sequence", lengths, groups, 8)
    assert weights.tolist() == counts.tolist() == [1] * 5


class Packed(NamedTuple):
    loss_mask: torch.Tensor
    sequence_ids: torch.Tensor
    groups: torch.Tensor
    columns: dict


def test_a_mean_over_rows_is_over_their_trained_tokens_and_other_means_do_not_look():
    """Three trained of five tokens, one of one, none of two."""
    mask = torch.tensor([True, True, False, False, True, True, False, False])
    ids = torch.tensor([0, 0, 0, 0, 0, 1, 2, 2])
    tokens = Packed(mask, ids, torch.zeros(3), {"weights": torch.ones(8)})
    found = token_weights("sequence", tokens)
    assert found.tolist() == pytest.approx([1 / 3] * 5 + [1] * 3)
    assert (found * mask).sum().item() == pytest.approx(2)  # rows with a trained token
    for mean in ("sequence_sum", "prompt", "constant"):
        assert token_weights(mean, tokens) is tokens.columns["weights"]
    assert token_weights("token", tokens._replace(columns={})) is None


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


class Mine(Advantage):
    def needs(self):
        return Needs(**NEEDED)


NEEDED = {}


@pytest.fixture
def job(monkeypatch):
    def make(tables=None, **needed):
        for name, value in needed.items():
            monkeypatch.setitem(NEEDED, name, value)
        tree = TREE | (tables or {})
        plain = {key: value for key, value in tree.items() if key != "critic"}
        algorithm = job_file.validate(plain, source="job").algorithm
        mine = algorithm.model_copy(update={"advantage": Mine(name="mine")})
        return job_file.validate(tree | {"algorithm": dict(mine)}, source="job")

    return make


def test_what_it_needs_decides_what_is_read_and_what_is_refused(job):
    ref = {"ragged/ref_logprobs": "algorithm.advantage.name = 'mine'"}
    with pytest.raises(
        ConfigError, match=r"algorithm\.advantage\.name = 'mine': needs a reference"
    ):
        job(columns=ref)
    config = job({"reference": {"placement": "own"}}, columns=ref)
    assert config.columns == {"ragged/ref_logprobs"}
    roles.check_columns(config)
    values = {"ragged/values": "algorithm.advantage.name = 'mine'"}
    with pytest.raises(ConfigError, match=r"= 'mine': needs a critic, .* add a table \[critic\]"):
        job(columns=values)
    config = job({"critic": {}}, columns=values)
    assert config.columns == {"ragged/values"}
    roles.check_columns(config)


def test_siblings_and_whole_batches_are_as_it_needs_them(job):
    portions = {"actor": {"tokens_per_micro_batch": 100}}
    assert job(portions).tokens_per_portion < np.inf
    assert job(portions, scope="batch").tokens_per_portion == np.inf
    assert job(portions, scope="group", prepass=True).tokens_per_portion == np.inf
    with pytest.raises(ConfigError, match="'mine' compares siblings of a prompt; use 3 or more"):
        job(min_siblings=3)


def test_needs_of_several_parts_are_those_of_all():
    one = Needs({"a": "x"}, "batch", min_siblings=2, anchors=frozenset({"old"}))
    two = Needs({"b": "y"}, "group", prepass=True, every_row=True)
    both = Needs({"a": "x", "b": "y"}, "batch", True, 2, frozenset({"old"}), True)
    assert one | two == two | one == both


def test_rows_are_dealt_with_the_weights_of_its_aggregation(job):
    settings = job({"algorithm": {"aggregation": "prompt"}}).algorithm
    columns = {"rewards": np.zeros(4), "segment": np.zeros(4), "finish": np.zeros(4)}
    index = type("Index", (), {"response_len": LENGTHS, **columns})
    columns, teaching = values_of(index, settings, 2, longest=8)
    assert columns["weights"].tolist() == [1 / 8, 1 / 8, 1 / 4, 1 / 4]
    assert columns["counts"].tolist() == [1 / 2] * 4
    assert columns["advantages"].tolist() == [1, 1, 1, 1] and teaching.tolist() == [0, 1, 2, 3]
