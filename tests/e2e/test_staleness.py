"""On-policy, one step apart or two: the bound holds, and is used."""

import time

import psutil
import pytest
from e2e_runs import (
    cli,
    events_of,
    every_prompt_once,
    is_over,
    planned,
    submit,
    wait_until,
)

from relax_hpc.runtime.files.records import read_json
from relax_hpc.runtime.paths import RunPaths

pytestmark = pytest.mark.long

STEPS = 6


@pytest.mark.parametrize(  # of 1: test_slurm_job
    ("job", "max_staleness"), [("arithmetic_on_policy", 0), ("arithmetic_async", 2)]
)
def test_the_lag_reaches_the_bound_but_never_passes_it(tiny, tmp_path, job, max_staleness):
    run_dir = submit(
        f"tiny/{job}",
        tiny,
        local=True,
        run_root=tmp_path,
        schedule__num_steps=STEPS,
        schedule__prompts_per_step=8,
        rollout__samples_per_prompt=4,
        actor__save_every=100,
        eval__heldout__every=0,
        eval__heldout__num_prompts=8,
    ).run_dir
    try:
        progress = wait_until(run_dir, is_over, 400)["progress"]
    finally:
        cli("cancel", run_dir)
    lags = [step["staleness/max"] for step in events_of(run_dir, "actor", "step")]
    assert len(lags) == STEPS and max(lags) == max_staleness
    # The plan keeps the oldest token of each batch: a witness that does not ask the trainer.
    assert progress["max_staleness_seen"] == max_staleness


def kill_in_an_update(run_dir, version):
    """Kills the actor while an engine is being given a version, that one or a later one."""
    roster = RunPaths(run_dir).roster

    def is_syncing():
        held = read_json(roster) or {"version": 0, "members": {}}
        states = {entry["state"] for entry in held["members"].values()}
        return held["version"] >= version and held["version"] % 4 == 3 and "SYNCING" in states

    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        if is_syncing():
            actor = psutil.Process(events_of(run_dir, "actor", "start")[-1]["pid"])
            actor.suspend()
            if is_syncing():  # it has not come further meanwhile
                actor.kill()
                return read_json(roster)["version"]
            actor.resume()
        time.sleep(0.001)
    raise AssertionError("no update was seen")


def test_no_token_is_over_age_though_the_trainer_is_killed_in_an_update(tiny, tmp_path):
    """G3: its successor has an older policy; what stood in the engine goes on with a newer one."""
    run_dir = submit(
        "demo", tiny, local=True, run_root=tmp_path,
        **{
            "schedule.num_steps": 12, "schedule.prompts_per_step": 8,
            "rollout.samples_per_prompt": 4, "engines.rollout.max_running_requests": 4,
            "actor.save_every": 4,
            "eval.heldout.every": 0, "eval.heldout.num_prompts": 8,
        },
    ).run_dir  # fmt: skip
    try:
        killed_at = kill_in_an_update(run_dir, 7)
        after = wait_until(run_dir, is_over, 200)
    finally:
        cli("cancel", run_dir)
    assert after["state"] == "COMPLETED", cli("logs", run_dir)[-4000:]
    [resumed] = events_of(run_dir, "actor", "resume")
    assert resumed["step"] == killed_at - 3, "the new trainer is three policies behind"
    assert after["progress"]["max_staleness_seen"] == 1
    [end] = events_of(run_dir, "rollout", "engine_end")
    assert "the trainer died while it was updated" in end["reason"]
    assert planned(run_dir) == every_prompt_once(12, 8)
