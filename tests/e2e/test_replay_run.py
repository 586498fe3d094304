"""A whole local run, then steps of it again: bit by bit, at another grid, and one that differs."""

import json
import re

import pytest
from e2e_runs import cli, events_of, submit, wait_until_over
from typer.testing import CliRunner

from relax_hpc.cli.main import app
from relax_hpc.runtime.paths import RunPaths

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def run_dir(tiny, tmp_path_factory):
    """Six steps with a reference, so that KL enters the loss, and checkpoints of steps 4 and 6."""
    run_dir = submit(
        "demo", tiny, local=True, run_root=tmp_path_factory.mktemp("runs"),
        schedule__num_steps=6, schedule__prompts_per_step=8, rollout__samples_per_prompt=4,
        actor__save_every=4, eval__heldout__every=0, eval__heldout__num_prompts=8,
        algorithm__kl__coefficient=0.1, reference__placement="actor",
    ).run_dir  # fmt: skip
    assert wait_until_over(run_dir, 200)["state"] == "COMPLETED"
    return run_dir


def replayed(run_dir, *options, code=0, local=True):
    words = ["replay", str(run_dir), *["--local"] * local, "--json", *options]
    answer = CliRunner().invoke(app, words)
    assert answer.exit_code == code, answer.output
    return json.loads(answer.stdout), answer.stderr


def test_a_step_is_the_same_bit_by_bit_from_its_checkpoint_and_from_the_nearest_one(run_dir):
    found, said = replayed(run_dir, "--step", "5")
    assert found["first"] == 5 and found["checkpoint"].endswith("step_00000004")
    assert {each["difference"] for each in found["numbers"]} == {0}
    numbers = {each["name"]: each["recorded"] for each in found["numbers"]}
    assert numbers["grad_norm"] > 0 and numbers["loss"] != 0
    found, said = replayed(run_dir, "--step", "6")
    assert "there is no checkpoint of step 5, so from checkpoint 4, steps 5 to 6" in said
    assert found["first"] == 5 and {each["difference"] for each in found["numbers"]} == {0}


@pytest.mark.usefixtures("slurm_cluster")
def test_under_slurm_ranks_that_meet_by_mpi_train_a_step_again_bit_by_bit(tiny, tmp_path):
    run_dir = submit(
        "demo", tiny, local=False, run_root=tmp_path, launch__profile="local",
        schedule__num_steps=3, schedule__prompts_per_step=4, rollout__samples_per_prompt=4,
        engines__rollout__count=1, engines__rollout__resources__nodes=1,
        actor__layout__data_parallel=2, actor__save_every=2,
        eval__heldout__every=0, eval__heldout__num_prompts=4,
    ).run_dir  # fmt: skip
    assert wait_until_over(run_dir, 240)["state"] == "COMPLETED"
    found, _ = replayed(run_dir, "--step", "3", local=False)
    assert found["is_same_grid"] and found["checkpoint"].endswith("step_00000002")
    assert {each["difference"] for each in found["numbers"]} == {0}
    assert {each["name"]: each["recorded"] for each in found["numbers"]}["grad_norm"] > 0
    again = [e for folder in run_dir.glob("replay/*") for e in events_of(folder, "replay", "world")]
    assert {(each["kind"], each["size"]) for each in again} == {("MpiWorld", 2)}


def test_a_step_that_was_something_else_is_told_and_nothing_of_the_run_changes(run_dir):
    before = {path: path.stat().st_mtime_ns for path in (run_dir / "bus").rglob("*")}
    events = RunPaths(run_dir).events("actor", 0)
    whole = events.read_text()
    other = re.sub(r'("event": "step", "step": 5, .*"grad_norm": )([\d.]+)', r"\g<1>9\2", whole)
    assert other != whole
    events.write_text(other)
    try:
        found, _ = replayed(run_dir, "--step", "5", code=1)
    finally:
        events.write_text(whole)
    wrong = {each["name"] for each in found["numbers"] if each["difference"]}
    assert wrong == {"grad_norm"}
    assert {path: path.stat().st_mtime_ns for path in (run_dir / "bus").rglob("*")} == before
    assert json.loads(cli("status", run_dir, "--json"))["state"] == "COMPLETED"


def test_a_run_goes_on_at_another_grid_with_its_moments_and_each_step_knows_its_own(run_dir):
    """Six steps of one rank, two of tensor parallelism, two of halves of the data."""
    grids = {
        8: ["actor.layout.tensor_parallel=2"],
        10: ["actor.layout.tensor_parallel=1", "actor.layout.data_parallel=2",
             "actor.tokens_per_micro_batch=64"],
    }  # fmt: skip
    one_rank = [
        "--set=actor.layout.tensor_parallel=1", "--set=actor.layout.data_parallel=1",
        "--set=actor.tokens_per_micro_batch=16384",
    ]  # fmt: skip
    for last, grid in grids.items():
        settings = [*grid, f"schedule.num_steps={last}"]
        cli("resume", run_dir, "--local", *(f"--set={setting}" for setting in settings))
        now = wait_until_over(run_dir, 200)
        assert now["state"] == "COMPLETED"
        found, _ = replayed(run_dir, "--step", str(last))
        assert {each["difference"] for each in found["numbers"]} == {0} and found["is_same_grid"]
        found, _ = replayed(run_dir, "--step", str(last), *one_rank)
        differences = [each["difference"] for each in found["numbers"]]
        assert found["is_same_grid"] is False and 0 < max(differences) < 1e-5
    done = now["progress"]
    assert [each["first_step"] for each in done["changes"]] == [7, 9]
    count = done["trajectories"]
    assert (count["trained"], count["trained_twice"]) == (10 * 32, 0)
    assert count["committed"] == count["trained"] and not any(count["dropped"].values())
