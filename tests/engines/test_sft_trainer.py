"""Supervised fine-tuning against Hugging Face's own loss, in several layouts and packings."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from megatron_reference import dense
from trainers import VOCAB, assert_close, layout_of, size_of

from relax_hpc.config.run import SftRunConfig
from relax_hpc.data.documents import Document


def documents(num=9, seed=0):
    """Random ones of several turns; of one in three nearly nothing is trained on."""
    rng = np.random.default_rng(seed)
    made = []
    for line in range(num):
        length = int(rng.integers(4, 24))
        mask = rng.random(length) < (0.1 if line % 3 == 0 else 0.6)
        mask[-1] = True
        mask[0] = line % 2  # says nothing: no token predicts the first
        token_ids = rng.integers(0, VOCAB, length).astype(np.int32)
        made.append(Document(line, token_ids, mask.astype(np.uint8), False))
    return made


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """A Qwen3, and transformers' cross-entropy with labels that are -100 where not trained on."""
    folder = tmp_path_factory.mktemp("model")
    model = dense(folder)
    batch = documents()
    total = sum(document.num_trained for document in batch)
    losses = []
    for document in batch:
        ids = torch.from_numpy(document.token_ids.astype(np.int64))[None]
        trained = torch.from_numpy(document.loss_mask > 0)
        labels = torch.where(trained, ids, -100)
        output = model(input_ids=ids, labels=labels, num_items_in_batch=total)
        losses.append(output.loss)
    sum(losses).backward()
    return SimpleNamespace(
        folder=folder,
        batch=batch,
        loss=float(sum(losses).detach()),
        gradients={name: p.grad.numpy() for name, p in model.named_parameters()},
    )


def job(folder, grid, budget=48):
    tree = {
        "name": "test", "model": {"path": str(folder), "dtype": "float32"},
        "sft": {"train": "unused", "batch_size": 9, "num_steps": 10},
        "actor": {
            "tokens_per_micro_batch": budget, "layout": layout_of(grid),
            "optimizer": {"lr": 1e-3, "clip_grad": 0.0},
        },
    }  # fmt: skip
    return SftRunConfig.model_validate(tree)


def open_grid(ranks, folder, grid, budget=48):
    ranks[size_of(grid)].open_trainer(config=job(folder, grid, budget))
    return ranks[size_of(grid)]


each_grid = pytest.mark.parametrize("grid", ["one", "tp2", "pp2", "dp2"])


@each_grid
def test_loss_and_gradient_are_those_of_transformers(ranks, reference, grid):
    pool = open_grid(ranks, reference.folder, grid)
    for found in pool.heldout_loss(documents=reference.batch):
        assert found.loss == pytest.approx(reference.loss, abs=1e-5)
    found = {}
    for part in pool.gradients_of_documents(documents=reference.batch):
        found |= part
    assert_close(found, reference.gradients)


@each_grid
def test_packing_and_layout_change_neither_the_loss_nor_what_is_learned(ranks, reference, grid):
    afterwards, counts = [], []
    for budget in (24, 48, 400):
        pool = open_grid(ranks, reference.folder, grid, budget)
        told = pool.fine_tune(documents=reference.batch)
        for _, metrics in told:
            assert metrics["loss"] == pytest.approx(reference.loss, abs=1e-5)
        counts.append(told[0][0])
        afterwards += [m.loss for m in pool.heldout_loss(documents=documents(9, 1))]
    assert counts[0] > counts[1] > counts[2] == 1
    assert afterwards == pytest.approx([afterwards[0]] * len(afterwards), abs=1e-5)
