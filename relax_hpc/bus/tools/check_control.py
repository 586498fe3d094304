"""Do the growing files and the snapshots hold what their writers left? No shard is opened.

A file that was cut short or overwritten may look like one that nobody has written to yet. What
tells them apart: a torn tail is the beginning of a record, and the files know of each other.
"""

from collections.abc import Collection, Iterator
from pathlib import Path

from relax_hpc.bus import frames, log
from relax_hpc.bus.plan import Chain, PlanPosition, read_chain
from relax_hpc.bus.snapshot import GuidSet, Snapshot, read_snapshots
from relax_hpc.bus.tools import inventory
from relax_hpc.bus.tools.findings import Finding
from relax_hpc.errors import BusError
from relax_hpc.paths import BusPaths

_REMEDY = "restore the file"


def check_control(
    paths: BusPaths, names: Collection[str], chain: Chain | None
) -> Iterator[Finding]:
    """Looks at folders, at the ends of logs, at the plan's and at the credits.

    Args:
        names: of all writers.
        chain: None if it cannot be read.
    """
    yield from check_folders(paths, names)
    yield from check_log_ends(paths, names)
    yield from check_plan_ends(paths)
    yield from check_credits(paths, chain)


def check_folders(paths: BusPaths, names: Collection[str]) -> Iterator[Finding]:
    """Checks that the folders are there that `layout.create` makes."""
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
    """Checks that the credits are those of the trainers that the plan knows."""
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
    credit = inventory.latest_credit(paths)
    planned = max((record.step for record in read_chain(paths).steps), default=0)
    if credit.step > planned:
        what = f"is planned up to step {planned}, but step {credit.step} was trained; {_REMEDY}"
        yield Finding("plan", str(paths.plan), what)


def check_snapshots(paths: BusPaths, chain: Chain) -> Iterator[Finding]:
    """Checks that the snapshot that a restart would begin with sums up this plan."""
    try:
        snapshots = read_snapshots(paths)
    except BusError as error:
        yield Finding("plan", str(paths.plan), str(error))
        return
    for snapshot in snapshots:
        if wrong := _wrong(snapshot, chain):
            path = paths.plan_snapshot(snapshot.fence, snapshot.records)
            yield Finding("plan", str(path), f"{wrong}; delete it")


def _wrong(snapshot: Snapshot, chain: Chain) -> str | None:
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
    """Whether a frame is there to its last byte, which is a brace; its checksum did not hold."""
    if len(tail) < frames.FRAME.size:
        return False
    _, size, _ = frames.FRAME.unpack_from(tail)
    return tail[frames.FRAME.size + size - 1 : frames.FRAME.size + size] == b"}"


def _begins(tail: bytes, magic: bytes) -> bool:
    return tail[: len(magic)] == magic[: len(tail)]


def _no_tail(kind: str, path: Path, known: int, count: int) -> Finding:
    what = f"the {count} bytes behind byte {known} are no record and not the beginning of one"
    return Finding(kind, str(path), f"{what}; {_REMEDY}")
