"""Measures the bus against plain system calls on the same bytes.

Raw = one `pwritev` of the arrays, fsync, rename, fsync of the folder; one `preadv` for each array.
The data are a text batch and an image batch, the same everywhere.
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
from typing import Literal

import numpy as np

from relax_hpc.bus import layout
from relax_hpc.bus.durable import pread_into, pwritev_all
from relax_hpc.bus.log import CommitRecord, LogTail, LogWriter, RecordKind
from relax_hpc.bus.producer import Producer
from relax_hpc.bus.shards import shard_write
from relax_hpc.bus.shards.encode import to_columns
from relax_hpc.bus.shards.hdf5 import Attribute
from relax_hpc.bus.shards.shard import Shard
from relax_hpc.cli.bench.report import ReportRow, compare
from relax_hpc.cli.bench.shapes import row_of
from relax_hpc.runtime.files.records import Buffer, sync
from relax_hpc.runtime.files.scratch import scratch_folder
from relax_hpc.runtime.paths import BusPaths
from relax_hpc.schema import (
    Columns,
    MediaKind,
    Medium,
    PromptGroup,
    Trajectory,
)

Kind = Literal["text", "images"]
NUM_GROUPS, SIBLINGS, MEAN_TOKENS, MAX_TOKENS = 128, 8, 4000, 8192
NUM_IMAGES, IMAGE_BYTES = 256, 1 << 20
VOCABULARY = 150_000


def text_groups() -> list[PromptGroup]:
    """1,024 ragged trajectories in groups of 8, up to 8k tokens."""
    rng = np.random.default_rng(0)
    return [
        PromptGroup(guid, [trajectory(rng, guid, sibling) for sibling in range(SIBLINGS)])
        for guid in range(NUM_GROUPS)
    ]


def image_groups() -> list[PromptGroup]:
    """256 trajectories of a few tokens, each with its own image of about 1 MiB."""
    rng = np.random.default_rng(1)
    groups = []
    for guid in range(NUM_IMAGES):
        size = int(IMAGE_BYTES * (0.85 + 0.3 * rng.random()))
        data = np.frombuffer(rng.bytes(size), np.uint8).copy()  # does not compress, like JPEG
        row = trajectory(rng, guid, 0, size=64)
        image = Medium(MediaKind.JPEG, data, (1, 74, 74))
        groups.append(PromptGroup(guid, [row._replace(media=(image,))]))
    return groups


GROUPS: dict[Kind, Callable[[], list[PromptGroup]]] = {"text": text_groups, "images": image_groups}


def renumber(groups: list[PromptGroup], first_guid: int) -> list[PromptGroup]:
    """Returns the same data as further prompts of a run."""
    return [
        PromptGroup(guid, [t._replace(guid=guid) for t in group.trajectories])
        for guid, group in enumerate(groups, first_guid)
    ]


def trajectory(
    rng: np.random.Generator, guid: int, sibling: int, size: int | None = None
) -> Trajectory:
    """Makes a row of random tokens; the default size is from a long tail."""
    if size is None:
        size = int(np.clip(rng.lognormal(np.log(MEAN_TOKENS) - 0.2, 0.6), 64, MAX_TOKENS))
    ids = rng.integers(0, VOCABULARY, size, dtype=np.int32)
    logprobs = -rng.random(size, dtype=np.float32)
    return row_of(ids, 32, logprobs, guid=guid, sibling=sibling)


TMPFS = Path("/dev/shm")
FIELD = "ragged/rollout_logprobs"
NAME, OTHER = "bench-0", "bench-1"
ATTRIBUTES: dict[str, Attribute] = {"producer": NAME, "fence": 1, "role": "rollout", "parent": ""}


def places(folder: Path | None) -> dict[str, Path]:
    """Returns the file system to measure, and memory for comparison."""
    found = {"disk": folder or Path(tempfile.gettempdir())}
    return found | ({"tmpfs": TMPFS} if TMPFS.is_dir() else {})


def measure(folder: Path | None, repeats: int) -> Iterator[ReportRow]:
    """Yields rows as they come; each repeat measures ours and raw in turns."""
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


class _Trial:
    def __init__(
        self, scratch: Path, kind: Kind, groups: list[PromptGroup], columns: Columns
    ) -> None:
        self._kind, self._groups, self._columns = kind, groups, columns
        self._shard, self._raw = scratch / "0.h5", scratch / "0.raw"
        self._bus = BusPaths(scratch / "bus")
        self._size = sum(column.nbytes for column in columns.values())

    def writes(self, place: str, repeats: int) -> Iterator[ReportRow]:
        layout.create(self._bus, [NAME, OTHER], {})
        log = LogWriter(self._bus.log(OTHER))
        seconds: dict[str, list[float]] = {"raw": [], "write": [], "commit": [], "put": []}
        guids = count(0, len(self._groups))
        with Producer(self._bus, NAME, {}) as producer:
            for repeat in range(repeats + 1):
                first = next(guids)
                groups = renumber(self._groups, first)
                actions: dict[str, Callable[[], object]] = {
                    "raw": lambda: _write_raw(self._raw, self._columns),
                    "write": lambda: shard_write.write(self._shard, self._columns, ATTRIBUTES),
                    "commit": lambda: self._commit(log),
                    "put": lambda groups=groups: producer.put(groups),  # type: ignore[misc]
                }
                time_in_turns(actions, seconds, repeat)
                producer.collect(first + len(groups))
        log.close()
        aim = 0.9 if place == "disk" else 0.75
        what = f"{self._kind}, {place}"
        size, raw = self._size, seconds["raw"]
        yield compare(f"write {what}", size, seconds["write"], raw, "raw", aim)
        yield compare(f"write and commit {what}", size, seconds["commit"], raw, "raw", aim)
        yield compare(f"put {what}, from trajectories", size, seconds["put"], raw, "raw", None)

    def _commit(self, log: LogWriter) -> None:
        info = shard_write.write(self._shard, self._columns, ATTRIBUTES)
        log.append(CommitRecord(RecordKind.BASE, log.fence, 0, "rollout", **info._asdict()))

    def reads(self, place: str, repeats: int) -> Iterator[ReportRow]:
        _write_raw(self._raw, self._columns)
        shard_write.write(self._shard, self._columns, ATTRIBUTES)
        sizes = [column.nbytes for column in self._columns.values()]
        field = self._columns[FIELD].nbytes
        names = ("raw", "unverified", "verified", "field", "raw field")
        seconds: dict[str, list[float]] = {name: [] for name in names}
        actions: dict[str, Callable[[], object]] = {
            "raw": lambda: _read_raw(self._raw, sizes),
            "unverified": lambda: read_shard(self._shard, verify=False),
            "verified": lambda: read_shard(self._shard),
            "field": lambda: read_shard(self._shard, verify=False, columns=[FIELD]),
            "raw field": lambda: _read_raw(self._raw, [field]),
        }
        for repeat in range(repeats + 1):
            time_in_turns(actions, seconds, repeat, fresh=True)
        what = f"{self._kind}, {place}"
        size, raw = self._size, seconds["raw"]
        yield compare(f"read {what}, unverified", size, seconds["unverified"], raw, "raw", 0.95)
        yield compare(f"read {what}, verified", size, seconds["verified"], raw, "raw", 0.75)
        if self._kind == "text":
            yield compare(
                f"read {what}, one column", field, seconds["field"], seconds["raw field"], "raw",
                1 / 1.2,
            )  # fmt: skip
        samples = [
            _seconds(lambda: read_shard(self._shard, rows=(77, 78))) for _ in range(5 * repeats)
        ]
        sample = statistics.median(samples) * 1e3
        yield ReportRow(f"read one sample, {what}, verified", sample, "ms", aim=1.0)


def _publishing(scratch: Path, place: str, repeats: int) -> Iterator[ReportRow]:
    """A group of 8: the time until it is committed, and until a reader of the log has it."""
    bus = BusPaths(scratch / "bus")
    layout.create(bus, [NAME], {})
    groups = GROUPS["text"]()[:1]
    put, seen = [], []
    with Producer(bus, NAME, {}) as producer:
        tail = LogTail(bus.log(NAME))
        tail.poll()
        for guid in range(4 * repeats):
            batch = renumber(groups, guid)
            put.append(_seconds(lambda batch=batch: producer.put(batch)))  # type: ignore[misc]
            seen.append(_seconds(tail.poll))
        tail.close()
    yield ReportRow(f"put one group, {place}", statistics.median(put) * 1e3, "ms", aim=10.0)
    yield ReportRow(f"commit -> visible, {place}", statistics.median(seen) * 1e3, "ms", aim=10.0)


def in_turns_order(names: list[str], repeat: int) -> list[str]:
    """Shuffles reproducibly, differently in each repeat."""
    return random.Random(repeat).sample(names, len(names))


def time_in_turns(
    actions: dict[str, Callable[[], object]],
    seconds: dict[str, list[float]],
    repeat: int,
    *,
    fresh: bool = False,
) -> None:
    """Times each action once, in another order per repeat; the first repeat is a warm-up.

    With `fresh` all of them allocate fresh pages; otherwise an action after a large free gets warm
    ones.
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


def read_shard(
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
