"""Losses, advantages, means over tokens and sequences, the weight of the entropy: by hand."""

import math
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch

from relax_hpc.algorithms.aggregation import row_weights, token_weights
from relax_hpc.algorithms.algorithm import algorithm_of
from relax_hpc.algorithms.composition import objective_of, value_loss
from relax_hpc.algorithms.corrections.tis import Tis
from relax_hpc.algorithms.entropy import EntropyState
from relax_hpc.algorithms.estimates import estimate_gae
from relax_hpc.algorithms.kl import Kl
from relax_hpc.algorithms.part import Advantage, Needs, Rows
from relax_hpc.algorithms.segments import mean_over, sum_over
from relax_hpc.config import job_file
from relax_hpc.errors import ConfigError
from relax_hpc.roles import table as roles
from relax_hpc.roles.dealing.portions import Comparison, values_of

LOSS = {"name": "ppo_clip", "anchor": "old", "clip_low": 0.2, "clip_high": 0.28}
SETTINGS = {"loss": LOSS, "correction": {"name": "tis", "cap": 2.0}}


class Tokens(SimpleNamespace):
    def with_columns(self, **columns):
        return Tokens(loss_mask=self.loss_mask, columns=self.columns | columns)


def grpo(logprobs, old_logprobs, rollout_logprobs, advantages, mask, **settings):
    columns = {
        "old_logprobs": old_logprobs, "rollout_logprobs": rollout_logprobs,
        "advantages": advantages,
    }  # fmt: skip
    loss = objective_of(algorithm_of(**settings)).loss
    return loss(logprobs, Tokens(loss_mask=mask, columns=columns))


def advantages_of(rewards, *, normalize_std):
    made = algorithm_of(advantage={"name": "grpo" if normalize_std else "group_mean"})
    rows = Rows(rewards.numpy(), np.ones(rewards.shape, np.int64))
    return torch.from_numpy(made.advantage.of_groups(rows))


def kl_to_reference(logprobs, ref_logprobs, mask):
    tokens = Tokens(loss_mask=mask, columns={"ref_logprobs": ref_logprobs})
    return Kl(name="k3").of_tokens(logprobs, tokens).loss


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "expected"),
    [
        (0.5, +1.0, -1.28),  # already up, pushed further up: held at 1 + clip_high
        (-0.5, -1.0, +0.80),  # already down, pushed further down: held at 1 - clip_low
        (0.5, -1.0, +1.6487),  # already up, pushed back down: free, e**0.5
    ],
)
def test_clips_only_steps_that_go_further_out(log_ratio, advantage, expected):
    one = torch.ones(1)
    zero = 0 * one
    loss, *_ = grpo(log_ratio * one, zero, zero, advantage * one, one.bool(), **SETTINGS)
    assert loss.item() == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(("gap", "weight"), [(0.0, 1.0), (0.5, math.exp(0.5)), (3.0, 2.0)])
def test_importance_weight_is_the_ratio_to_the_sampler_up_to_the_cap(gap, weight):
    old = torch.tensor([-1.0])
    loss, metrics, _ = grpo(old, old, old - gap, torch.ones(1), torch.ones(1).bool(), **SETTINGS)
    assert loss.item() == pytest.approx(-weight, rel=1e-6)
    assert metrics["loss/importance_capped"].item() == float(gap == 3.0)


def test_importance_weights_carry_no_gradient():
    logprobs = torch.tensor([-1.0], requires_grad=True)  # old ones that are this very step's
    columns = {"old_logprobs": logprobs, "rollout_logprobs": torch.tensor([-1.5])}
    tokens = Tokens(loss_mask=torch.tensor([True]), columns=columns)
    weights, _ = Tis(cap=2.0).of_tokens(tokens)
    assert weights.item() == pytest.approx(math.exp(0.5)) and not weights.requires_grad


def test_garbage_under_the_mask_changes_neither_loss_nor_gradient():
    logprobs = torch.tensor([-1.0, float("-inf")], requires_grad=True)
    old, mask = torch.tensor([-1.0, float("nan")]), torch.tensor([True, False])
    rollout = torch.tensor([-1.0, float("inf")])
    advantages = torch.tensor([1.0, float("nan")])
    loss, metrics, _ = grpo(logprobs, old, rollout, advantages, mask, **SETTINGS)
    loss.backward()
    assert loss.item() == pytest.approx(-1.0)
    torch.testing.assert_close(logprobs.grad, torch.tensor([-1.0, 0.0]))
    assert all(math.isfinite(v) for v in metrics.values())


def test_micro_batches_add_up_to_one_batch():
    rng = torch.Generator().manual_seed(0)
    logprobs, old, rollout, advantages = torch.randn(4, 8, generator=rng)
    mask = torch.tensor([1, 1, 0, 1, 0, 1, 1, 1], dtype=torch.bool)
    whole, *_ = grpo(logprobs, old, rollout, advantages, mask, **SETTINGS)
    parts = [
        grpo(logprobs[s], old[s], rollout[s], advantages[s], mask[s], **SETTINGS).loss
        for s in (slice(0, 3), slice(3, 8))
    ]
    torch.testing.assert_close(whole, sum(parts))


def test_advantages_of_a_hand_worked_group():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
    centred = advantages_of(rewards, normalize_std=False)
    torch.testing.assert_close(centred[0], torch.tensor([0.5, -0.5, -0.5, 0.5]))
    scaled = advantages_of(rewards, normalize_std=True)
    torch.testing.assert_close(
        scaled[0], math.sqrt(3) / 2 * torch.tensor([1.0, -1.0, -1.0, 1.0]), rtol=1e-4, atol=0
    )
    assert scaled[1].abs().max() == 0  # nothing to learn from a group of equals


def test_a_sibling_without_a_reward_is_compared_with_nobody():
    """Means 2/3 and 0.1 of who has one; a group of one, and of none, has nothing to compare."""
    nan = math.nan
    rewards = torch.tensor(
        [[1.0, nan, 0.0, 1.0], [0.1, 0.1, nan, 0.1], [nan, 1, nan, nan], [nan] * 4]
    )
    third = 1 / 3
    centred = advantages_of(rewards, normalize_std=False)
    torch.testing.assert_close(centred[0], torch.tensor([third, 0.0, -2 * third, third]))
    scaled = advantages_of(rewards, normalize_std=True)
    deviation = math.sqrt(1 / 3)  # of 1, 0, 1: not of four numbers
    expected = torch.tensor([third, 0.0, -2 * third, third]) / deviation
    torch.testing.assert_close(scaled[0], expected, rtol=1e-5, atol=0)
    for worth in (centred, scaled):
        assert worth[1:].abs().max() == 0


@pytest.mark.parametrize(
    ("gap", "kl", "slope"),
    [
        (0.0, 0.0, 0.0),
        (math.log(2), 1 - math.log(2), -1.0),  # half as likely as under the reference: 2 - ln 2 - 1
        (-math.log(2), math.log(2) - 0.5, 0.5),  # twice as likely: 1/2 + ln 2 - 1
    ],
)
def test_kl_to_the_reference_of_a_hand_worked_token(gap, kl, slope):
    logprobs = torch.tensor([-3.0], requires_grad=True)
    found = kl_to_reference(logprobs, torch.tensor([-3.0 + gap]), torch.tensor([True]))
    found.backward()
    assert found.item() == pytest.approx(kl, abs=1e-6)
    assert logprobs.grad.item() == pytest.approx(slope, abs=1e-6)


def test_the_estimate_is_the_divergence_on_average_and_never_negative():
    policy, reference = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.3, 0.3, 0.4])
    estimates = kl_to_reference(policy.log(), reference.log(), torch.ones(3).bool())
    assert (estimates >= 0).all()
    expected = (policy * (policy / reference).log()).sum()
    torch.testing.assert_close((policy * estimates).sum(), expected)


def test_the_kl_term_adds_its_part_to_the_loss_and_0_only_measures():
    logprobs = torch.tensor([-1.0, -1.0, float("nan")], requires_grad=True)
    columns = {
        "old_logprobs": logprobs.detach(), "rollout_logprobs": logprobs.detach(),
        "advantages": torch.ones(3),
        "ref_logprobs": torch.tensor([-1.0 + math.log(2), -1.0, float("inf")]),
    }  # fmt: skip
    tokens = Tokens(loss_mask=torch.tensor([True, True, False]), columns=columns)

    def loss_with(**kl):
        made = algorithm_of(**SETTINGS, **kl)
        return objective_of(made, frozenset({"ref_logprobs"})).loss(logprobs, tokens)

    measured = loss_with()
    assert measured.loss.item() == pytest.approx(-2)
    assert measured.metrics["kl/mean"].item() == pytest.approx(1 - math.log(2))
    assert loss_with(kl={"name": "k3", "coefficient": 0.0}).loss.item() == measured.loss.item()
    pulled = loss_with(kl={"name": "k3", "coefficient": 0.1})
    assert pulled.loss.item() == pytest.approx(-2 + 0.1 * (1 - math.log(2)))
    pulled.loss.backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([-1.1, -1.0, 0.0]))


def test_a_policy_far_from_the_reference_has_a_finite_kl():
    logprobs = torch.tensor([-200.0], requires_grad=True)
    found = kl_to_reference(logprobs, torch.tensor([0.0]), torch.tensor([True]))
    found.backward()
    assert math.isfinite(found.item()) and math.isfinite(logprobs.grad.item())


def test_metrics_count_trained_tokens_only():
    """Three tokens: one beyond the clip, one sampled by an older policy, one beyond both."""
    log_ratio = torch.tensor([0.5, 0.0, -0.5, 0.5])
    gap = torch.tensor([0.0, 0.5, 3.0, 3.0])
    mask = torch.tensor([True, True, True, False])
    old = torch.full((4,), -1.0)
    _, metrics, _ = grpo(old + log_ratio, old, old - gap, torch.ones(4), mask, **SETTINGS)
    assert metrics["loss/clip_fraction"].item() == 1  # the third is below, and pulled up
    assert metrics["loss/importance_capped"].item() == 1
    assert metrics["loss/importance_mean"].item() == pytest.approx(1 + math.exp(0.5) + 2, rel=1e-6)
    kl = math.exp(0.5) - 1 - 0.5 + math.exp(-0.5) - 1 + 0.5  # of the trained tokens: r - 1 - ln r
    assert metrics["loss/approx_kl"].item() == pytest.approx(kl, rel=1e-5)


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


def test_a_prompt_counts_once_however_many_rows_its_episodes_have():
    """With a loss of 1 per token: two episodes a prompt, of which one is 6 tokens in two rows."""
    lengths, groups = np.array([2, 5, 1, 4, 0]), np.array([0, 0, 0, 1, 1])
    weights, counts = row_weights("prompt", lengths, groups, 8)
    loss = weights * lengths
    assert [loss[:3].sum(), loss[3:].sum()] == [1, 1]
    assert counts.tolist() == [1 / 3] * 3 + [1 / 2] * 2
    weights, counts = row_weights("sequence", lengths, groups, 8)
    assert weights.tolist() == counts.tolist() == [1] * 5
    assert row_weights("token", LENGTHS, GROUPS, 8) is None


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
    with pytest.raises(ConfigError, match=r"advantage\.name = 'mine': needs a reference"):
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
    columns, teaching = values_of(index, Comparison(settings, 2, longest=8))
    assert columns["weights"].tolist() == [1 / 8, 1 / 8, 1 / 4, 1 / 4]
    assert columns["counts"].tolist() == [1 / 2] * 4
    assert columns["advantages"].tolist() == [1, 1, 1, 1] and teaching.tolist() == [0, 1, 2, 3]


class Valued(NamedTuple):
    loss_mask: torch.Tensor
    sequence_ids: torch.Tensor
    groups: torch.Tensor
    columns: dict

    @classmethod
    def of(cls, masks, **columns):
        ids = [torch.full((len(mask),), number) for number, mask in enumerate(masks)]
        return cls(
            torch.tensor([bit for mask in masks for bit in mask]) != 0,
            torch.cat(ids),
            torch.zeros(len(masks), dtype=torch.int64),
            {name: torch.tensor(values) for name, values in columns.items()},
        )


def by_loops(values, rewards, masks, gamma, lam, alpha=0.0):
    """The same, backwards over every sequence, a token at a time."""
    found, at = [], 0
    for mask in masks:
        decay = max(0.0, 1 - 1 / (alpha * sum(mask))) if alpha and sum(mask) else lam
        out = [0.0] * len(mask)
        advantage = value = to_come = 0.0
        for t in reversed(range(len(mask))):
            if not mask[t]:
                continue
            reward = float(rewards[at + t]) - to_come
            delta = reward + gamma * value - float(values[at + t])
            advantage = out[t] = delta + gamma * decay * advantage
            value, to_come = float(values[at + t]), float(rewards[at + t])
        found += out
        at += len(mask)
    return torch.tensor(found, dtype=torch.float64)


def test_a_chain_of_three_with_a_tools_token_between_is_worth_what_it_is_by_hand():
    """V = 0.2, 0.5, 0.6 and reward 1: with gamma 0.9 and lam 0.8 the deltas are
    0.45 - 0.2 = 0.25, 0.54 - 0.5 = 0.04, 1 - 0.6 = 0.4, and 0.72 goes from one to the one before.
    """
    tokens = Valued.of([[0, 1, 1, 0, 0, 1]])
    values = torch.tensor([9.0, 0.2, 0.5, math.nan, -7.0, 0.6])
    found = estimate_gae(values, torch.full((6,), 1.0), tokens, gamma=0.9, lam=0.8)
    third = 0.4
    second = 0.04 + 0.72 * third
    first = 0.25 + 0.72 * second
    assert found.tolist() == pytest.approx([0, first, second, 0, 0, third], abs=1e-6)
    assert first == pytest.approx(0.48616)


def test_lambda_follows_the_length_of_a_response():
    """alpha 0.05 and 40 tokens make it a half; 20 tokens or fewer make it 0."""
    long, short = [1] * 40, [1] * 10
    tokens = Valued.of([long, short])
    values = torch.linspace(0, 1, 50)
    rewards = torch.ones(50)
    found = estimate_gae(values, rewards, tokens, gamma=1.0, lam=1.0, alpha=0.05)
    half = estimate_gae(values, rewards, tokens, gamma=1.0, lam=0.5)
    none = estimate_gae(values, rewards, tokens, gamma=1.0, lam=0.0)
    assert torch.allclose(found[:40], half[:40]) and torch.allclose(found[40:], none[40:])
    assert not torch.allclose(half[:40], none[:40])


def test_random_batches_equal_a_loop_over_tokens():
    generator = torch.Generator().manual_seed(3)
    for _ in range(200):
        masks = [
            (torch.rand(int(n), generator=generator) < 0.7).int().tolist()
            for n in torch.randint(1, 9, (5,), generator=generator)
        ]
        tokens = Valued.of(masks)
        count = len(tokens.loss_mask)
        values, rewards = torch.randn(2, count, generator=generator, dtype=torch.float64)
        gamma, lam = torch.rand(2, generator=generator).tolist()
        for alpha in (0.0, 0.5):
            found = estimate_gae(values, rewards, tokens, gamma=gamma, lam=lam, alpha=alpha)
            expected = by_loops(values, rewards, masks, gamma, lam, alpha)
            assert torch.allclose(found, expected, atol=1e-9)


def test_what_is_to_come_may_fall_on_the_way():
    """Per-token rewards -0.1 and 1.2 are 1.1 and 1.2 still to come; with lam 1 and V 0 these are
    the advantages."""
    tokens = Valued.of([[1, 1]])
    found = estimate_gae(torch.zeros(2), torch.tensor([1.1, 1.2]), tokens, gamma=1.0, lam=1.0)
    assert found.tolist() == pytest.approx([1.1, 1.2])


def test_the_value_loss_takes_the_worse_of_the_clipped_and_the_free_value():
    """R = 1; V_old = 0, 0, 0.9; V = 0.5, 0.1, 1.3: clipped to 0.2, 0.1, 1.1."""
    tokens = Valued.of([[1], [1], [1], [0]], values=[0.0, 0.0, 0.9, 7.0], advantages=[1.0] * 4)
    values = torch.tensor([0.5, 0.1, 1.3, math.nan], requires_grad=True)
    output = value_loss(clip=0.2, gamma=1.0, lam=1.0)(values, tokens)
    assert output.loss.item() == pytest.approx((0.8**2 + 0.9**2 + 0.3**2) / 2)
    output.loss.backward()
    assert values.grad.tolist() == pytest.approx([0.0, -0.9, 0.3, 0.0])
    assert output.metrics["value/clipped"] == 1
    assert output.metrics["value/square_error"].item() == pytest.approx(0.25 + 0.81 + 0.09)
    free = value_loss(clip=0.0, gamma=1.0, lam=1.0)(values.detach(), tokens)
    assert free.loss.item() == pytest.approx((0.5**2 + 0.9**2 + 0.3**2) / 2)


def weights(entropy, measured):
    """Weights of the steps that follow on these entropies, the first step's in front."""
    part = algorithm_of(entropy=entropy).entropy
    state, found = part.first(), [part.first().weight]
    for each in measured:
        state = part.after(state, each)
        found.append(state.weight)
    return found


def test_without_a_table_it_is_only_measured_and_rows_without_advantage_teach_nothing():
    for nothing in ({"name": "none"}, {"coefficient": 0.0}):
        assert weights(nothing, [0.1, 0.3]) == [0.0] * 3
        assert not algorithm_of(entropy=nothing).needs.every_row


def test_a_fixed_bonus_is_the_same_in_every_step_and_works_on_every_row():
    assert weights({"coefficient": 0.01}, [0.1, 0.3]) == [0.01] * 3
    assert algorithm_of(entropy={"coefficient": 0.01}).needs.every_row


def test_an_adaptive_one_rises_below_the_target_falls_above_and_rests_there():
    """The coefficient is 0.1, 0.2, 0.3, 0.2, 0.1, 0.2, 0.1; above the target none is applied."""
    entropy = {"name": "adaptive", "target": 0.5, "step": 0.1, "largest": 0.3}
    measured = [0.4, 0.4, 0.1, 0.6, 0.7, 0.2, 0.5]
    found = weights(entropy, measured)
    assert found == pytest.approx([0, 0.1, 0.2, 0.3, 0, 0, 0.2, 0.1])


def test_its_coefficient_stays_between_zero_and_the_largest():
    part = algorithm_of(entropy={"name": "adaptive", "target": 1.0, "largest": 0.3, "step": 0.2})
    assert part.entropy.after(EntropyState(0.2, 0.2), 0.5).coefficient == 0.3
    assert part.entropy.after(EntropyState(0.1, 0.1), 2.0).coefficient == 0.0
