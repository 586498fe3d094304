"""Operations that a shard asks of a parallel file system's metadata server, counted with strace.

python test_operations.py ROOT: a bus whose shards live and go, phase by phase, for it to watch.
"""

import os
import re
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
from bus_fixtures import group

from relax_hpc.bus import layout
from relax_hpc.bus.credits import CreditTail
from relax_hpc.bus.producer import Producer
from relax_hpc.bus.reader import Reader
from relax_hpc.bus.sequencer import Sequencer
from relax_hpc.bus.shards.shard import OpenShards
from relax_hpc.bus.sidecar import SidecarWriter
from relax_hpc.runtime.paths import BusPaths

SHARDS = 10
P = 8
"""Prompt groups of a shard, which is also a step."""
OPERATIONS = {
    "rename": "rename", "renameat": "rename", "renameat2": "rename", "close": "close",
    "unlink": "unlink", "unlinkat": "unlink", "mkdir": "mkdir", "getdents64": "readdir",
    "flock": "lock",
}  # fmt: skip
BY_NAME = ("stat", "lstat", "newfstatat", "statx", "access", "faccessat", "faccessat2", "readlink")


def live(root):
    paths = BusPaths(root)
    layout.create(paths, ["rollout-0"], {}, sidecar_writers={"reference-0": "reference"})
    producer, writer = Producer(paths, "rollout-0", {}), SidecarWriter(paths, "reference-0", {})
    shards, credits = OpenShards(paths), CreditTail(paths)
    sequencer = Sequencer(
        paths, prompts_per_step=P, position=None, needs=["reference"], shards=shards
    )
    rank_0, other, records = Reader(paths, shards=shards), Reader(paths), {}

    def plan(step):
        records[step] = sequencer.next_portion(step, timeout_s=30)
        rank_0.rows(records[step], range(records[step].num_trajectories))

    phases = {
        "publish": lambda step: publish(producer, step),
        "widen": lambda _: widen(writer),
        "plan": plan,
        "read": lambda step: other.rows(records[step], range(records[step].num_trajectories)),
        "close": lambda _: other.close(),
        "grant": lambda step: sequencer.advance(step=step, policy_version=step),
        "look": lambda _: [
            sequencer.check_fenced(), sequencer._intake.poll(SHARDS + 2),
            writer.pending(), credits.latest(),
        ],
        "delete": lambda step: [owner.collect(P * step) for owner in (producer, writer)],
    }  # fmt: skip
    for once in ("publish", "widen", "plan", "look"):
        phases[once](1)
    for name, phase in phases.items():
        if name != "close":  # counts to what was read
            os.access(f"/PHASE/{name}", os.F_OK)  # a mark in the trace
        for step in range(2, SHARDS + 2):
            phase(step)
    os.access("/PHASE/end", os.F_OK)


def publish(producer, step):
    producer.put([group(guid) for guid in range(P * (step - 1), P * step)])


def widen(writer):
    for pending in writer.pending():
        with writer.open(pending) as shard:
            num_tokens = int(shard.read("index/offsets")[-1])
        writer.put(pending, {"ragged/ref_logprobs": np.zeros(num_tokens, np.float32)})


def operation(call, rest, root):
    """Names what a system call asks of a metadata server; nothing if it goes to data servers."""
    if call in ("open", "openat"):
        return "create" if "O_CREAT" in rest else "open"
    if call == "fsync" and not re.search(r"/(log|credits|[^/]*\.(tmp|log|h5))>", rest):
        return "sync_folder"
    if call in BY_NAME and f'"{root}' in rest:  # of a name; that of an open file is not counted
        return "stat"
    return OPERATIONS.get(call, "")


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    """phase of `live` -> operations on names, by shard."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    if subprocess.run(["strace", "-o", "/dev/null", "true"], capture_output=True).returncode:
        pytest.skip("strace is not allowed here")
    folder = tmp_path_factory.mktemp("life")
    root, trace = folder / "bus", folder / "trace"
    watch = ["strace", "-f", "-y", "-e", "trace=%file,%desc", "-o", trace]
    subprocess.run([*watch, sys.executable, __file__, root], capture_output=True, check=True)
    phases, phase = defaultdict(Counter), ""
    for line in trace.read_text(errors="replace", encoding="utf-8").splitlines():
        if mark := re.search(r'"/PHASE/(\w+)"', line):
            phase = mark[1]
            phases[phase].clear()
        elif phase and str(root) in line and (call := re.match(r"^\d+\s+(\w+)\((.*)", line)):
            phases[phase][operation(call[1], call[2], root)] += 1 / SHARDS
    for counts in phases.values():
        del counts[""]
    return phases


@pytest.mark.parametrize(
    ("phase", "operations"),
    [
        ("publish", {"create": 1, "close": 1, "rename": 1, "sync_folder": 1}),
        # Its writer opens what it widens.
        ("widen", {"create": 1, "rename": 1, "sync_folder": 1, "open": 1, "close": 2}),
        ("plan", {"open": 2, "close": 2}),  # admitted and read by rank 0, closed at the next step
        ("read", {"open": 2, "close": 2}),  # by another rank
        ("grant", {}),
        ("look", {}),
        ("delete", {"unlink": 2 * (1 + 1 / SHARDS)}),  # one was published before
    ],
)
def test_a_shard_and_its_sidecar_cost_the_operations_that_pages_say(counted, phase, operations):
    """No name is looked up before it exists, no folder is listed, nothing is locked."""
    assert counted[phase] == pytest.approx(operations)


if __name__ == "__main__":
    live(Path(sys.argv[1]))
