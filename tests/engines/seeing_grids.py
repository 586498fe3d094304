"""What every grid of a model that sees is compared with."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from seen_rows import logprobs_of, make
from seen_rows import reference as hugging_face
from trainers import FULL, assert_close, assert_updated, collect, equal, opened

from relax_hpc.trainer.checkpoints import convert as conversion
from relax_hpc.trainer.checkpoints.saving import save_hf
from relax_hpc.trainer.models.hf_files import SINGLE

WAYS = {
    "recomputed": {"transformer": FULL},
    "overlapped": {"optimizer": {"ddp": {"overlap_grad_reduce": True, "bucket_size": 40_000}}},
    "chunks of 20": {"advanced": {"tower_patches": 20}},
    "chunks of 60": {"advanced": {"tower_patches": 60}},
    "in host memory": {"advanced": {"features_gib": 0}},
}


def seen(folder, batch, budget=90, **how):
    """What Hugging Face makes of a batch with a model of this kind, which lies in the folder."""
    torch.set_num_threads(1)
    found = hugging_face(folder, make(folder, **how), *batch)
    found.budget = budget
    return found


def open_grid(ranks, reference, grid, *, frozen=(), transformer=()):
    """A trainer on a grid, and in ways behind its name."""
    name, *ways = grid.split(", ")
    tables = {"optimizer": {"weight_decay": 0.1}, "transformer": dict(transformer), "advanced": {}}
    for way in ways:
        for table, values in WAYS[way].items():
            tables[table] |= values
    tables["actor"] = {"frozen": [*frozen], "advanced": tables.pop("advanced")}
    return opened(ranks, reference.folder, name, budget=reference.budget, **tables)


def long(*grids):
    return [pytest.param(grid, marks=pytest.mark.long) for grid in grids]


def frozen_cases(short, *others):
    """(grid, parts) with ids, of which the others take long."""
    return [
        pytest.param(grid, parts, id=f"{grid}-{'+'.join(parts)}", marks=marks)
        for cases, marks in ((short, ()), (others, pytest.mark.long))
        for grid, parts in cases
    ]


def assert_equal_to(ranks, reference, grid):
    """Logprobs, gradients, and the weights after two updates are Hugging Face's with AdamW.

    Gradients are compared with those in float64, of which Hugging Face's in float32 are as far
    away: of the largest of a part, up to 1.6e-6, ours 1.4e-6. Logprobs are 1.2e-6 and 1.0e-6 away.
    """
    pool = open_grid(ranks, reference, grid)
    logprobs = collect(pool.logprobs(rows=reference.rows))
    for known in (reference, reference.exact):
        assert_close(logprobs, known.logprobs, atol=2e-6, rtol=0)
    largest = {}
    for name, theirs in reference.exact.gradients.items():
        largest[_part_of(name)] = max(largest.get(_part_of(name), 0), np.abs(theirs).max())
    for found in pool.gradients(**reference.batch):
        assert set(found) == set(reference.gradients[0])
        for name, theirs in reference.exact.gradients.items():
            away = np.abs(found[name] - theirs).max()
            assert away < min(2e-6 * largest[_part_of(name)], 3e-7), name
    pool = open_grid(ranks, reference, grid)
    for step in range(2):
        metrics = pool.train(**reference.batch)
        assert metrics[0]["grad_norm"] == pytest.approx(reference.norms[step], rel=1e-5)
        for weights in pool.weights():
            assert_updated(weights, reference.steps[step], reference, 0, step)


def _part_of(name):
    return next((part for part in ("visual", "audio_tower") if part in name), "language")


def assert_exported(ranks, reference, source, grids, tmp_path, model_class):
    """Weights go out as they came in, bitwise; after a step, transformers computes of the export
    what the trainer does. `source`: the folder of the weights, in the hub's layout.
    """
    given = load_file(source / SINGLE)
    for grid in grids:
        for number, found in enumerate(open_grid(ranks, reference, grid).weights()):
            out = tmp_path / f"{grid}-{number}"
            tensors = ((name, torch.from_numpy(tensor)) for name, tensor in found.items())
            save_hf(out, tensors, source, write=True)
            assert equal(load_file(out / SINGLE), given)
    pool = open_grid(ranks, reference, "one")
    pool.train(**reference.batch)
    [trained] = pool.logprobs(rows=reference.rows)
    pool.save(folder=tmp_path / "step")
    conversion.to_hf(tmp_path / "step", source, tmp_path / "hf")
    model = model_class.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    with torch.no_grad():
        for number, row in enumerate(reference.rows):
            theirs = logprobs_of(model, row, reference.folder).numpy()
            assert np.abs(trained[number] - theirs).max() < 1e-5
            assert np.abs(trained[number] - reference.logprobs[number]).max() > 1e-3
    conversion.to_megatron(source, tmp_path / "core")
    conversion.to_hf(tmp_path / "core", source, tmp_path / "same")
    assert equal(load_file(tmp_path / "same" / SINGLE), given)


def assert_frozen(ranks, reference, grid, parts, part_of):
    """What is frozen does not move by a bit, what learns has the gradient it had."""
    pool = open_grid(ranks, reference, grid, frozen=parts)
    before, held = pool.weights()[0], pool.held()
    metrics = pool.train(**reference.batch)
    gradients = reference.gradients[0]
    learning = {name: g for name, g in gradients.items() if part_of(name) not in parts}
    assert 0 < len(learning) < len(gradients)
    norm = np.sqrt(sum((gradient**2).sum() for gradient in learning.values()))
    assert metrics[0]["grad_norm"] == pytest.approx(norm, rel=1e-5)
    still = {name: tensor for name, tensor in before.items() if name not in learning}
    expected = {name: reference.steps[0][name] for name in learning}
    for after in pool.weights():
        assert equal({name: after[name] for name in still}, still)
        assert_updated(after, expected, reference)
    pool.train(**reference.batch)
    if pool.size == 1:
        assert held[0][1] == sum(gradient.size for gradient in learning.values())


def seeing_part(name):
    """The part of a tensor of a model that sees."""
    if not name.startswith("model.visual."):
        return "language"
    mergers = "model.visual.merger.", "model.visual.deepstack_merger_list."
    return "vision_projection" if name.startswith(mergers) else "vision"
