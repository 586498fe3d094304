"""The bus against the file system below it: the same bytes by plain system calls.

Raw = one `pwritev` of the arrays, fsync, rename, fsync of the folder; one `preadv` for each array.
"""

import ctypes
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import numpy as np

from relax_hpc.bench.report import Row, compared
from relax_hpc.bench.workload import GROUPS, Kind, renumbered, routed_columns
from relax_hpc.bus import layout
from relax_hpc.bus.durable import pread_into, pwritev_all
from relax_hpc.bus.log import CommitRecord, LogTail, RecordKind
from relax_hpc.bus.log_writer import LogWriter
from relax_hpc.bus.producer import Producer
from relax_hpc.bus.shards import shard_write
from relax_hpc.bus.shards.encode import to_columns
from relax_hpc.bus.shards.hdf5 import Attribute
from relax_hpc.bus.shards.routed import COLUMN as EXPERTS
from relax_hpc.bus.shards.shard import Shard
from relax_hpc.paths import BusPaths
from relax_hpc.records import Buffer, sync
from relax_hpc.schema import Columns, PromptGroup
from relax_hpc.scratch import scratch_folder

TMPFS = Path("/dev/shm")
FIELD = "ragged/rollout_logprobs"
NAME, OTHER = "bench-0", "bench-1"
ATTRIBUTES: dict[str, Attribute] = {"producer": NAME, "fence": 1, "role": "rollout", "parent": ""}


def places(folder: Path | None) -> dict[str, Path]:
    """The file system to measure, and memory to compare it with."""
    found = {"disk": folder or Path(tempfile.gettempdir())}
    return found | ({"tmpfs": TMPFS} if TMPFS.is_dir() else {})


def measure(folder: Path | None, repeats: int) -> Iterator[Row]:
    """Rows as they come; each repeat measures ours and raw one after the other, in turns."""
    for kind in GROUPS:
        groups = GROUPS[kind]()
        columns = to_columns(groups)
        for place, parent in places(folder).items():
            with scratch_folder("bench", parent) as scratch:
                trial = _Trial(scratch, kind, groups, columns)
                yield from trial.writes(place, repeats)
                yield from trial.reads(place, repeats)
    for place, parent in places(folder).items():
        with scratch_folder("bench", parent) as scratch:
            yield from _publishing(scratch, place, repeats)
            if place == "tmpfs":  # where it costs most: elsewhere the file system waits, too
                yield from _compressing(scratch, repeats)


class _Trial:
    """One kind of batch on one file system."""

    def __init__(
        self, scratch: Path, kind: Kind, groups: list[PromptGroup], columns: Columns
    ) -> None:
        self._kind, self._groups, self._columns = kind, groups, columns
        self._shard, self._raw = scratch / "0.h5", scratch / "0.raw"
        self._bus = BusPaths(scratch / "bus")
        self._size = sum(column.nbytes for column in columns.values())

    def writes(self, place: str, repeats: int) -> Iterator[Row]:
        layout.create(self._bus, [NAME, OTHER], {})
        log = LogWriter(self._bus.log(OTHER))
        seconds: dict[str, list[float]] = {"raw": [], "write": [], "commit": [], "put": []}
        guids = count(0, len(self._groups))
        with Producer(self._bus, NAME, {}) as producer:
            for repeat in range(repeats + 1):
                first = next(guids)
                groups = renumbered(self._groups, first)
                actions: dict[str, Callable[[], object]] = {
                    "raw": lambda: _write_raw(self._raw, self._columns),
                    "write": lambda: shard_write.write(self._shard, self._columns, ATTRIBUTES),
                    "commit": lambda: self._commit(log),
                    "put": lambda groups=groups: producer.put(groups),  # type: ignore[misc]
                }
                _in_turns(actions, seconds, repeat)
                producer.collect(first + len(groups))
        log.close()
        aim = 0.9 if place == "disk" else 0.75
        what = f"{self._kind}, {place}"
        size, raw = self._size, seconds["raw"]
        yield compared(f"write {what}", size, seconds["write"], raw, "raw", aim)
        yield compared(f"write and commit {what}", size, seconds["commit"], raw, "raw", aim)
        yield compared(f"put {what}, from trajectories", size, seconds["put"], raw, "raw", None)

    def _commit(self, log: LogWriter) -> None:
        info = shard_write.write(self._shard, self._columns, ATTRIBUTES)
        log.append(CommitRecord(RecordKind.BASE, log.fence, 0, "rollout", **info._asdict()))

    def reads(self, place: str, repeats: int) -> Iterator[Row]:
        _write_raw(self._raw, self._columns)
        shard_write.write(self._shard, self._columns, ATTRIBUTES)
        sizes = [column.nbytes for column in self._columns.values()]
        field = self._columns[FIELD].nbytes
        names = ("raw", "unverified", "verified", "field", "raw field")
        seconds: dict[str, list[float]] = {name: [] for name in names}
        actions: dict[str, Callable[[], object]] = {
            "raw": lambda: _read_raw(self._raw, sizes),
            "unverified": lambda: _read(self._shard, verify=False),
            "verified": lambda: _read(self._shard),
            "field": lambda: _read(self._shard, verify=False, columns=[FIELD]),
            "raw field": lambda: _read_raw(self._raw, [field]),
        }
        for repeat in range(repeats + 1):
            _in_turns(actions, seconds, repeat, fresh=True)
        what = f"{self._kind}, {place}"
        size, raw = self._size, seconds["raw"]
        yield compared(f"read {what}, unverified", size, seconds["unverified"], raw, "raw", 0.95)
        yield compared(f"read {what}, verified", size, seconds["verified"], raw, "raw", 0.75)
        if self._kind == "text":
            yield compared(
                f"read {what}, one column", field, seconds["field"], seconds["raw field"], "raw",
                1 / 1.2,
            )  # fmt: skip
        samples = [_seconds(lambda: _read(self._shard, rows=(77, 78))) for _ in range(5 * repeats)]
        sample = statistics.median(samples) * 1e3
        yield Row(f"read one sample, {what}, verified", sample, "ms", aim=1.0)


def _publishing(scratch: Path, place: str, repeats: int) -> Iterator[Row]:
    """A group of 8, as it ends: until it is committed, and until a reader of the log has it."""
    bus = BusPaths(scratch / "bus")
    layout.create(bus, [NAME], {})
    groups = GROUPS["text"]()[:1]
    put, seen = [], []
    with Producer(bus, NAME, {}) as producer:
        tail = LogTail(bus.log(NAME))
        tail.poll()
        for guid in range(4 * repeats):
            batch = renumbered(groups, guid)
            put.append(_seconds(lambda batch=batch: producer.put(batch)))  # type: ignore[misc]
            seen.append(_seconds(tail.poll))
        tail.close()
    yield Row(f"put one group, {place}", statistics.median(put) * 1e3, "ms", aim=10.0)
    yield Row(f"commit -> visible, {place}", statistics.median(seen) * 1e3, "ms", aim=10.0)


def _compressing(scratch: Path, repeats: int) -> Iterator[Row]:
    """Routed experts: what is saved, and what it costs."""
    columns = routed_columns()
    size = columns[EXPERTS].nbytes
    plain, packed = scratch / "plain.h5", scratch / "packed.h5"
    seconds: dict[str, list[float]] = {"plain": [], "packed": [], "read plain": [], "read": []}
    actions: dict[str, Callable[[], object]] = {
        "plain": lambda: shard_write.write(plain, columns, ATTRIBUTES),
        "packed": lambda: shard_write.write(packed, columns, ATTRIBUTES, compress=[EXPERTS]),
        "read plain": lambda: _read(plain),
        "read": lambda: _read(packed),
    }
    for action in actions.values():
        action()
    for repeat in range(repeats):
        _in_turns(actions, seconds, 1 + repeat)
    part = packed.stat().st_size / plain.stat().st_size
    yield Row("size of routed experts, compressed", part, "of plain")
    for name, ours, theirs in (("write", "packed", "plain"), ("read", "read", "read plain")):
        what = f"{name} routed experts, compressed"
        yield compared(what, size, seconds[ours], seconds[theirs], "plain", None)


def in_turns_order(names: list[str], repeat: int) -> list[str]:
    """Shuffled, in each repeat differently and in each run the same."""
    return random.Random(repeat).sample(names, len(names))


def _in_turns(
    actions: dict[str, Callable[[], object]],
    seconds: dict[str, list[float]],
    repeat: int,
    *,
    fresh: bool = False,
) -> None:
    """Times each action once, in another order in every repeat; the first is to warm up.

    With `fresh` all of them allocate fresh pages; else who comes after a large free gets warm ones.
    """
    for name in in_turns_order(list(actions), repeat):
        if fresh:
            ctypes.CDLL(None).malloc_trim(0)
        taken = _seconds(actions[name])
        if repeat:
            seconds[name].append(taken)


def _write_raw(path: Path, columns: Columns) -> None:
    draft = path.with_suffix(".tmp")
    buffers: list[Buffer] = [c.reshape(-1).data.cast("B") for c in columns.values() if c.size]
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        pwritev_all(fd, buffers, 0)
        os.fsync(fd)
    finally:
        os.close(fd)
    draft.rename(path)
    sync(path.parent)


def _read_raw(path: Path, sizes: list[int]) -> list[np.ndarray[tuple[int], np.dtype[np.uint8]]]:
    fd = os.open(path, os.O_RDONLY)
    arrays, at = [], 0
    try:
        for size in sizes:
            arrays.append(np.empty(size, np.uint8))
            pread_into(fd, arrays[-1].data, at)
            at += size
    finally:
        os.close(fd)
    return arrays


def _read(
    path: Path,
    *,
    verify: bool = True,
    columns: list[str] | None = None,
    rows: tuple[int, int] | None = None,
) -> Columns:
    with Shard(path, verify=verify) as shard:
        return shard.read_span(*(rows or (0, shard.rows)), columns)


def _seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    result = action()
    taken = time.perf_counter() - start
    del result  # freeing it is not part of making it
    return taken
