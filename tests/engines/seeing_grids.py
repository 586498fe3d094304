"""What every grid of a model that sees is compared with."""

import json

import numpy as np
import pytest
import seeing_worker as worker
from megatron_reference import clear_gradient, collect

from relax_hpc.errors import ConfigError
from relax_hpc.models.registry import read_architecture

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def long(*grids):
    return [pytest.param(grid, marks=pytest.mark.long) for grid in grids]


def assert_equal_to(reference, opened):
    """Logprobs, gradients, and the weights after two updates are Hugging Face's with AdamW.

    Gradients are compared with those in float64, of which Hugging Face's in float32 are as far
    away: of the largest of a part, up to 1.6e-6, ours 1.4e-6. Logprobs are 1.2e-6 and 1.0e-6 away.

    `opened` makes a trainer that has the weights of the folder, on its pool.
    """
    pool = opened()
    batch = {"rows": reference.rows, "advantages": reference.advantages}
    logprobs = collect(pool.call(worker.logprobs, rows=reference.rows))
    for mine, theirs in zip(logprobs, reference.logprobs, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=2e-6)
    for mine, exact in zip(logprobs, reference.exact.logprobs, strict=True):
        np.testing.assert_allclose(mine, exact, rtol=0, atol=2e-6)
    largest = {}
    for name, theirs in reference.exact.gradients.items():
        largest[_part_of(name)] = max(largest.get(_part_of(name), 0), np.abs(theirs).max())
    for found in pool.call(worker.gradients, **batch):
        assert set(found) == set(reference.gradients[0])
        for name, theirs in reference.exact.gradients.items():
            away = np.abs(found[name] - theirs).max()
            assert away < min(2e-6 * largest[_part_of(name)], 3e-7), name
    pool = opened()
    for step in range(2):
        metrics = pool.call(worker.train, **batch)
        assert metrics[0]["grad_norm"] == pytest.approx(reference.norms[step], rel=1e-5)
        for weights in pool.call(worker.weights):
            for name, theirs in reference.steps[step].items():
                clear = clear_gradient(reference, name) & clear_gradient(reference, name, step)
                worst = np.abs(weights[name] - theirs)[clear]
                assert worst.size == 0 or worst.max() < 1e-5, (name, step)


def assert_alike_when_recomputed(reference, opened):
    """An update with all layers computed again is the same, bitwise.

    `opened` makes a trainer with these settings of Megatron's layers.
    """
    found = []
    for transformer in ({}, FULL):
        pool = opened(transformer=transformer)
        metrics = pool.call(worker.train, rows=reference.rows, advantages=reference.advantages)
        found.append((metrics[0], pool.call(worker.weights)))
    (plain, expected), (recomputed, weights) = found
    assert plain == recomputed
    for mine, theirs in zip(weights, expected, strict=True):
        assert all(np.array_equal(mine[name], theirs[name]) for name in theirs)


def assert_frozen(reference, pool, is_frozen):
    """What is frozen does not move by a bit, what learns has the gradient it had.

    Args:
        is_frozen: whether the tensor of a name is.

    Returns:
        Elements that each rank's optimizer has moments of, and those that learn.
    """
    (before, *_) = pool.call(worker.weights)
    states = pool.call(worker.optimizer_elements)
    batch = {"rows": reference.rows, "advantages": reference.advantages}
    metrics = pool.call(worker.train, **batch)
    learning = {n: g for n, g in reference.gradients[0].items() if not is_frozen(n)}
    assert 0 < len(learning) < len(reference.gradients[0])
    norm = np.sqrt(sum((gradient**2).sum() for gradient in learning.values()))
    assert metrics[0]["grad_norm"] == pytest.approx(norm, rel=1e-5)
    for after in pool.call(worker.weights):
        for name, theirs in reference.steps[0].items():
            if name not in learning:
                assert np.array_equal(after[name], before[name]), name
                continue
            clear = clear_gradient(reference, name)
            worst = np.abs(after[name] - theirs)[clear]
            assert worst.size == 0 or worst.max() < 1e-5, name
    pool.call(worker.train, **batch)
    return states, sum(gradient.size for gradient in learning.values())


def sees_in(name, parts):
    """Whether a tensor of a model that sees is in one of these parts."""
    part = "language"
    if name.startswith("model.visual."):
        mergers = "model.visual.merger.", "model.visual.deepstack_merger_list."
        part = "vision_projection" if name.startswith(mergers) else "vision"
    return part in parts


def assert_scores(reference, pool):
    """Weights that are kept, and a model that only scores, give what Hugging Face gives."""
    rows = reference.rows
    first = pool.call(worker.logprobs, rows=rows)
    pool.call(worker.keep)
    pool.call(worker.train, rows=rows, advantages=reference.advantages)
    trained = pool.call(worker.logprobs, rows=rows)
    again = pool.call(worker.kept_logprobs, rows=rows)
    for mine, kept, then in zip(first, again, trained, strict=True):
        assert all(np.array_equal(kept[row], mine[row]) for row in mine)
        assert not any(np.allclose(then[row], mine[row], rtol=0, atol=1e-4) for row in mine)
    last = len(rows) - 1
    micro_batches = [[3, 0, last], [1, 2], [], list(range(4, last))]
    pool.call(worker.open_scorer)
    found = pool.call(worker.scorer_logprobs, rows=rows, micro_batches=micro_batches)
    for of_rank in found:
        for mine, theirs in zip(of_rank, reference.logprobs, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=0, atol=2e-6)


def _part_of(name):
    return next((part for part in ("visual", "audio_tower") if part in name), "language")


def assert_refused(folder, tmp_path, part, key, value, message):
    """A model like that of `folder`, but for one field, is refused in one line that names it."""
    record = json.loads((folder / "config.json").read_text())
    record[part][key] = value
    (tmp_path / "config.json").write_text(json.dumps(record))
    with pytest.raises(ConfigError) as refused:
        read_architecture(tmp_path)
    assert message in str(refused.value) and "\n" not in str(refused.value)
