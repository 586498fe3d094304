"""The files of docs/how-to/extending.md run as they stand there."""

import json
import re
import tomllib
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import e2e_runs as e2e
import numpy as np
import pytest
import torch

from relax_hpc import submit
from relax_hpc.algorithms.composition import objective_of
from relax_hpc.algorithms.part import Rows
from relax_hpc.bus.plan import read_chain
from relax_hpc.bus.reader import Reader
from relax_hpc.config import job_file
from relax_hpc.runtime.paths import RunPaths

pytestmark = pytest.mark.long

PAGE = (e2e.REPOSITORY / "docs" / "how-to" / "extending.md").read_text()
STEPS, PROMPTS, SIBLINGS = 2, 4, 4
OF_AN_AGENT = "An agent that speaks the chat API"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The page's files, and the job that it names them in."""
    folder = tmp_path_factory.mktemp("mine")
    for name, program in re.findall(r"^```python\n# (\S+)\n(.*?)^```", PAGE, re.M | re.S):
        (folder / name).write_text(program)
    return folder


def said_in_the_job(of_an_agent=False):
    """The tables of the page: those of an agent, or the others."""
    tables = {}
    for section in PAGE.split("\n## "):
        if section.startswith(OF_AN_AGENT) == of_an_agent:
            for block in re.findall(r"^```toml\n(.*?)^```", section, re.M | re.S):
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
        e2e.REPOSITORY / "jobs" / "demo.toml",
        [f"--set={key}={settings[key]}" for key in settings],
    )
    # 0+0= is answered with 0, twice: right, less 0.01 for its character.
    played = e2e.cli("check", job, "--local", "--play", *own)
    assert "played an episode: 2 replies, 4 tokens trained on; reward 0.99 (right 1, " in played
    assert "metrics (changed 0)" in played
    run = submit(job, local=True, **settings | {"reward.args": mine["reward"]["args"]})
    run_dir = run.run_dir
    kept = [path for path in folder.glob("*.py") if path.stem not in ("agent", "shaped")]
    for path in kept:  # the run goes on with what it began with
        path.write_text("raise RuntimeError('changed meanwhile')\n")
    assert run.wait(600).state == "COMPLETED"
    assert [row["step"] for row in run.history()] == [0, *range(1, STEPS + 1)]
    assert len(run.samples(STEPS, n=99)) == PROMPTS * SIBLINGS
    assert [len(guids) for _, guids in e2e.planned(run_dir)] == [PROMPTS] * STEPS
    shards = e2e.events_of(run_dir, event="shard")
    assert all(0 <= shard["rollout/changed"] <= 1 for shard in shards)
    for shard in shards:
        parts = shard["parts/right"] + shard["parts/length"]
        assert shard["reward/mean"] == pytest.approx(parts)
        assert -0.01 * 16 <= shard["parts/length"] <= -0.01 * 9, r"\boxed{47}, the last reply alone"


def test_an_agent_is_a_program_and_what_it_was_told_is_trained_on_once_though_rollout_is_killed(
    folder, tiny, monkeypatch
):
    monkeypatch.chdir(folder)
    steps, mine = 4, said_in_the_job(of_an_agent=True)["rollout"]
    settings = e2e.sized(folder, steps, PROMPTS, SIBLINGS, 4) | {
        "name": "agent", "rollout.environment": mine["environment"],
        "rollout.program.command": json.dumps(mine["program"]["command"]),
        "rollout.program.timeout_s": mine["program"]["timeout_s"], "model.path": tiny / "model",
        "prompts.train": f"{tiny}/train.jsonl[0:512]", "eval.heldout.path": tiny / "heldout.jsonl",
        "actor.save_every": 2, "rollout.advanced.groups_per_shard": 2, "bus.keep_steps": steps,
        "engines.rollout.max_running_requests": 16,
    }  # fmt: skip
    job, own = (
        e2e.REPOSITORY / "jobs" / "demo.toml",
        [f"--set={k}={v}" for k, v in settings.items()],
    )
    assert "1 reply, 4 tokens trained on; reward 1 (right 1); metrics (turns 1)" in e2e.cli(
        "check", job, "--local", "--play", *own
    ), "three digits, and the end"
    run_dir = Path(
        re.search(r"^run directory: (.*)$", e2e.cli("submit", job, "--local", *own), re.M)[1]
    )
    try:
        e2e.wait_until(run_dir, e2e.has_done(1), 100)
        e2e.kill(run_dir, "rollout", "engine")
        after = e2e.wait_until_over(run_dir, 200)
    finally:
        e2e.cli("cancel", run_dir)
    e2e.assert_whole(run_dir, after, steps, PROMPTS, SIBLINGS)
    assert len(e2e.events_of(run_dir, "rollout", "start")) == 2
    assert all(1 <= shard["rollout/turns"] <= 2 for shard in e2e.events_of(run_dir, event="shard"))
    rows = rows_of(run_dir)
    assert {row.reward for row in rows} <= {0, 0.5, 1} and not any(r.reward_error for r in rows)
    turns = [row.turns[:, 1].tolist() for row in rows]
    assert [0, 1, 2, 1] in turns and all(each in ([0, 1], [0, 1, 2, 1]) for each in turns)
    for row in rows:
        sizes = np.diff([*row.turns[:, 0], len(row.token_ids)])
        np.testing.assert_array_equal(row.loss_mask, np.repeat(row.turns[:, 1] == 1, sizes))
        assert (row.columns["rollout_logprobs"][row.loss_mask == 0] == 0).all()


def rows_of(run_dir):
    paths = RunPaths(run_dir).bus
    with closing(Reader(paths)) as reader:
        return [
            row
            for record in read_chain(paths).steps
            for row in reader.rows(record, range(record.num_trajectories))
        ]


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
