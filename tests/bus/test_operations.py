"""The simulation reckons with the operations of the code as built: counted with strace."""

import re
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from relax_hpc.bench.bus_simulation import BASE, READ, SIDECAR

SHARDS = 20
CALL = re.compile(r"^\d+\s+(\w+)\((.*)")
NAMES = {
    "rename": "rename",
    "renameat": "rename",
    "renameat2": "rename",
    "close": "close",
    "unlink": "unlink",
    "unlinkat": "unlink",
    "mkdir": "mkdir",
    "getdents64": "readdir",
}
BY_NAME = ("stat", "newfstatat", "statx", "access", "faccessat", "faccessat2", "readlink")


def operation(call, rest, root):
    """What a system call asks of a metadata server; None if it goes to data servers."""
    if call in ("open", "openat"):
        return "create" if "O_CREAT" in rest else "open"
    if call == "fsync" and not re.search(r"/(log|credits|[^/]*\.(tmp|log|h5))>", rest):
        return "sync_folder"
    if call in BY_NAME and f'"{root}' in rest:  # of a name; that of an open file is not counted
        return "stat"
    return NAMES.get(call)


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    """phase -> operations of one shard, its sidecar included."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    folder = tmp_path_factory.mktemp("life")
    script, root, trace = Path(__file__).with_name("shard_life.py"), folder / "bus", folder / "out"
    command = ["strace", "-f", "-y", "-e", "trace=%file,%desc", "-o", trace,
               sys.executable, script, root, str(SHARDS)]  # fmt: skip
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if "ptrace" in run.stderr:
        pytest.skip("strace is not allowed here")
    assert run.returncode == 0, run.stderr
    phases, phase = defaultdict(Counter), None
    for line in trace.read_text(errors="replace").splitlines():
        if found := re.search(r'"/PHASE/(\w+)"', line):
            phase = found[1]
        elif phase and str(root) in line and (found := CALL.match(line)):
            phases[phase][operation(found[1], found[2], root)] += 1
    for counts in phases.values():
        del counts[None]
    return phases


def per_shard(counts):
    return {name: count / SHARDS for name, count in counts.items()}


def test_a_base_shard_costs_what_the_simulation_says(counted):
    assert per_shard(counted["publish"]) == BASE - Counter(unlink=1)


def test_a_sidecar_costs_what_the_simulation_says(counted):
    assert per_shard(counted["widen"]) == SIDECAR - Counter(unlink=1)


def test_admission_and_reading_open_each_file_once(counted):
    both = READ + READ  # the base shard and its sidecar
    assert per_shard(counted["read"]) == both
    assert per_shard(counted["admit"]) == {"open": both["open"]}  # closed after their step


def test_deleting_costs_an_unlink_each(counted):
    assert counted["delete"] == {"unlink": 2 * (SHARDS + 1)}  # one was published before


def test_grants_and_fence_checks_cost_no_metadata_operation(counted):
    assert counted["grant"] == {}


def test_no_name_is_looked_up_before_it_exists_and_no_folder_is_listed(counted):
    assert all("readdir" not in counts for counts in counted.values())
