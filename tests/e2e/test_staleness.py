"""The bound of staleness holds, whoever dies in an update; that it is used: test_slurm_job."""

import time

import psutil
import pytest
from e2e_runs import assert_every_prompt_once, cli, events_of, sized, submit, wait_until_over

from relax_hpc.runtime.files.records import read_json
from relax_hpc.runtime.paths import RunPaths

pytestmark = pytest.mark.long


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
    small = sized(tmp_path, 12, 8, 4, 8) | {
        "engines.rollout.max_running_requests": 4,
        "actor.save_every": 4,
    }
    run_dir = submit("demo", tiny, local=True, **small).run_dir
    killed_at = kill_in_an_update(run_dir, 7)
    after = wait_until_over(run_dir, 200)
    assert after["state"] == "COMPLETED", cli("logs", run_dir)[-4000:]
    [resumed] = events_of(run_dir, "actor", "resume")
    assert resumed["step"] == killed_at - 3, "the new trainer is three policies behind"
    assert after["progress"]["max_staleness_seen"] == 1
    [end] = events_of(run_dir, "rollout", "engine_end")
    assert "the trainer died while it was updated" in end["reason"]
    assert_every_prompt_once(run_dir, 12, 8)
