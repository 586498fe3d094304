"""`bus verify`: checks that all that was committed is still there and consistent.

Commit logs, plan, snapshots and shard files are compared with each other. A file that was truncated
or overwritten may look like one that nobody has written to yet. The checks tell them apart: a torn
tail is the beginning of a record, and the files refer to each other.

Safe while the run goes on: it writes nothing, and tolerates deletions by owners.
"""

import json
import math
import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

import h5py
import numpy as np

from relax_hpc.bus import frames, log
from relax_hpc.bus.audit import audit
from relax_hpc.bus.credits import Credit
from relax_hpc.bus.layout import BusHeader, open_bus
from relax_hpc.bus.log import RecordKind
from relax_hpc.bus.plan import (
    Chain,
    GuidSet,
    PlanPosition,
    PlanRecord,
    PlanSnapshot,
    ShardRange,
    read_chain,
    read_snapshots,
)
from relax_hpc.bus.shards import media
from relax_hpc.bus.shards.shard import Shard
from relax_hpc.bus.shards.shard_format import ROW_OFFSETS, Field
from relax_hpc.bus.tools.inventory import (
    CommittedShard,
    Finding,
    Writer,
    find_strays,
    newest_credit,
    read_writer,
    writers_of,
)
from relax_hpc.errors import BusError, without_number
from relax_hpc.runtime.paths import BusPaths
from relax_hpc.runtime.text import format_size
from relax_hpc.schema import COLUMNS, PRODUCER, columns_of

MAX_READERS = 8
Checkpoints = Callable[[], Sequence[PlanPosition]]
"""Positions in the plan of the current checkpoints; a running trainer moves them."""
Commits = Mapping[str, CommittedShard]
_RECORDS = ("log", "plan", "missing")
"""Kinds of findings that cause further ones."""
OnProgress = Callable[[int, int], None]
"""Called with the bytes of shards verified so far, and the total."""


class VerifyReport(NamedTuple):
    shards: int
    """Read to the last byte."""
    nbytes: int
    retired: int
    """Shards that their owners deleted, as the trainer allowed."""
    steps: int
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


class _ShardTask(NamedTuple):
    commit: CommittedShard
    planned: list[tuple[int, ShardRange]]
    parent: Path | None
    is_set_aside: bool
    """The sequencer found it damaged and dropped its prompt groups."""


def verify(paths: BusPaths, checkpoints: Checkpoints, on_progress: OnProgress) -> VerifyReport:
    """Compares records, plan, checkpoints and files, and every checksum.

    Raises:
        BusError: not a bus of this format.
    """
    header = open_bus(paths)
    findings: list[Finding] = []
    # In this order: a checkpoint that is seen is on the plan, and what is planned is committed.
    positions = checkpoints()
    chain = _chain(paths, findings)
    writers = _writers(paths, header, findings)
    commits = {shard.record.uuid: shard for writer in writers for shard in writer.shards}
    findings += check_control(paths, writers_of(header), chain)
    findings += check_logs(writers)
    # What is missing of a damaged log is not the plan's.
    if chain is not None and not any(f.kind in _RECORDS for f in findings):
        findings += check_sidecars(commits)
        findings += check_plan(chain, commits)
        findings += check_checkpoints(chain, positions)
        findings += check_snapshots(paths, chain)
        findings += _counts(paths)
    findings += find_strays(paths, header, writers)
    tasks = _tasks(chain, commits)
    deletions = _Deletions(paths, chain, checkpoints)
    results = list(_read_all(tasks, deletions, on_progress))
    read = [task for task, found in results if found is not None]
    return VerifyReport(
        shards=len(read),
        nbytes=sum(task.commit.record.length for task in read),
        retired=len(tasks) - len(read),
        steps=len({record.step for record in chain.steps}) if chain else 0,
        findings=findings + [finding for _, found in results for finding in found or []],
    )


def text(found: VerifyReport) -> str:
    wrong = [finding for finding in found.findings if finding.harmful]
    others = [finding for finding in found.findings if not finding.harmful]
    lines = [f"{finding.kind}: {finding.where}: {finding.what}" for finding in [*others, *wrong]]
    read = f"{found.shards} shards ({format_size(found.nbytes)}) read to the last byte"
    verdict = f"not sound ({len(wrong)} wrong)" if wrong else "sound"
    lines.append(f"{verdict}: {read}, {found.retired} retired, {found.steps} steps planned")
    return "\n".join(lines)


def _chain(paths: BusPaths, findings: list[Finding]) -> Chain | None:
    try:
        return read_chain(paths)
    except BusError as error:
        findings.append(Finding("plan", str(paths.plan), str(error)))
        return None


def _writers(paths: BusPaths, header: BusHeader, findings: list[Finding]) -> list[Writer]:
    writers = []
    for name, role in writers_of(header).items():
        try:
            writers.append(read_writer(paths, name, role))
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


def _tasks(chain: Chain | None, commits: Commits) -> list[_ShardTask]:
    planned: dict[str, list[tuple[int, ShardRange]]] = defaultdict(list)
    for record in chain.steps if chain else []:
        for guid, part in zip(record.guids, record.parts, strict=True):
            planned[part.uuid].append((guid, part))
    aside = {g.dropped for g in chain.dropped if g.why == "damaged"} if chain else set()
    tasks = []
    for uuid, commit in commits.items():
        base = commits.get(commit.record.parent)
        tasks.append(_ShardTask(commit, planned[uuid], base and base.path, uuid in aside))
    return tasks


def oldest_step(checkpoints: Sequence[PlanPosition]) -> int:
    """Returns the step of the oldest checkpoint kept; 0 starts the run anew."""
    return min((position.step for position in checkpoints), default=0)


def last_reading(chain: Chain) -> dict[str, int]:
    """Returns uuid of each planned shard, sidecars included -> the last step that reads it."""
    steps: dict[str, int] = {}
    for record in chain.steps:
        for part in record.parts:
            steps[part.uuid] = record.step
            for sidecar in record.sidecars.get(part.uuid, {}).values():
                steps[sidecar.uuid] = record.step
    return steps


def ever_retired(paths: BusPaths) -> int:
    """Returns the highest guid below which owners were ever allowed to delete."""
    granted = [record["retired_guid_below"] for record, _ in frames.read_frames(paths.credits)]
    return max(granted, default=0)


class _Deletions:
    """Tells a rightly deleted shard from a missing one."""

    def __init__(self, paths: BusPaths, chain: Chain | None, checkpoints: Checkpoints) -> None:
        self._paths, self._checkpoints = paths, checkpoints
        self._last_reading = last_reading(chain) if chain else {}
        self._retired = _ever_retired(paths)
        self._oldest = oldest_step(checkpoints())

    def judge(self, task: _ShardTask) -> list[Finding] | None:
        """Returns the findings about a shard that is gone; None if it may be gone."""
        record = task.commit.record
        if record.kind is RecordKind.PARTIAL:  # needed only until its groups are finished
            return None
        if record.guid_max >= self._retired:
            self._retired = _ever_retired(self._paths)
        if record.guid_max >= self._retired:
            what = "is committed and may not be deleted yet, but it is gone; restore the file"
            return [Finding("missing", str(task.commit.path), what)]
        step = self._last_reading.get(record.uuid, 0)
        if step > self._oldest:
            self._oldest = oldest_step(self._checkpoints())
        if step > self._oldest:
            what = f"cannot be resumed from: step {step} reads {task.commit.path}, which is deleted"
            return [Finding("checkpoint", f"step {self._oldest}", what)]
        return None


def _ever_retired(paths: BusPaths) -> float:
    """Returns the guid below which owners were allowed to delete; infinity if that is damaged."""
    damaged = any(True for _ in check_credits(paths, None))
    return math.inf if damaged else ever_retired(paths)


def _read_all(
    tasks: list[_ShardTask], deletions: _Deletions, on_progress: OnProgress
) -> Iterator[tuple[_ShardTask, list[Finding] | None]]:
    total = sum(task.commit.record.length for task in tasks)
    done = 0
    with ThreadPoolExecutor(min(MAX_READERS, os.cpu_count() or 1)) as pool:
        running = {pool.submit(_read, task): task for task in tasks}
        for future in as_completed(running):
            task = running[future]
            found: list[Finding] | None = future.result()
            if found and not task.commit.path.exists():
                found = deletions.judge(task)
            done += task.commit.record.length
            on_progress(done, total)
            yield task, found


def _read(task: _ShardTask) -> list[Finding]:
    parent = task.parent if task.parent and task.parent.exists() else None
    found = list(check_shard(task.commit, task.planned, parent))
    if not task.is_set_aside:
        return found
    remedy = "; the plan has set it aside, and its prompt groups are sampled again"
    return [finding._replace(what=finding.what + remedy, harmful=False) for finding in found]


def check_logs(writers: Sequence[Writer]) -> Iterator[Finding]:
    """Checks that each log holds valid records of its writer, in order, and no shard twice."""
    seen: set[str] = set()
    for writer in writers:
        newest = -1
        for record in (shard.record for shard in writer.shards):
            where = f"{writer.name}, fence {record.fence}, shard {record.seq}"
            if (record.kind is RecordKind.SIDE) != (writer.role != PRODUCER):
                yield Finding("log", where, f"{writer.role} committed a {record.kind.name} record")
            if record.role != writer.role:
                yield Finding("log", where, f"is of {record.role}, its log of {writer.role}")
            if record.seq <= newest:
                yield Finding("log", where, f"comes after shard {newest}; numbers must rise")
            if record.uuid in seen:
                yield Finding("log", where, f"uuid {record.uuid} is committed twice")
            newest = max(newest, record.seq)
            seen.add(record.uuid)


def check_sidecars(commits: Commits) -> Iterator[Finding]:
    """Checks that each sidecar widens an existing shard, row by row."""
    for commit in commits.values():
        record = commit.record
        if record.kind is not RecordKind.SIDE:
            continue
        where = f"{commit.writer}, fence {record.fence}, shard {record.seq}"
        parent = commits.get(record.parent)
        if parent is None or parent.record.kind is not RecordKind.BASE:
            yield Finding("log", where, f"its parent {record.parent} is not committed")
        elif (record.rows, record.tokens) != (parent.record.rows, parent.record.tokens):
            yield Finding(
                "log",
                where,
                f"has {record.rows} rows of {record.tokens} tokens, its parent "
                f"{parent.record.rows} of {parent.record.tokens}",
            )


def check_plan(chain: Chain, commits: Commits) -> Iterator[Finding]:
    """Checks that every planned row is committed, and none planned twice."""
    yield from _order(chain.steps)
    planned: dict[int, int] = {}
    for record in chain.steps:
        where = _name(record)
        rows = sum(part.hi - part.lo for part in record.parts)
        if rows != record.num_trajectories or len(record.guids) != len(record.parts):
            yield Finding(
                "plan",
                where,
                f"says {record.num_trajectories} trajectories of {len(record.guids)} prompt "
                f"groups, its {len(record.parts)} parts hold {rows}",
            )
        for guid in record.guids:
            if guid in planned:
                yield Finding("plan", where, f"prompt group {guid} is in step {planned[guid]} too")
            planned[guid] = record.step
        yield from _parts(record, commits, where)
        yield from _sidecars(record, commits, where)
    for group in chain.skipped:
        if group.guid in planned:
            where = f"step {planned[group.guid]}"
            yield Finding("plan", where, f"prompt group {group.guid} is skipped, too")
    aside = [r.uuid for r in chain.ignored] + [r.dropped for r in chain.dropped]
    for uuid in aside + [group.skipped for group in chain.skipped]:
        if uuid not in commits:
            yield Finding("plan", "plan", f"sets aside shard {uuid}, which is not committed")


def check_checkpoints(chain: Chain, positions: Sequence[PlanPosition]) -> Iterator[Finding]:
    """Checks that each checkpoint can be resumed from, as far as the plan goes."""
    for position in positions:
        try:
            chain.check(position)
        except BusError as error:
            yield Finding("checkpoint", f"step {position.step}", str(error))


def _order(steps: Sequence[PlanRecord]) -> Iterator[Finding]:
    step, portion = 1, 0
    for record in steps:
        if (record.step, record.portion) != (step, portion):
            yield Finding(
                "plan",
                _name(record),
                f"stands where step {step}, portion {portion} is due",
            )
        step, portion = (record.step + 1, 0) if record.last else (record.step, record.portion + 1)


def _parts(record: PlanRecord, commits: Commits, where: str) -> Iterator[Finding]:
    for guid, part in zip(record.guids, record.parts, strict=False):
        commit = commits.get(part.uuid)
        if commit is None:
            yield Finding("plan", where, f"prompt group {guid}: {part.uuid} is not committed")
            continue
        shard = commit.record
        if (commit.writer, shard.fence, shard.seq) != part[:3]:
            yield Finding(
                "plan",
                where,
                f"prompt group {guid}: {part.uuid} is shard {shard.seq} of {commit.writer}, "
                f"not shard {part.seq} of {part.producer}",
            )
        in_shard = 0 <= part.lo < part.hi <= shard.rows
        if not in_shard or not shard.guid_min <= guid <= shard.guid_max:
            yield Finding(
                "plan",
                where,
                f"prompt group {guid}: rows {part.lo}..{part.hi - 1} of a shard of {shard.rows} "
                f"rows, guids {shard.guid_min}..{shard.guid_max}",
            )


def _sidecars(record: PlanRecord, commits: Commits, where: str) -> Iterator[Finding]:
    for parent, roles in record.sidecars.items():
        for role, sidecar in roles.items():
            commit = commits.get(sidecar.uuid)
            if commit is None:
                yield Finding("plan", where, f"sidecar {sidecar.uuid} ({role}) is not committed")
            elif (commit.record.parent, commit.record.role) != (parent, role):
                yield Finding(
                    "plan",
                    where,
                    f"sidecar {sidecar.uuid} is {commit.record.role} of {commit.record.parent}, "
                    f"planned as {role} of {parent}",
                )


def _name(record: PlanRecord) -> str:
    return f"step {record.step}" + (f", portion {record.portion}" if record.portion else "")


_REMEDY = "restore the file"


def check_control(
    paths: BusPaths, names: Collection[str], chain: Chain | None
) -> Iterator[Finding]:
    """Checks folders, the ends of logs and of the plan, and the credits.

    Args:
        chain: None if it cannot be read.
    """
    yield from check_folders(paths, names)
    yield from check_log_ends(paths, names)
    yield from check_plan_ends(paths)
    yield from check_credits(paths, chain)


def check_folders(paths: BusPaths, names: Collection[str]) -> Iterator[Finding]:
    for folder in (paths.plan, paths.credits.parent, *map(paths.producer, names)):
        if not folder.is_dir():
            yield Finding("missing", str(folder), "is not there; restore the folder")


def check_log_ends(paths: BusPaths, names: Collection[str]) -> Iterator[Finding]:
    """Checks that each commit log ends with a record, or with the beginning of one."""
    for name in names:
        path = paths.log(name)
        try:
            data = path.read_bytes()
            known = len(log.decode(data, path, 0)) * log.RECORD_BYTES
        except (OSError, BusError):
            continue  # whoever reads it says so
        tail = data[known:]
        if any(tail) and (len(tail) >= log.RECORD_BYTES or not _begins(tail, log.MAGIC)):
            yield _no_tail("log", path, known, len(tail))


def check_plan_ends(paths: BusPaths) -> Iterator[Finding]:
    """Checks that each log of the plan ends with a record, or with the beginning of one."""
    for path in sorted(paths.plan.glob("f*.log")):
        yield from _frames_end("plan", path)


def check_credits(paths: BusPaths, chain: Chain | None) -> Iterator[Finding]:
    """Checks that the credits belong to trainers in the plan."""
    damage = list(_frames_end("credits", paths.credits))
    yield from damage
    if damage:
        return
    granted = [record["plan_fence"] for record, _ in frames.read_frames(paths.credits)]
    if chain is None:
        return
    for fence, _ in chain.links:
        if fence not in granted:
            what = f"plan fence {fence} has planned, and a trainer grants before; {_REMEDY}"
            yield Finding("credits", str(paths.credits), what)
    credit = newest_credit(paths) or Credit()
    planned = max((record.step for record in read_chain(paths).steps), default=0)
    if credit.step > planned:
        what = f"is planned up to step {planned}, but step {credit.step} was trained; {_REMEDY}"
        yield Finding("plan", str(paths.plan), what)


def check_snapshots(paths: BusPaths, chain: Chain) -> Iterator[Finding]:
    """Checks that the snapshot that a restart would use sums up this plan."""
    try:
        snapshots = read_snapshots(paths)
    except BusError as error:
        yield Finding("plan", str(paths.plan), str(error))
        return
    for snapshot in snapshots:
        if wrong := _wrong(snapshot, chain):
            path = paths.plan_snapshot(snapshot.fence, snapshot.records)
            yield Finding("plan", str(path), f"{wrong}; delete it")


def _wrong(snapshot: PlanSnapshot, chain: Chain) -> str | None:
    try:
        chain.check(PlanPosition(snapshot.fence, snapshot.records, snapshot.step))
    except BusError:
        return None  # of a trainer that was superseded: nobody goes by it
    planned = GuidSet()
    for kept in chain.steps:
        if kept.step <= snapshot.step:
            planned.update(kept.guids)
    if (planned.below, sorted(planned.above)) != (snapshot.planned_below, snapshot.planned_above):
        return f"says that guids below {snapshot.planned_below} are planned, and it is not so"
    return None


def _frames_end(kind: str, path: Path) -> Iterator[Finding]:
    try:
        data = path.read_bytes()
        _, known = frames.decode(data, path)
    except OSError as error:
        yield Finding(kind, str(path), f"cannot be read: {error.strerror}; {_REMEDY}")
        return
    except BusError as error:
        if kind == "credits":  # of the plan, whoever reads it says so
            yield Finding(kind, str(path), str(error))
        return
    tail = data[known:]
    if any(tail) and (not _begins(tail, frames.MAGIC) or _is_whole(tail)):
        yield _no_tail(kind, path, known, len(tail))


def _is_whole(tail: bytes) -> bool:
    """Whether a frame is complete, i.e. ends with a brace, although its checksum does not match."""
    if len(tail) < frames.FRAME.size:
        return False
    _, size, _ = frames.FRAME.unpack_from(tail)
    return tail[frames.FRAME.size + size - 1 : frames.FRAME.size + size] == b"}"


def _begins(tail: bytes, magic: bytes) -> bool:
    return tail[: len(magic)] == magic[: len(tail)]


def _no_tail(kind: str, path: Path, known: int, count: int) -> Finding:
    what = f"the {count} bytes behind byte {known} are no record and not the beginning of one"
    return Finding(kind, str(path), f"{what}; {_REMEDY}")


Planned = Sequence[tuple[int, ShardRange]]
"""The prompt groups that the plan takes from a shard."""


def check_shard(commit: CommittedShard, planned: Planned, parent: Path | None) -> Iterator[Finding]:
    """Reads a shard from end to end.

    Args:
        parent: the shard it widens, while that is on disk.
    """
    path = commit.path
    try:
        with Shard(path) as shard:
            if stranger := _stranger(shard, commit):
                yield stranger
                return
            yield from _columns(shard, commit)
            shard.verify()
            media.verify(shard)
            yield from _hdf5(shard)
            if commit.record.kind is RecordKind.SIDE:
                yield from _rows_of_parent(shard, parent)
            else:
                yield from _groups(shard, commit, planned)
    except BusError as error:
        yield Finding("shard", str(path), str(error).removeprefix(f"{path}: "))


def _stranger(shard: Shard, commit: CommittedShard) -> Finding | None:
    record, info = commit.record, shard.info
    expected = {
        "uuid": record.uuid,
        "bytes": record.length,
        "rows": record.rows,
        "tokens": record.tokens,
        "producer": commit.writer,
        "fence": record.fence,
        "seq": record.seq,
    }
    owner = {name: shard.attributes.get(name) for name in ("producer", "fence", "seq")}
    held = {"uuid": info.uuid, "bytes": info.length, "rows": info.rows, "tokens": info.tokens}
    held |= owner
    differ = [f"{name} {held[name]}, not {expected[name]}" for name in expected
              if held[name] != expected[name]]  # fmt: skip
    if not differ:
        return None
    what = f"is not the shard that was committed ({'; '.join(differ)}); restore the file"
    return Finding("foreign", str(shard.path), what)


def _columns(shard: Shard, commit: CommittedShard) -> Iterator[Finding]:
    role = commit.record.role
    lacking = [name for name in columns_of(role) if name not in shard.fields]
    if lacking and commit.record.kind is not RecordKind.PARTIAL:
        yield Finding("shard", str(shard.path), f"lacks {', '.join(lacking)}, which {role} writes")
    others = [n for n in shard.fields if n in COLUMNS and COLUMNS[n].writer != role]
    if others:
        yield Finding("shard", str(shard.path), f"holds {', '.join(others)}, not {role}'s to write")


def _hdf5(shard: Shard) -> Iterator[Finding]:
    """Checks that other HDF5 tools read the same: libhdf5 has checksums of its own metadata."""
    what = "HDF5 finds it damaged ({}), though relax-hpc can read it; restore the file"
    try:
        with h5py.File(shard.path, "r", locking=False) as file:
            differ = [name for name, field in shard.fields.items() if not _same(file[name], field)]
            differ += [n for n, value in shard.attributes.items() if file.attrs[n] != value]
    except (OSError, KeyError, RuntimeError) as error:
        differ = [without_number(error)]
    if differ:
        yield Finding("shard", str(shard.path), what.format(", ".join(differ)))


def _same(dataset: h5py.Dataset, field: Field) -> bool:
    same = (dataset.dtype, dataset.shape) == (np.dtype(field.dtype), field.shape)
    plain = not field.codec and field.nbytes
    return same and (not plain or dataset.id.get_offset() == field.offset)


def _groups(shard: Shard, commit: CommittedShard, planned: Planned) -> Iterator[Finding]:
    guids = shard.read("row/guid").astype(np.int64)
    held = (int(guids.min()), int(guids.max()))
    committed = (commit.record.guid_min, commit.record.guid_max)
    if held != committed:
        yield Finding("shard", str(shard.path), f"holds guids {held}, its record says {committed}")
    for guid, part in planned:
        if set(guids[part.lo : part.hi].tolist()) != {guid}:
            yield Finding(
                "plan",
                str(shard.path),
                f"rows {part.lo}..{part.hi - 1} are planned as prompt group {guid}, and hold "
                f"{sorted(set(guids[part.lo : part.hi].tolist()))}",
            )


def _rows_of_parent(shard: Shard, parent: Path | None) -> Iterator[Finding]:
    if parent is None:
        return
    with Shard(parent) as base:
        offsets, expected = shard.read(ROW_OFFSETS), base.read(ROW_OFFSETS)
        if not np.array_equal(offsets, expected):
            yield Finding("shard", str(shard.path), f"its rows are not those of {parent}")
