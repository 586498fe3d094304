"""A whole run on a disk that is full for a while: everybody holds, then goes on."""

import re
import time

import e2e_runs as e2e
import pytest
from file_systems import full, small_tmpfs

STEPS, PROMPTS, SIBLINGS, MEGABYTES = 14, 8, 4, 128
HOLDS = re.compile(r"(/\S+) \(owner (\S+)\): No space left on device; holding")


@pytest.mark.parametrize(
    "seconds", [pytest.param(15, marks=pytest.mark.long), pytest.param(180, marks=pytest.mark.soak)]
)
def test_a_run_holds_while_its_disk_is_full_and_completes_with_nobody_started_again(
    tiny, tmp_path, seconds
):
    with small_tmpfs(tmp_path / "disk", MEGABYTES) as run_root:
        settings = e2e.sized(run_root, STEPS, PROMPTS, SIBLINGS, 16) | {
            "reward.name": e2e.unhurried(tmp_path), "rollout.advanced.groups_per_shard": 4,
            "actor.save_every": 2,
        }  # fmt: skip
        run_dir = e2e.submit("demo", tiny, local=True, **settings).run_dir
        try:
            e2e.wait_until(run_dir, e2e.has_done(3), 100)
            with full(run_root):
                time.sleep(seconds)
                stood = e2e.status(run_dir)["progress"]["steps_done"]
                time.sleep(1)
                assert e2e.status(run_dir)["progress"]["steps_done"] == stood < STEPS
            freed = time.time()
            e2e.hurry(tmp_path)
            after = e2e.wait_until_over(run_dir, 150)
            assert after["state"] == "COMPLETED"
            starts = [
                (each["role"], each["start"]) for each in e2e.events_of(run_dir, event="start")
            ]
            assert sorted(starts) == [("actor", 1), ("rollout", 1)]
            assert not e2e.events_of(run_dir, event="engine_end")
            e2e.assert_every_prompt_once(run_dir, STEPS, PROMPTS)
            trajectories = after["progress"]["trajectories"]
            assert trajectories["trained"] == STEPS * PROMPTS * SIBLINGS
            assert trajectories["trained_twice"] == 0
            told = {path.name: HOLDS.findall(path.read_text())
                    for path in (run_dir / "logs").glob("*.log")}  # fmt: skip
            assert any(told.values()), "somebody says which path has no room, and whose it is"
            assert all(len(lines) <= 1 + seconds // 60 for lines in told.values()), told
            went_on = min(e["time"] for e in e2e.events_of(run_dir, "actor", "step")
                          if e["step"] == stood + 1)  # fmt: skip
            print(f"full for {seconds} s at step {stood}; the next {went_on - freed:.1f} s after")
        finally:
            e2e.cli("cancel", run_dir)
