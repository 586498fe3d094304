"""The files of docs/extending.md run as they stand there."""

import json
import re
import tomllib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from e2e_runs import REPOSITORY, cli, events_of, is_over, planned, wait_until

from relax_hpc import job_file
from relax_hpc.algorithms.composition import objective_of
from relax_hpc.algorithms.part import Rows

pytestmark = pytest.mark.long

PAGE = (REPOSITORY / "docs" / "extending.md").read_text()
STEPS, PROMPTS, SIBLINGS = 2, 4, 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The page's files, and the job that it names them in."""
    folder = tmp_path_factory.mktemp("mine")
    for name, program in re.findall(r"^```python\n# (\S+)\n(.*?)^```", PAGE, re.M | re.S):
        (folder / name).write_text(program)
    return folder


def said_in_the_job():
    tables = {}
    for block in re.findall(r"^```toml\n(.*?)^```", PAGE, re.M | re.S):
        tables |= tomllib.loads(block)
    return tables


def test_a_reward_an_environment_and_a_source_of_data_are_one_file_each(folder, tiny, monkeypatch):
    monkeypatch.chdir(folder)
    mine = said_in_the_job()
    settings = {
        "name": "own", "run_root": folder, "model.path": tiny / "model",
        "eval.heldout.path": tiny / "heldout.jsonl", "eval.heldout.num_prompts": 8,
        "prompts.train": mine["prompts"]["train"], "reward.name": mine["reward"]["name"],
        "reward.args": json.dumps(mine["reward"]["args"]).replace(":", "="),
        "rollout.environment": mine["rollout"]["environment"], "schedule.num_steps": STEPS,
        "schedule.prompts_per_step": PROMPTS,
        "rollout.samples_per_prompt": SIBLINGS, "engines.rollout.max_running_requests": 16,
    }  # fmt: skip
    job, own = (
        REPOSITORY / "jobs" / "demo.toml",
        [f"--set={key}={settings[key]}" for key in settings],
    )
    assert "own" in cli("check", job, "--local", *own)
    said = cli("submit", job, "--local", *own)
    run_dir = Path(re.search(r"^run directory: (.*)$", said, re.MULTILINE)[1])
    kept = [path for path in folder.glob("*.py") if "shaped" not in path.name]
    for path in kept:  # the run goes on with what it began with
        path.write_text("raise RuntimeError('changed meanwhile')\n")
    assert wait_until(run_dir, is_over, 300)["state"] == "COMPLETED"
    assert [len(guids) for _, guids in planned(run_dir)] == [PROMPTS] * STEPS
    shards = events_of(run_dir, event="shard")
    assert all(0 <= shard["rollout/changed"] <= 1 for shard in shards)
    for shard in shards:
        parts = shard["parts/right"] + shard["parts/length"]
        assert shard["reward/mean"] == pytest.approx(parts)
        assert -0.01 * 16 <= shard["parts/length"] <= -0.01 * 9, r"\boxed{47}, the last reply alone"


class Packed(SimpleNamespace):
    def with_columns(self, **columns):
        return Packed(loss_mask=self.loss_mask, columns=self.columns | columns)


def test_parts_of_an_algorithm_are_a_file(folder, monkeypatch):
    """Rewards 1, 0, 0, 0: others have 0 on average where it is 1, and 1/3 where it is 0."""
    monkeypatch.chdir(folder)
    tree = {
        "name": "run", "model": {"path": "m"}, "prompts": {"train": "t"},
        "schedule": {"num_steps": 1},
        "algorithm": said_in_the_job()["algorithm"] | {"correction": {"name": "none"}},
    }  # fmt: skip
    algorithm = job_file.validate(tree, source="job").algorithm
    assert (algorithm.advantage.name, algorithm.advantage.scale) == ("shaped.py:LeaveOneOut", 0.5)
    rows = Rows(np.array([[1, 0, 0, 0]], np.float32), np.full((1, 4), 2))
    np.testing.assert_allclose(algorithm.advantage.of_groups(rows), [[0.5, *[-1 / 6] * 3]])

    logprobs = torch.tensor([-1.0, float("nan"), -3.0], requires_grad=True)
    tokens = Packed(
        loss_mask=torch.tensor([True, False, True]),
        columns={
            "advantages": torch.tensor([0.5, float("nan"), -0.25]),
            "rollout_logprobs": logprobs.detach(),
        },
    )
    found = objective_of(algorithm).loss(logprobs, tokens)
    found.loss.backward()
    assert found.loss.item() == pytest.approx(-(0.5 * -1 + -0.25 * -3))
    assert logprobs.grad.tolist() == [-0.5, 0, 0.25]
