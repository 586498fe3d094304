"""The follower as the job script starts and ends it."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from board_runs import curves, make, read, step, write


@pytest.mark.parametrize("end", ["told", "script killed"])
def test_a_follower_draws_and_tells_while_the_run_goes_and_the_rest_at_its_end(tmp_path, end):
    told = tmp_path / "told"
    (tmp_path / "tell").write_text(f"#!/bin/sh\ncat >> {told}\n")
    (tmp_path / "tell").chmod(0o755)
    paths, _ = make(tmp_path, notify={"command": [str(tmp_path / "tell")]})
    write(paths, step(1, time.time(), 0.25))
    module = [sys.executable, "-m", "relax_hpc.boards.follower", str(paths.root)]
    line = f"{' '.join(module)} --job-id local-1 --controller $$ & echo $!; wait $!; wait $!"
    script = subprocess.Popen(["bash", "-c", line], stdout=subprocess.PIPE, text=True)
    follower = int(script.stdout.readline())
    wait_for(lambda: paths.tensorboard.exists() and told.exists())
    os.kill(follower, signal.SIGTERM)  # as Slurm does to everybody when a job is cancelled
    write(paths, step(2, time.time(), 0.5))
    if end == "told":
        os.kill(follower, signal.SIGUSR1)
    else:
        script.kill()
    wait_for(paths.tensorboard_made.exists)
    assert json.loads(paths.tensorboard_made.read_text())["failed"] is (end != "told")
    assert curves(read(paths.tensorboard)) == {"reward/mean": [(1, 0.25), (2, 0.5)]}
    wait_for(paths.reward_curve.exists)
    assert json.loads(told.read_text())["news"] == "start"
    script.wait(timeout=30)
    script.stdout.close()


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
