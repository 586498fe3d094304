"""`bench modes` on a tiny model: the same work in turn and side by side."""

import json

import pytest
from e2e_runs import REPOSITORY, cli

from relax_hpc.telemetry import history
from relax_hpc.telemetry.events import read_events

pytestmark = pytest.mark.long


def test_modes_train_on_responses_of_the_same_lengths(tiny, tmp_path):
    shown, folder = tmp_path / "modes.json", tmp_path / "runs"
    cli(
        "bench", "modes", REPOSITORY / "jobs" / "demo.toml",
        "--mode", "colocate", "--mode", "staleness-1", "--mean", "12", "--p99", "64",
        "--warm-up", "1", "--steps", "2", "--folder", folder, "--json", shown, "--limit", "3",
        f"--set=model.path={tiny / 'model'}", f"--set=prompts.train={tiny}/train.jsonl[0:512]",
        "--set=schedule.prompts_per_step=4", "--set=rollout.samples_per_prompt=4",
    )  # fmt: skip
    colocated, lagging = json.loads(shown.read_text())["modes"]
    assert not colocated["failure"] + lagging["failure"]
    assert colocated["num_tokens"] == lagging["num_tokens"] > 0
    assert (colocated["steps"], lagging["wait_lease_s"] < colocated["wait_lease_s"]) == (2, True)
    assert colocated["times_colocate"] == 1.0
    assert lagging["times_colocate"] == pytest.approx(colocated["step_s"] / lagging["step_s"])
    means = [
        [event["response/mean"] for event in history.steps(read_events(folder / mode / "events"))]
        for mode in ("colocate", "staleness-1")
    ]
    assert means[0][:3] == means[1][:3]
    assert len(set(means[0][:3])) == 3  # each step has lengths of its own
