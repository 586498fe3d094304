"""R13: how much of what adapters learn reaches a bfloat16 model: docs/explanation/trainer.md."""

import re
from pathlib import Path

import pytest
import torch

from relax_hpc.config import job_file
from relax_hpc.roles.training.check import check_rate

DOCS = Path(__file__).parents[2] / "docs" / "explanation" / "trainer.md"
UPDATES = (10, 50, 200, 1000)


def lost(lr, updates, rank=32, rows=64, width=2560):
    """|applied change - wanted change| / |wanted change| after updates that all go one way."""
    drawn = torch.Generator().manual_seed(0)
    weight = (torch.randn(rows, width, generator=drawn) * 0.02).bfloat16().float()
    a = (torch.rand(rank, width, generator=drawn) * 2 - 1) / width**0.5  # as it begins
    towards_b = torch.randn(rows, rank, generator=drawn).sign()
    towards_a = torch.randn(rank, width, generator=drawn).sign()
    wanted = (updates * lr * towards_b) @ (a + updates * lr * towards_a)
    applied = (weight + wanted).bfloat16().float() - weight
    return float((applied - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("lr", [1e-5, 1e-4])
def test_the_docs_say_how_much_of_the_first_updates_is_lost_to_rounding(lr):
    row = re.search(rf"\| {lr:.0e} \|(.*)\|".replace("e-0", "e-"), DOCS.read_text(encoding="utf-8"))
    said = [int(cell.strip(" %")) for cell in row[1].split("|")]
    assert said == pytest.approx([100 * lost(lr, updates) for updates in UPDATES], abs=2)


def job(**actor):
    tree = {
        "name": "run", "model": {"path": "m", "dtype": actor.pop("dtype", "bfloat16")},
        "prompts": {"train": "t"}, "schedule": {"num_steps": 9}, "actor": actor,
    }  # fmt: skip
    return job_file.validate(tree, source="test")


@pytest.mark.parametrize(
    ("actor", "is_said"),
    [
        ({"lora": {"rank": 32}, "optimizer": {"lr": 1e-5}}, True),
        ({"lora": {"rank": 32}, "optimizer": {"lr": 1e-4}}, False),
        # alpha / rank counts as much as the learning rate does.
        ({"lora": {"rank": 8, "alpha": 64}, "optimizer": {"lr": 1e-5}}, False),
        ({"lora": {"rank": 64}, "optimizer": {"lr": 6e-5}}, True),
        ({"lora": {"rank": 32}, "optimizer": {"lr": 1e-5}, "dtype": "float32"}, False),
        ({"optimizer": {"lr": 1e-6}}, False),
    ],
)
def test_a_rate_at_which_a_model_hardly_follows_its_adapters_is_said(actor, is_said):
    said = []
    check_rate(job(**actor), said.append)
    assert [line.partition(":")[0] for line in said] == [
        f"actor.optimizer.lr = {actor['optimizer']['lr']:g}"
    ] * is_said
