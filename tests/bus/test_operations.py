"""Operations that a shard asks of a parallel file system's metadata server, counted with strace."""

import re
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest

SHARDS = 10
OPERATIONS = {
    "rename": "rename", "renameat": "rename", "renameat2": "rename", "close": "close",
    "unlink": "unlink", "unlinkat": "unlink", "mkdir": "mkdir", "getdents64": "readdir",
    "flock": "lock",
}  # fmt: skip
BY_NAME = ("stat", "lstat", "newfstatat", "statx", "access", "faccessat", "faccessat2", "readlink")


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
    """phase of `metadata_run` -> operations on names, by shard."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    if subprocess.run(["strace", "-o", "/dev/null", "true"], capture_output=True).returncode:
        pytest.skip("strace is not allowed here")
    folder = tmp_path_factory.mktemp("life")
    root, trace = folder / "bus", folder / "trace"
    life = [sys.executable, Path(__file__).with_name("metadata_run.py"), root, str(SHARDS)]
    watch = ["strace", "-f", "-y", "-e", "trace=%file,%desc", "-o", trace]
    subprocess.run([*watch, *life], capture_output=True, check=True)
    phases, phase = defaultdict(Counter), ""
    for line in trace.read_text(errors="replace", encoding="utf-8").splitlines():
        if mark := re.search(r'"/PHASE/(\w+)"', line):
            phase = mark[1]
            phases[phase].clear()
        elif phase and str(root) in line and (call := re.match(r"^\d+\s+(\w+)\((.*)", line)):
            phases[phase][operation(call[1], call[2], root)] += 1
    for counts in phases.values():
        del counts[""]
    return {
        phase: {name: count / SHARDS for name, count in counts.items()}
        for phase, counts in phases.items()
    }


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
    assert counted[phase] == operations
