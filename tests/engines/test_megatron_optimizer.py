"""Adam on shards: its numbers, moments in bfloat16, what is kept in host memory."""

import itertools
from types import SimpleNamespace

import megatron_worker as worker
import numpy as np
import pytest
import torch
from megatron_worker import VOCAB, job, trajectories

from relax_hpc.engines.megatron.optimizer import adam
from relax_hpc.engines.megatron.optimizer.adam import Shard, ShardedAdamW, noise, rounded
from relax_hpc.engines.megatron.optimizer.distributed_adam import Gradients, Update, update

GROUP = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


@pytest.fixture(scope="module")
def ranks(ranks):
    return ranks[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, intermediate_size=96, max_position_embeddings=256,
        tie_word_embeddings=False, initializer_range=0.08,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("qwen3")
    Qwen3ForCausalLM(config).float().save_pretrained(folder)
    return folder


def made(sizes, weights=None, **options):
    """An optimizer of random shards, and those."""
    torch.manual_seed(0)
    shards = [
        Shard(torch.randn(n), torch.randn(n), torch.zeros(n, dtype=weights) if weights else None)
        for n in sizes
    ]
    groups = [{"params": [shard.main for shard in shards]} | GROUP]
    return ShardedAdamW(groups, shards, **options), shards


def test_the_first_step_is_the_hand_worked_one():
    optimizer, _ = made([1])
    shard = Shard(torch.tensor([3.0]), torch.tensor([8.0]), torch.zeros(1, dtype=torch.bfloat16))
    optimizer = ShardedAdamW([{"params": [shard.main]} | GROUP], [shard])
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
    shards = [Shard(main, total, None) for main, total in zip(mains, sums, strict=True)]
    adamw = ShardedAdamW([{"params": mains} | options], shards)
    part = SimpleNamespace(optimizer=adamw, grad_scaler=None)
    whole = SimpleNamespace(
        chained_optimizers=[part], model_chunks=[], config=SimpleNamespace(clip_grad=1.3)
    )
    found = Gradients([shards], [torch.tensor(30.0**2 + 40.0**2 + 120.0**2)])
    assert update(whole, found, 1 / 10) == Update(13.0, True)
    moments = torch.cat([adamw.state[main]["exp_avg"] for main in mains])
    torch.testing.assert_close(moments, torch.tensor([0.03, 0.04, 0.12]))  # a tenth of (0.3, ...)
    for main, parameter in zip(mains, theirs, strict=True):
        torch.testing.assert_close(main, parameter.detach(), rtol=0, atol=1e-7)


def test_rounding_is_to_a_neighbour_and_right_in_the_mean():
    count = 100_000
    value = 1 + 2**-7 * 0.3  # bfloat16 has 1 and 1 + 2**-7
    for sign in (1, -1):
        values = torch.full((count,), sign * value)
        results = rounded(values, noise(7, count) & 0xFFFF).float()
        assert set(results.abs().tolist()) == {1.0, 1 + 2**-7}
        share = float((results.abs() > 1).float().mean())
        assert share == pytest.approx(0.3, abs=5 * (0.21 / count) ** 0.5)
    exact = torch.tensor([0.0, 1.0, -0.15625, 2.0**-130])
    assert torch.equal(rounded(exact, torch.tensor([0xFFFF] * 4)).float(), exact)


def test_noise_is_even_in_every_bit_and_new_in_every_step():
    bits = torch.stack([noise(1, 20_000) >> place & 1 for place in range(32)]).double()
    assert (bits.mean(1) - 0.5).abs().max() < 5 * 0.5 / 20_000**0.5
    assert (torch.corrcoef(bits) - torch.eye(32)).abs().max() < 0.05
    assert (noise(1, 1000) == noise(0x9E3779B1 & 0x7FFFFFFF, 1000)).sum() < 3


def test_the_draws_of_rounding_differ_from_update_to_update_and_parameter_to_parameter():
    shards = [Shard(torch.zeros(512), torch.full((512,), 1 / 3), None) for _ in range(2)]
    groups = [{"params": [shard.main for shard in shards]} | GROUP]
    optimizer = ShardedAdamW(groups, shards, moments=torch.bfloat16)
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
    shard = Shard(torch.zeros(20_000), torch.zeros(20_000), None)
    groups = [{"params": [shard.main]} | GROUP | {"betas": (0.9, 0.999)}]
    optimizer = ShardedAdamW(groups, [shard], moments=torch.bfloat16)
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


@pytest.mark.parametrize(("dtype", "layout"), [("bfloat16", {"dp": 2}), ("float32", {"tp": 2})])
def test_offloading_trains_to_the_same_weights_bitwise(ranks, folder, dtype, layout):
    rows, advantages = trajectories(8)
    batch = {"rows": rows, "advantages": advantages, "num_steps": 3}
    weights = []
    for offload in (0.0, 0.4, 1.0):
        options = {"optimizer": {"offload": offload, "weight_decay": 0.1}}
        ranks.call(worker.open_trainer, config=job(folder, **layout, dtype=dtype, **options))
        ranks.call(worker.train, **batch)
        weights.append(ranks.call(worker.weights)[0])
    for other in weights[1:]:
        assert all(np.array_equal(weights[0][name], other[name]) for name in other)


@pytest.mark.parametrize(("dtype", "layout"), [("bfloat16", {"dp": 2}), ("float32", {"tp": 2})])
def test_a_resume_with_bfloat16_moments_is_bitwise(ranks, folder, tmp_path, dtype, layout):
    rows, advantages = trajectories(8)
    batch = {"rows": rows, "advantages": advantages, "num_steps": 2}
    options = {"optimizer": {"moments": "bfloat16", "offload": 0.5}}
    config = job(folder, **layout, dtype=dtype, **options)
    ranks.call(worker.open_trainer, config=config)
    ranks.call(worker.train, **batch)
    ranks.call(worker.save, folder=tmp_path)
    ranks.call(worker.train, **batch)
    straight = ranks.call(worker.weights)[0]
    assert {kind for rank in ranks.call(worker.moment_types) for kind in rank} == {"torch.bfloat16"}
    ranks.call(worker.open_trainer, config=config)
    assert ranks.call(worker.load, folder=tmp_path) == [2, 2]
    assert {kind for rank in ranks.call(worker.moment_types) for kind in rank} == {"torch.bfloat16"}
    ranks.call(worker.train, **batch)
    resumed = ranks.call(worker.weights)[0]
    assert all(np.array_equal(straight[name], resumed[name]) for name in straight)


def test_bfloat16_moments_train_like_float32_ones(ranks, folder):
    rows, _ = trajectories(8)
    batch = {"rows": rows, "advantages": np.ones(8, np.float32), "num_steps": 8}
    gains = []
    for moments in ("float32", "bfloat16"):
        options = {"optimizer": {"moments": moments, "lr": 3e-3}}
        ranks.call(worker.open_trainer, config=job(folder, dp=2, dtype="bfloat16", **options))
        ranks.call(worker.train, **batch)
        found = [x.mean() for rank in ranks.call(worker.logprobs, rows=rows) for x in rank.values()]
        gains.append(np.mean(found))
    assert gains[1] == pytest.approx(gains[0], abs=0.02)
    assert gains[0] > -3.5


def in_float16(folder, layout, **optimizer):
    options = {"lr": 1e-3, "megatron": optimizer.pop("megatron", {})} | optimizer
    return job(folder, dtype="float16", layout=layout, actor={"optimizer": options})


@pytest.mark.parametrize("layout", [{"data_parallel": 2}, {"pipeline_parallel": 2}])
def test_float16_has_the_gradient_of_float32_whatever_the_loss_scale(ranks, folder, layout):
    rows, advantages = trajectories(8)
    batch = {"rows": rows, "advantages": advantages}
    ranks.call(worker.open_trainer, config=job(folder, layout=layout))
    expected = ranks.call(worker.train, **batch)[0]
    assert "loss_scale" not in expected
    for scale in (1.0, 2.0**10):
        config = in_float16(folder, layout, megatron={"initial_loss_scale": scale})
        ranks.call(worker.open_trainer, config=config)
        metrics = ranks.call(worker.train, **batch)
        assert metrics[0] == metrics[1]
        assert metrics[0]["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.01)
        assert (metrics[0]["skipped"], metrics[0]["loss_scale"]) == (0.0, scale)


def test_a_loss_scale_that_overflows_is_halved_and_the_update_skipped(ranks, folder):
    rows, advantages = trajectories(8)
    batch = {"rows": rows, "advantages": advantages}
    config = in_float16(folder, {"data_parallel": 2}, megatron={"initial_loss_scale": 2.0**24})
    ranks.call(worker.open_trainer, config=config)
    before = ranks.call(worker.weights)[0]
    metrics = ranks.call(worker.train, **batch)[0]
    assert (metrics["skipped"], metrics["loss_scale"]) == (1.0, 2.0**23)
    after = ranks.call(worker.weights)[0]
    assert all(np.array_equal(before[name], after[name]) for name in before)
    for _ in range(20):
        metrics = ranks.call(worker.train, **batch)[0]
        if not metrics["skipped"]:
            break
    assert 1.0 <= metrics["loss_scale"] < 2.0**23
    after = ranks.call(worker.weights)[0]
    assert any(not np.array_equal(before[name], after[name]) for name in before)


def test_a_float16_resume_is_bitwise_and_goes_on_with_the_loss_scale(ranks, folder, tmp_path):
    rows, advantages = trajectories(8)
    batch = {"rows": rows, "advantages": advantages, "num_steps": 2}
    megatron = {"initial_loss_scale": 4.0, "loss_scale_window": 3}  # doubled after the third
    config = in_float16(folder, {"data_parallel": 2}, megatron=megatron)
    ranks.call(worker.open_trainer, config=config)
    assert ranks.call(worker.train, **batch)[0]["loss_scale"] == 4.0
    ranks.call(worker.save, folder=tmp_path)
    assert ranks.call(worker.train, **batch)[0]["loss_scale"] == 8.0
    straight = ranks.call(worker.weights)[0]
    ranks.call(worker.open_trainer, config=config)
    ranks.call(worker.load, folder=tmp_path)
    assert ranks.call(worker.train, **batch)[0]["loss_scale"] == 8.0
    resumed = ranks.call(worker.weights)[0]
    assert all(np.array_equal(straight[name], resumed[name]) for name in straight)
