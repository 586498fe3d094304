"""A whole local run, then steps of it again: bit by bit, and at another grid."""

import json

import pytest
from e2e_runs import cli, submit, wait_until_over
from typer.testing import CliRunner

from relax_hpc.cli.main import app

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


def replayed(run_dir, *options):
    answer = CliRunner().invoke(app, ["replay", str(run_dir), "--local", "--json", *options])
    assert answer.exit_code == 0, answer.output
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
