"""Is the file of a commit record what was committed, to the last byte?"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import h5py
import numpy as np

from relax_hpc.bus.log import RecordKind
from relax_hpc.bus.plan import Part
from relax_hpc.bus.shards import media
from relax_hpc.bus.shards.shard import Shard
from relax_hpc.bus.shards.shard_format import ROW_OFFSETS, Field
from relax_hpc.bus.tools.findings import Commit, Finding
from relax_hpc.errors import BusError
from relax_hpc.schema import COLUMNS, columns_of

Planned = Sequence[tuple[int, Part]]
"""The prompt groups that the plan takes from a shard."""


def check_shard(
    path: Path, commit: Commit, planned: Planned, parent: Path | None
) -> Iterator[Finding]:
    """Reads a shard from end to end.

    Args:
        planned: what the plan says lies where in it.
        parent: the shard it widens, while that is on disk.
    """
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
        yield Finding("shard", str(path), _without(path, error))


def _stranger(shard: Shard, commit: Commit) -> Finding | None:
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


def _columns(shard: Shard, commit: Commit) -> Iterator[Finding]:
    role = commit.record.role
    lacking = [name for name in columns_of(role) if name not in shard.fields]
    if lacking and commit.record.kind is not RecordKind.PARTIAL:
        yield Finding("shard", str(shard.path), f"lacks {', '.join(lacking)}, which {role} writes")
    others = [n for n in shard.fields if n in COLUMNS and COLUMNS[n].writer != role]
    if others:
        yield Finding("shard", str(shard.path), f"holds {', '.join(others)}, not {role}'s to write")


def _hdf5(shard: Shard) -> Iterator[Finding]:
    """Checks that other HDF5 tools find the same: libhdf5 has checksums of its own metadata."""
    what = "HDF5 finds it damaged ({}), though relax-hpc can read it; restore the file"
    try:
        with h5py.File(shard.path, "r", locking=False) as file:
            differ = [name for name, field in shard.fields.items() if not _same(file[name], field)]
            differ += [n for n, value in shard.attributes.items() if file.attrs[n] != value]
    except (OSError, KeyError, RuntimeError) as error:
        differ = [str(error)]
    if differ:
        yield Finding("shard", str(shard.path), what.format(", ".join(differ)))


def _same(dataset: h5py.Dataset, field: Field) -> bool:
    same = (dataset.dtype, dataset.shape) == (np.dtype(field.dtype), field.shape)
    plain = not field.codec and field.nbytes
    return same and (not plain or dataset.id.get_offset() == field.offset)


def _groups(shard: Shard, commit: Commit, planned: Planned) -> Iterator[Finding]:
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


def _without(path: Path, error: BusError) -> str:
    return str(error).removeprefix(f"{path}: ")
