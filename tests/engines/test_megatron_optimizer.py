"""Adam on shards: its numbers, moments in bfloat16, what is kept in host memory."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from trainers import equal, opened, trajectories

from relax_hpc.trainer.megatron import adam

ROWS, ADVANTAGES = trajectories(8)
BATCH = {"rows": ROWS, "advantages": ADVANTAGES}
GROUP = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def made(sizes, weights=None, **options):
    torch.manual_seed(0)
    shards = [
        adam.ParameterShard(
            torch.randn(n), torch.randn(n), torch.zeros(n, dtype=weights) if weights else None
        )
        for n in sizes
    ]
    groups = [{"params": [shard.main for shard in shards]} | GROUP]
    return adam.ShardedAdamW(groups, shards, **options), shards


def test_the_first_step_is_the_hand_worked_one():
    shard = adam.ParameterShard(
        torch.tensor([3.0]), torch.tensor([8.0]), torch.zeros(1, dtype=torch.bfloat16)
    )
    optimizer = adam.ShardedAdamW([{"params": [shard.main]} | GROUP], [shard])
    optimizer.update([shard], 0.25)  # gradient 2: moments 0.2 and 0.2, corrected 2 and 4
    state = optimizer.state[shard.main]
    assert float(state["exp_avg"]) == pytest.approx(0.2)
    assert float(state["exp_avg_sq"]) == pytest.approx(0.2)
    assert float(shard.main) == pytest.approx(3.0 * (1 - 0.001) - 0.01 * 2 / 2)
    assert float(shard.weight) == pytest.approx(2.9870, abs=2**-7)
    assert float(shard.weight) == float(shard.main.to(torch.bfloat16))


def test_float32_moments_give_torchs_update_to_the_last_bit():
    optimizer, shards = made([1000, 7])
    theirs = [shard.main.clone().requires_grad_() for shard in shards]
    torchs = torch.optim.AdamW(theirs, **GROUP)
    for step in range(4):
        for shard, parameter in zip(shards, theirs, strict=True):
            shard.grad.copy_(torch.randn(len(shard.grad)) * 10.0**-step)
            parameter.grad = shard.grad * 0.3
        optimizer.update(shards, 0.3)
        torchs.step()
    for shard, parameter in zip(shards, theirs, strict=True):
        assert torch.equal(shard.main, parameter)
        for key in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(optimizer.state[shard.main][key], torchs.state[parameter][key])


def test_what_is_clipped_is_the_mean_gradient_of_all_parameters_together():
    """Sums of 10 tokens' gradients, (30, 40) and 120: means of norm 13, clipped to 1.3."""
    mains = [torch.tensor([1.0, -2.0]), torch.tensor([3.0])]
    sums = [torch.tensor([30.0, 40.0]), torch.tensor([120.0])]
    options = GROUP | {"eps": 1.0}  # so that the update shows the gradient's scale
    theirs = [main.clone().requires_grad_() for main in mains]
    for parameter, gradient in zip(theirs, sums, strict=True):
        parameter.grad = gradient / 10
    assert torch.nn.utils.clip_grad_norm_(theirs, 1.3) == 13
    torch.optim.AdamW(theirs, **options).step()
    shards = [
        adam.ParameterShard(main, total, None) for main, total in zip(mains, sums, strict=True)
    ]
    adamw = adam.ShardedAdamW([{"params": mains} | options], shards)
    part = SimpleNamespace(optimizer=adamw, grad_scaler=None)
    whole = SimpleNamespace(
        chained_optimizers=[part], model_chunks=[], config=SimpleNamespace(clip_grad=1.3)
    )
    found = adam.Gradients([shards], [torch.tensor(30.0**2 + 40.0**2 + 120.0**2)])
    assert adam.update(whole, found, 1 / 10) == adam.UpdateResult(13.0, True)
    moments = torch.cat([adamw.state[main]["exp_avg"] for main in mains])
    torch.testing.assert_close(moments, torch.tensor([0.03, 0.04, 0.12]))  # a tenth of (0.3, ...)
    for main, parameter in zip(mains, theirs, strict=True):
        torch.testing.assert_close(main, parameter.detach(), rtol=0, atol=1e-7)


def test_rounding_is_to_a_neighbour_and_right_in_the_mean():
    count = 100_000
    value = 1 + 2**-7 * 0.3  # bfloat16 has 1 and 1 + 2**-7
    for sign in (1, -1):
        values = torch.full((count,), sign * value)
        results = adam.round_to_bfloat16(values, adam.noise(7, count) & 0xFFFF).float()
        assert set(results.abs().tolist()) == {1.0, 1 + 2**-7}
        share = float((results.abs() > 1).float().mean())
        assert share == pytest.approx(0.3, abs=5 * (0.21 / count) ** 0.5)
    exact = torch.tensor([0.0, 1.0, -0.15625, 2.0**-130])
    assert torch.equal(adam.round_to_bfloat16(exact, torch.tensor([0xFFFF] * 4)).float(), exact)


def test_the_draws_of_rounding_differ_from_update_to_update_and_parameter_to_parameter():
    shards = [
        adam.ParameterShard(torch.zeros(512), torch.full((512,), 1 / 3), None) for _ in range(2)
    ]
    groups = [{"params": [shard.main for shard in shards]} | GROUP]
    optimizer = adam.ShardedAdamW(groups, shards, moments=torch.bfloat16)
    drawn = []
    for _ in range(2):
        optimizer.update(shards, 1.0)
        for shard in shards:
            drawn.append(optimizer.state[shard.main]["exp_avg"].clone())
            optimizer.state[shard.main]["exp_avg"].zero_()
    assert all(len(moments.unique()) == 2 for moments in drawn)  # 1/30 lies between two numbers
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(drawn, 2))


def test_a_bfloat16_second_moment_falls_as_the_float32_one_does():
    """Rounded to the nearest it would stay at 1: a step takes away only 1/1000 of it."""
    shard = adam.ParameterShard(torch.zeros(20_000), torch.zeros(20_000), None)
    groups = [{"params": [shard.main]} | GROUP | {"betas": (0.9, 0.999)}]
    optimizer = adam.ShardedAdamW(groups, [shard], moments=torch.bfloat16)
    second = optimizer.state[shard.main]["exp_avg_sq"].fill_(1.0)
    assert second.dtype is torch.bfloat16
    assert (second.float() * 0.999).to(torch.bfloat16).eq(1).all()
    for _ in range(100):
        optimizer.update([shard], 1.0)
    assert float(second.float().mean()) == pytest.approx(0.999**100, abs=1e-3)


@pytest.mark.parametrize("weights", [None, torch.bfloat16])
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
def test_passing_through_the_device_in_pieces_changes_no_bit(monkeypatch, moments, weights):
    monkeypatch.setattr(adam, "PIECE", 64)
    results = []
    for offload in (0.0, 0.5, 1.0):
        optimizer, shards = made([1000, 200, 64, 8], weights, moments=moments, offload=offload)
        assert sum(len(main) for main in optimizer._far) == {0.0: 0, 0.5: 272, 1.0: 1272}[offload]
        for _ in range(3):
            optimizer.update(shards, 0.5)
        states = [optimizer.state[shard.main] for shard in shards]
        results.append(
            [[*shard, *state.values()] for shard, state in zip(shards, states, strict=True)]
        )
    for other in results[1:]:
        for mine, theirs in zip(results[0], other, strict=True):
            assert all(
                a is b is None or torch.equal(a, b) for a, b in zip(mine, theirs, strict=True)
            )


HALF = {"moments": "bfloat16", "offload": 0.5}
SCALED = {"megatron": {"initial_loss_scale": 4.0, "loss_scale_window": 3}}
"""Doubled after the third step."""


@pytest.mark.parametrize(
    ("dtype", "grid", "optimizer"),
    [("bfloat16", "dp2", HALF), ("float32", "tp2", HALF), ("float16", "dp2", SCALED)],
)
def test_a_resume_is_bitwise(ranks, folder, tmp_path, dtype, grid, optimizer):
    """With bfloat16 moments, and going on with the loss scale of float16."""
    settings = {"dtype": dtype, "optimizer": optimizer}
    pool = opened(ranks, folder, grid, **settings)
    before = pool.train(**BATCH, num_steps=2)[0]
    pool.save(folder=tmp_path)
    straight, weights = pool.train(**BATCH, num_steps=2)[0], pool.weights()[0]
    opened(ranks, folder, grid, **settings)
    assert pool.load(folder=tmp_path) == [2, 2]
    assert pool.train(**BATCH, num_steps=2)[0] == straight
    assert equal(pool.weights()[0], weights)
    if optimizer is HALF:
        assert pool.moment_types() == [{"torch.bfloat16"}] * 2
    else:
        assert (before["loss_scale"], straight["loss_scale"]) == (4.0, 8.0)


def in_float16(ranks, folder, grid, scale):
    optimizer = {"megatron": {"initial_loss_scale": scale}}
    return opened(ranks, folder, grid, dtype="float16", optimizer=optimizer)


@pytest.mark.parametrize("grid", ["dp2", "pp2"])
def test_float16_has_the_gradient_of_float32_whatever_the_loss_scale(ranks, folder, grid):
    expected = opened(ranks, folder, grid).train(**BATCH)[0]
    assert "loss_scale" not in expected
    for scale in (1.0, 2.0**10):
        metrics = in_float16(ranks, folder, grid, scale).train(**BATCH)
        assert metrics[0] == metrics[1]
        assert metrics[0]["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.01)
        assert (metrics[0]["skipped"], metrics[0]["loss_scale"]) == (0.0, scale)


def test_a_loss_scale_that_overflows_is_halved_and_the_update_skipped(ranks, folder):
    pool = in_float16(ranks, folder, "dp2", 2.0**24)
    before = pool.weights()[0]
    metrics = pool.train(**BATCH)[0]
    assert (metrics["skipped"], metrics["loss_scale"]) == (1.0, 2.0**23)
    assert pool.skip() == [None, None]  # it is none of those that end a run
    assert equal(pool.weights()[0], before)
    for _ in range(20):
        metrics = pool.train(**BATCH)[0]
        if not metrics["skipped"]:
            break
    assert 1.0 <= metrics["loss_scale"] < 2.0**23
    assert not equal(pool.weights()[0], before)
