"""`bench sync` with the embedded engine: what it measures is what was asked for."""

import json

import pytest

from relax_hpc.cli.bench import sync
from relax_hpc.cli.bench.sync import tokens_per_s

pytestmark = pytest.mark.long


def test_tokens_per_second_are_those_between_two_points_of_time():
    seen = [(0.0, 0), (1.0, 50), (2.0, 70), (4.0, 130)]
    assert tokens_per_s(seen, 1.0, 4.0) == pytest.approx(80 / 3)
    assert tokens_per_s(seen, 0.5, 1.5) == pytest.approx(20.0)  # what was seen from then on
    assert tokens_per_s(seen, 3.0, 5.0) == 0.0  # not so far
    assert tokens_per_s([], 0.0, 1.0) == 0.0


def test_every_version_is_timed_and_engines_are_compared_with_themselves(
    checkpoints, tmp_path, capfd
):
    figures = sync.measure(
        str(checkpoints[0]), {}, kind="embedded", updates=3, in_flight=2, every_s=0.5,
        compare_load=True, overrides=["rollout.max_new_tokens=20"],
    )  # fmt: skip
    assert [update.version for update in figures.updates] == [0, 1, 2, 3]
    assert figures.equal and figures.failed == 0
    began = [update.began for update in figures.updates]
    for earlier, later in zip(figures.updates, began[1:], strict=False):
        assert later >= earlier.began + earlier.total + 0.5
        assert 0 < earlier.paused <= earlier.total
    assert figures.tokens_per_s > 0 and figures.undisturbed_tokens_per_s > 0
    ratio = figures.tokens_per_s / figures.undisturbed_tokens_per_s
    lines = sync.show(figures, tmp_path / "sync.json").splitlines()
    [said] = [line for line in lines if line.startswith("engines: ")]
    assert said.endswith(f"{ratio:.3f}")
    kept = json.loads((tmp_path / "sync.json").read_text())
    assert kept["undisturbed_tokens_per_s"] == figures.undisturbed_tokens_per_s
    # Each was told as soon as it was there, so a bench that is cut off has said them.
    told = [line for line in capfd.readouterr().err.splitlines() if line.startswith("version ")]
    assert [line.partition(" (")[0] for line in told] == [
        f"version {u.version}: paused {1e3 * u.paused:.1f} ms, total {1e3 * u.total:.1f} ms"
        for u in figures.updates
    ]
