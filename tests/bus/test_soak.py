"""Whatever dies wherever: what is trained on is what an undisturbed run trains on.

`crash_run.py` says how, and repeats a run that went wrong. `make soak` runs the long one.
"""

import subprocess
import sys
from pathlib import Path

import pytest

HARNESS = Path(__file__).parent / "crash_run.py"


def sweep(injections, seed):
    command = [sys.executable, HARNESS, "sweep", str(injections), str(seed)]
    answer = subprocess.run(command, text=True, stdout=subprocess.PIPE)
    print(answer.stdout.rpartition("\r")[2])
    assert answer.returncode == 0, "the lines above say how to see it again"


def test_a_few_processes_that_are_killed_or_come_back_as_zombies_change_nothing():
    sweep(12, seed=3)


@pytest.mark.long
def test_a_hundred_processes_that_are_killed_or_come_back_as_zombies_change_nothing():
    sweep(120, seed=0)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_a_thousand_processes_that_are_killed_or_come_back_as_zombies_change_nothing():
    sweep(1200, seed=1)
