"""Ranks of an MPI world that wait for one that is silent name it, and end."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(shutil.which("mpirun") is None, reason="MPI is not installed")

RANK = Path(__file__).with_name("silent_rank.py")


def ranks(how):
    """Output of three ranks, of which rank 1 does so, once all have ended."""
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "3"]
    ended = subprocess.run(
        [*command, sys.executable, RANK, how], capture_output=True, text=True, timeout=90
    )
    assert ended.returncode != 0, ended.stdout + ended.stderr
    return ended.stdout


def test_ranks_that_wait_for_a_silent_one_name_it():
    said = ranks("silent")
    for rank in (0, 2):
        assert f"rank {rank}: rank 1 of the 3 of this component said nothing for 1 s" in said


def test_a_rank_that_fails_ends_although_mpi_would_wait_for_the_others():
    assert "rank 1: it fails" in ranks("fails")
