"""Operations that a run asks of a parallel file system's metadata server, counted with strace."""

import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

STEP_SECONDS = 60
"""Rows of a step of 256 prompts x 8 siblings; the count per step does not depend on it."""
ON_NAMES = {
    "open", "openat", "close", "rename", "unlink", "mkdir", "stat", "lstat", "newfstatat", "access",
    "faccessat2", "getdents64", "readlink", "ftruncate", "fsync of a folder",
}  # fmt: skip


@pytest.fixture(scope="module")
def counts(tmp_path_factory):
    """Calls on files of the bus: while steps are made, and while ranks only look."""
    if shutil.which("strace") is None:
        pytest.skip("needs strace")
    folder = tmp_path_factory.mktemp("metadata")
    trace, script = folder / "trace", Path(__file__).with_name("metadata_run.py")
    calls = "trace=%file,close,fsync,fstat,statx,getdents64,ftruncate,flock,fcntl"
    command = ["strace", "-f", "-y", "-qq", "-e", calls, "-e", "signal=none", "-o", str(trace)]
    run = subprocess.run(
        [*command, sys.executable, str(script), str(folder / "bus")],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    if run.returncode and "ptrace" in run.stderr:
        pytest.skip("strace is not allowed here")
    assert run.returncode == 0, run.stderr
    phases = {"warm": Counter(), "steps": Counter(), "idle": Counter()}
    phase = "warm"
    for line in trace.read_text().splitlines():
        if "/mark-" in line:
            phase = {"begin": "steps", "end": "idle", "idle": "over"}[
                re.search(r"/mark-(\w+)", line).group(1)
            ]
        elif phase in phases and str(folder / "bus") in line:
            name = re.search(r"^\d+\s+(\w+)\(", line).group(1)
            if name in ("statx", "newfstatat") and '""' in line:  # by descriptor
                name = "fstat"
            if name == "fsync" and not re.search(r"\.(tmp|h5)>|/(log|credits|f\d+\.log)>", line):
                name = "fsync of a folder"
            failed = "ENOENT" in line
            phases[phase][f"{name} ENOENT" if failed else name] += 1
    return phases, json.loads(run.stdout)


def on_names(counter):
    return sum(n for call, n in counter.items() if call.removesuffix(" ENOENT") in ON_NAMES)


def test_a_shard_costs_seven_operations_and_two_per_further_reader(counts):
    """Create, close, rename, flush; open and close by rank 0, which admits and reads; unlink."""
    phases, run = counts
    found, shards, others = phases["steps"], run["shards"], run["opens_by_others"]
    assert found["rename"] == found["unlink"] == shards
    assert found["openat"] + found["open"] == 2 * shards + others
    assert abs(found["close"] - found["openat"]) <= shards  # those of the last step come later
    assert on_names(found) <= 7 * shards + 2 * others + shards / 4
    assert not [call for call in found if "ENOENT" in call]  # nothing is looked up too early
    assert found["flock"] == 0


def test_64_ranks_ask_at_most_five_operations_per_second(counts, record_property):
    phases, run = counts
    per_step = on_names(phases["steps"]) / run["steps"]
    record_property("operations per step", per_step)
    print(f"{per_step:.0f} operations per step, {dict(phases['steps'])}, {run}")
    assert per_step / STEP_SECONDS <= 5


def test_looking_for_news_costs_no_metadata_operation(counts):
    phases, _ = counts
    assert on_names(phases["idle"]) == 0
