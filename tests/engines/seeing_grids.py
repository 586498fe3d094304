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

    `opened` makes a trainer that has the weights of the folder, on its pool.
    """
    pool = opened()
    batch = {"rows": reference.rows, "advantages": reference.advantages}
    logprobs = collect(pool.call(worker.logprobs, rows=reference.rows))
    for mine, theirs in zip(logprobs, reference.logprobs, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)
    largest = {}
    for name, theirs in reference.gradients[0].items():
        largest[_part_of(name)] = max(largest.get(_part_of(name), 0), np.abs(theirs).max())
    for found in pool.call(worker.gradients, **batch):
        assert set(found) == set(reference.gradients[0])
        for name, theirs in reference.gradients[0].items():
            scale = largest[_part_of(name)]
            assert np.abs(found[name] - theirs).max() < 3e-6 * scale, name
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
