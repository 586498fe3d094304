"""`bus verify`: is everything that was committed still there, and does it all fit together?

Safe while the run goes on: nothing is written, and what owners delete meanwhile is not missed.
"""

import json
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

from relax_hpc.bus import layout
from relax_hpc.bus.audit import audit
from relax_hpc.bus.log import RecordKind
from relax_hpc.bus.plan import Chain, Part, read_chain
from relax_hpc.bus.tools import inventory
from relax_hpc.bus.tools.check_control import check_control, check_credits, check_snapshots
from relax_hpc.bus.tools.check_plan import check_checkpoints, check_logs, check_plan, check_sidecars
from relax_hpc.bus.tools.check_shard import check_shard
from relax_hpc.bus.tools.deletable import ever_retired, last_reading, oldest_step
from relax_hpc.bus.tools.findings import Checkpoints, Commit, Commits, Finding
from relax_hpc.bus.tools.inventory import Writer
from relax_hpc.bus.tools.strays import find_strays
from relax_hpc.errors import BusError
from relax_hpc.paths import BusPaths
from relax_hpc.telemetry import tables

MAX_READERS = 8
_RECORDS = ("log", "plan", "missing")
"""Kinds of findings that make further ones."""
OnProgress = Callable[[int, int], None]
"""Called with the bytes of shards verified so far, and those of all."""


class Verified(NamedTuple):
    """Counts of what `verify` has read, and its findings."""

    shards: int
    """Read to the last byte."""
    nbytes: int
    retired: int
    """Shards that their owners deleted with the trainer's leave: nothing to read."""
    steps: int
    """Planned."""
    findings: list[Finding]

    @property
    def is_sound(self) -> bool:
        return not any(finding.harmful for finding in self.findings)

    def to_json(self) -> str:
        findings = [finding._asdict() for finding in self.findings]
        return json.dumps(
            {"sound": self.is_sound} | self._asdict() | {"findings": findings},
            indent=1,
            allow_nan=False,
        )


class _Task(NamedTuple):
    path: Path
    commit: Commit
    planned: list[tuple[int, Part]]
    parent: Path | None
    is_set_aside: bool
    """The sequencer found it damaged and dropped its prompt groups."""


def verify(paths: BusPaths, checkpoints: Checkpoints, on_progress: OnProgress) -> Verified:
    """Compares records, plan, checkpoints and files, and every checksum.

    Raises:
        BusError: not a bus of this format.
    """
    header = layout.open_bus(paths)
    findings: list[Finding] = []
    # In this order: a checkpoint that is seen is on the plan, and what is planned is committed.
    positions = checkpoints()
    chain = _chain(paths, findings)
    writers = _writers(paths, header, findings)
    commits = {r.uuid: Commit(w.name, r) for w in writers for r in w.shards}
    findings += check_control(paths, inventory.writers_of(header), chain)
    findings += check_logs(writers)
    # What is missing of a damaged log is not the plan's.
    if chain is not None and not any(f.kind in _RECORDS for f in findings):
        findings += check_sidecars(commits)
        findings += check_plan(chain, commits)
        findings += check_checkpoints(chain, positions)
        findings += check_snapshots(paths, chain)
        findings += _counts(paths)
    findings += find_strays(paths, header, writers)
    tasks = _tasks(paths, chain, commits)
    deletions = _Deletions(paths, chain, checkpoints)
    results = list(_read_all(tasks, deletions, on_progress))
    read = [task for task, found in results if found is not None]
    return Verified(
        shards=len(read),
        nbytes=sum(task.commit.record.length for task in read),
        retired=len(tasks) - len(read),
        steps=len({record.step for record in chain.steps}) if chain else 0,
        findings=findings + [finding for _, found in results for finding in found or []],
    )


def text(found: Verified) -> str:
    """A line for each finding, and the sum of it."""
    wrong = [finding for finding in found.findings if finding.harmful]
    others = [finding for finding in found.findings if not finding.harmful]
    lines = [f"{finding.kind}: {finding.where}: {finding.what}" for finding in [*others, *wrong]]
    read = f"{found.shards} shards ({tables.size(found.nbytes)}) read to the last byte"
    verdict = f"not sound ({len(wrong)} wrong)" if wrong else "sound"
    lines.append(f"{verdict}: {read}, {found.retired} retired, {found.steps} steps planned")
    return "\n".join(lines)


def _chain(paths: BusPaths, findings: list[Finding]) -> Chain | None:
    try:
        return read_chain(paths)
    except BusError as error:
        findings.append(Finding("plan", str(paths.plan), str(error)))
        return None


def _writers(paths: BusPaths, header: layout.BusHeader, findings: list[Finding]) -> list[Writer]:
    writers = []
    for name, role in inventory.writers_of(header).items():
        try:
            writers.append(inventory.take(paths, name, role))
        except BusError as error:
            findings.append(Finding("log", name, str(error)))
    return writers


def _counts(paths: BusPaths) -> Iterator[Finding]:
    counted = audit(paths)
    if counted.planned_twice:
        what = f"{counted.planned_twice} trajectories are planned twice"
        yield Finding("count", "plan", what)
    if counted.dropped:
        what = f"{counted.dropped} committed trajectories were passed over, and nothing says why"
        yield Finding("count", "plan", what)


def _tasks(paths: BusPaths, chain: Chain | None, commits: Commits) -> list[_Task]:
    planned: dict[str, list[tuple[int, Part]]] = defaultdict(list)
    for record in chain.steps if chain else []:
        for guid, part in zip(record.guids, record.parts, strict=True):
            planned[part.uuid].append((guid, part))
    aside = {g.dropped for g in chain.dropped if g.why == "damaged"} if chain else set()
    tasks = []
    for uuid, commit in commits.items():
        base = commits.get(commit.record.parent)
        parent = _path(paths, base) if base else None
        tasks.append(_Task(_path(paths, commit), commit, planned[uuid], parent, uuid in aside))
    return tasks


def _path(paths: BusPaths, commit: Commit) -> Path:
    return paths.shard(commit.writer, commit.record.fence, commit.record.seq)


class _Deletions:
    """Tells a shard that is rightly gone from one that is missing."""

    def __init__(self, paths: BusPaths, chain: Chain | None, checkpoints: Checkpoints) -> None:
        self._paths, self._checkpoints = paths, checkpoints
        self._last_reading = last_reading(chain) if chain else {}
        self._retired = _ever_retired(paths)
        self._oldest = oldest_step(checkpoints())

    def judge(self, task: _Task) -> list[Finding] | None:
        """Returns what is wrong about a shard that is gone; None if it may be gone."""
        record = task.commit.record
        if record.kind is RecordKind.PARTIAL:  # needed only until its groups are finished
            return None
        if record.guid_max >= self._retired:
            self._retired = _ever_retired(self._paths)
        if record.guid_max >= self._retired:
            what = "is committed and may not be deleted yet, but it is gone; restore the file"
            return [Finding("missing", str(task.path), what)]
        step = self._last_reading.get(record.uuid, 0)
        if step > self._oldest:
            self._oldest = oldest_step(self._checkpoints())
        if step > self._oldest:
            what = f"cannot be resumed from: step {step} reads {task.path}, which is deleted"
            return [Finding("checkpoint", f"step {self._oldest}", what)]
        return None


def _ever_retired(paths: BusPaths) -> float:
    """Returns the guid below which owners were allowed to delete; infinity where that is
    damaged."""
    damaged = any(True for _ in check_credits(paths, None))
    return math.inf if damaged else ever_retired(paths)


def _read_all(
    tasks: list[_Task], deletions: _Deletions, on_progress: OnProgress
) -> Iterator[tuple[_Task, list[Finding] | None]]:
    """Each task with what was found; None where the shard is rightly gone."""
    total = sum(task.commit.record.length for task in tasks)
    done = 0
    with ThreadPoolExecutor(min(MAX_READERS, os.cpu_count() or 1)) as pool:
        running = {pool.submit(_read, task): task for task in tasks}
        for future in as_completed(running):
            task = running[future]
            found: list[Finding] | None = future.result()
            if found and not task.path.exists():
                found = deletions.judge(task)
            done += task.commit.record.length
            on_progress(done, total)
            yield task, found


def _read(task: _Task) -> list[Finding]:
    parent = task.parent if task.parent and task.parent.exists() else None
    found = list(check_shard(task.path, task.commit, task.planned, parent))
    if not task.is_set_aside:
        return found
    remedy = "; the plan has set it aside, and its prompt groups are sampled again"
    return [finding._replace(what=finding.what + remedy, harmful=False) for finding in found]
