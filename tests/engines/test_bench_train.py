"""`relax-hpc bench train`, on a model small enough for a CPU."""

import json

import pytest
import torch
from typer.testing import CliRunner

from relax_hpc.cli.bench import train
from relax_hpc.cli.bench.shapes import SHAPES, grid_of, model_folder
from relax_hpc.cli.bench.train import ReplicaWork, lengths_of
from relax_hpc.cli.main import app
from relax_hpc.errors import ConfigError
from relax_hpc.trainer.megatron.costs import training_flops
from relax_hpc.trainer.models.architecture import Architecture
from relax_hpc.trainer.models.registry import read_architecture

pytestmark = pytest.mark.long


def test_operations_are_those_counted_by_hand():
    """One layer of width 4: queries 2 x 3, keys 1 x 3, feed-forward 5, vocabulary 7."""
    shape = Architecture("qwen3", 1, 4, 5, 2, 1, 3, 7, 99, 1e-6, 1e4, False)
    weights = 4 * 6 + 2 * (4 * 3) + 6 * 4 + 3 * (4 * 5) + 4 * 7
    # Scores and values: 2 products of 2 x 3 x length^2 operations a head, half of them seen.
    attention = 3 * 2 * 2 * (2 * 3) * (2**2 + 4**2) / 2
    assert training_flops(shape, [2, 4]) == 6 * weights * 6 + attention


def test_of_experts_those_count_that_a_token_passes_through(tmp_path):
    shape = read_architecture(model_folder("qwen3-30b-a3b", tmp_path))
    layer = 2048 * (2 * 32 * 128 + 2 * 4 * 128 + 3 * 8 * 768)
    weights = 48 * layer + 151936 * 2048  # 3.03e9
    assert training_flops(shape, [1]) == 6 * weights + 6 * 48 * 32 * 128


def test_mixes_fill_the_micro_batch_and_change_with_the_seed():
    work = ReplicaWork(tokens=4096, documents="mix")
    mixes = [lengths_of(work, seed) for seed in range(20)]
    assert all(sum(mix) == 4096 and min(mix) >= 16 for mix in mixes)
    assert len({tuple(mix) for mix in mixes}) == 20
    assert lengths_of(ReplicaWork(tokens=4096), 0) == [4096]


def test_two_ranks_are_measured_and_written_down(tmp_path):
    file = tmp_path / "figures.json"
    result = CliRunner().invoke(
        app,
        ["bench", "train", "--shape", "tiny", "--tokens", "96", "--documents", "mix", "--dp", "2",
         "--steps", "1", "--json", str(file), "--profile", str(tmp_path / "table.txt")],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    (row,) = json.loads(file.read_text())["rows"]
    assert (row["grid"], row["tokens"], row["documents"]) == ("dp2 tp1", 96, "mix")
    assert row["tokens_per_s"] == pytest.approx(2 * row["tokens_per_s_per_gpu"])
    assert "Self CPU" in (tmp_path / "table.txt").read_text()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Weights of the shape `tiny`."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    shape = {k: v for k, v in SHAPES["tiny"].items() if k not in ("model_type", "hidden_act")}
    Qwen3ForCausalLM(Qwen3Config(**shape)).float().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def pair(ranks):
    return ranks[2]


def test_every_grid_finds_the_same_loss_in_the_same_batch(pair, model, tmp_path):
    """Two micro-batches a step, three steps; the loss is the last one's."""
    work = ReplicaWork(96, "mix", micro_batches=2)
    shape = read_architecture(model)
    flops = sum(training_flops(shape, lengths_of(work, seed)) for seed in (4, 5))
    overrides = (
        "actor.optimizer.lr=1e-3", "actor.optimizer.warmup_steps=0",
        "algorithm.entropy.coefficient=0.01",
    )  # fmt: skip
    found = {}
    for grid in (grid_of(tp=2), grid_of(cp=2), grid_of(pp=2)):
        task = train.task_of(str(model), [work], grid, tmp_path, steps=1, overrides=overrides)
        first, second = pair.bench(task=task, work=work)
        assert first.loss == second.loss != 0
        found[first.grid] = first.loss
        # The ranks of a replica share its tokens and its operations.
        assert first.tokens_per_s == pytest.approx(2 * first.tokens_per_s_per_gpu)
        assert first.mfu == pytest.approx(flops / (2 * 96) * first.tokens_per_s_per_gpu / 989e12)
    assert list(found) == ["dp1 tp2", "dp1 tp1 cp2", "dp1 tp1 pp2"]
    assert found == pytest.approx(dict.fromkeys(found, found["dp1 tp2"]), rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(([1], ["all"], "none", 1), "--documents all"), (([1], ["one"], "some", 1), "--recompute")],
)
def test_unknown_words_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        train.works(*arguments)


def test_an_unknown_shape_names_those_there_are():
    with pytest.raises(ConfigError, match="qwen3-4b"):
        train.measure("gpt", [ReplicaWork(16)], {})


def test_interleaved_chunks_want_a_multiple_of_the_stages():
    grid = grid_of(pp=2, vpp=2)
    with pytest.raises(ConfigError, match=r"--micro-batches 3: dp1 tp1 pp2 vpp2 .* use 4"):
        train.measure("tiny", [ReplicaWork(16, micro_batches=3)], grid)


def test_a_grid_that_cannot_be_is_refused_before_anything_starts():
    with pytest.raises(ConfigError, match="virtual_pipeline = 2: needs"):
        train.measure("tiny", [ReplicaWork(16)], grid_of(vpp=2))
