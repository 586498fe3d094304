"""`bench modes` on a tiny model: the same work in turn and side by side."""

import json

import pytest
from e2e_runs import REPOSITORY, cli

from relax_hpc.cli.bench.long_tail import LengthDistribution
from relax_hpc.roles.rollout.episodes import seed_of
from relax_hpc.runtime.telemetry import history
from relax_hpc.runtime.telemetry.events import read_events

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
    lengths = LengthDistribution(12.0, 64)
    drawn = [
        [lengths.draw(seed_of(0, guid, sibling)) for guid in groups for sibling in range(4)]
        for groups in (range(4), range(4, 8), range(8, 12))
    ]
    wanted = [sum(each) / len(each) for each in drawn]
    for mode in ("colocate", "staleness-1"):
        steps = history.steps(read_events(folder / mode / "events"))[:3]
        assert [step["response/mean"] for step in steps] == pytest.approx(wanted), mode
