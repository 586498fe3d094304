"""What every grid of a model that sees is compared with."""

import json

import numpy as np
import pytest
import seeing_worker as worker
from megatron_reference import clear_gradient, collect

from relax_hpc.errors import ConfigError
from relax_hpc.models.registry import read_architecture


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
