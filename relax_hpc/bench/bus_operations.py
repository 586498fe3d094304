"""Operations that a shard asks of a metadata server, counted with strace."""

import re
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from relax_hpc.bench import shard_life
from relax_hpc.bench.report import Row
from relax_hpc.bench.workload import SIBLINGS
from relax_hpc.scratch import scratch_folder

SHARDS = 20
_CALL = re.compile(r"^\d+\s+(\w+)\((.*)")
_NAMES = {
    "rename": "rename",
    "renameat": "rename",
    "renameat2": "rename",
    "close": "close",
    "unlink": "unlink",
    "unlinkat": "unlink",
    "mkdir": "mkdir",
    "getdents64": "readdir",
}
_BY_NAME = ("stat", "newfstatat", "statx", "access", "faccessat", "faccessat2", "readlink")

Phases = dict[str, Counter[str]]
"""phase of `shard_life` -> operations on names, of all shards."""


def missing() -> str:
    """Why it cannot be counted here; empty if it can."""
    if shutil.which("strace") is None:
        return "strace is not installed"
    probe = subprocess.run(["strace", "-o", "/dev/null", "true"], capture_output=True, check=False)
    return "strace is not allowed here" if probe.returncode else ""


def count(folder: Path, shards: int = SHARDS) -> Phases:
    """Lets shards live below `folder`, which must be empty, and counts."""
    root, trace = folder / "bus", folder / "trace"
    life = [sys.executable, "-m", shard_life.__name__, str(root), str(shards)]
    watch = ["strace", "-f", "-y", "-e", "trace=%file,%desc", "-o", str(trace)]
    subprocess.run([*watch, *life], capture_output=True, check=True)
    phases: Phases = defaultdict(Counter)
    phase = ""
    for line in trace.read_text(errors="replace").splitlines():
        if found := re.search(r'"/PHASE/(\w+)"', line):
            phase = found[1]
        elif phase and str(root) in line and (found := _CALL.match(line)):
            phases[phase][_operation(found[1], found[2], root)] += 1
    for counts in phases.values():
        del counts[""]
    return phases


def measure() -> Iterator[Row]:
    """Operations per 1,000 trajectories, with shards of 1,024."""
    if missing():
        return
    with scratch_folder("bench") as folder:
        phases = count(folder)
    samples = SHARDS * shard_life.GROUPS * SIBLINGS / 1000
    for name, parts in (("publish", ["publish"]), ("widen", ["widen"]),
                        ("admit and read", ["admit", "read"]), ("delete", ["delete"])):  # fmt: skip
        operations = sum(sum(phases[part].values()) for part in parts)
        unit = "operations per 1,000 samples"
        yield Row(f"metadata: {name}", operations / samples, unit)


def _operation(call: str, rest: str, root: Path) -> str:
    """Names the operation that a system call asks of a metadata server; nothing if it goes to
    data servers."""
    if call in ("open", "openat"):
        return "create" if "O_CREAT" in rest else "open"
    if call == "fsync" and not re.search(r"/(log|credits|[^/]*\.(tmp|log|h5))>", rest):
        return "sync_folder"
    if call in _BY_NAME and f'"{root}' in rest:  # of a name; that of an open file is not counted
        return "stat"
    return _NAMES.get(call, "")
