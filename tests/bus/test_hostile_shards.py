"""Shards whose checksums are right and whose content is not: who wrote them wanted that."""

import json
import struct

import crc32c
import h5py
import numpy as np
import pytest
from bus_fixtures import group, make_bus, produce

from relax_hpc.bus.sequencer import Sequencer
from relax_hpc.bus.shards import hdf5, shard_write
from relax_hpc.bus.shards.encode import to_columns
from relax_hpc.bus.shards.shard import Shard
from relax_hpc.bus.shards.shard_format import CODEC, HEADER, Field
from relax_hpc.errors import DamagedError


def rewrite(path, change):
    """Changes the table of a shard, and its checksums with it."""
    raw = path.read_bytes()
    head = list(HEADER.unpack_from(raw))
    table = json.loads(raw[HEADER.size : HEADER.size + head[6]])
    crcs = raw[HEADER.size + head[6] :][: 4 * head[7]]
    changed = change(table)
    body = (changed if isinstance(changed, bytes) else json.dumps(table).encode()) + crcs
    head[6], head[8] = len(body) - len(crcs), crc32c.crc32c(body)
    front = HEADER.pack(*head[:9], 0)[:-4]
    new = front + struct.pack("<I", crc32c.crc32c(front)) + body
    path.write_bytes(new.ljust(head[2], b"\0") + raw[head[2] :])


def says(name, **facts):
    return lambda table: table["fields"][name].update(facts)


def lacks(*keys):
    def change(table):
        for key in keys[:-1]:
            table = table[key]
        del table[keys[-1]]

    return change


TABLES = {
    "no JSON": lambda _: b"{{",
    "nested": lambda _: b"[" * 100_000,
    "a list": lambda _: b"[1]",
    "no attributes": lacks("attributes"),
    "no dtype": lacks("fields", "row/guid", "dtype"),
    "another key": says("row/guid", more=1),
    "objects": says("row/guid", dtype="O"),
    "no such dtype": says("row/guid", dtype="zzz"),
    "another dtype": says("row/guid", dtype="<f8"),
    "no dimension": says("row/guid", shape=[]),
    "words": says("row/guid", shape=["a"]),
    "fewer rows": says("row/guid", shape=[0], nbytes=0),
    "many rows": says("row/guid", shape=[1 << 40], nbytes=8 << 40),
    "two dimensions": says("row/guid", shape=[1, 2]),
    "fewer offsets": says("index/offsets", shape=[1], nbytes=8),
    "fewer bytes": says("row/guid", nbytes=3),
    "before the file": says("row/guid", offset=-100),
    "behind the file": says("row/guid", offset=1 << 50),
    "no checksum": says("row/guid", slot=1 << 30),
    "a checksum from behind": says("row/guid", slot=-1),
    "a codec": says("row/guid", codec=CODEC),
}


@pytest.mark.parametrize("change", TABLES.values(), ids=TABLES)
def test_a_table_that_cannot_be_is_damage_and_the_groups_are_sampled_again(tmp_path, change):
    paths = make_bus(tmp_path)
    produce(paths, "rollout-0", [0])
    rewrite(paths.shard("rollout-0", 1, 0), change)
    with Sequencer(paths, prompts_per_step=2, position=None) as seq:
        seq.look()
        assert [guid for guid, _ in seq._intake.dropped] == [-1]


def test_offsets_that_lead_out_of_a_column_are_damage(tmp_path):
    path = tmp_path / "s.h5"
    columns = to_columns([group(0)])
    shard_write.write(path, columns, {"producer": "x"})
    name = "ragged/token_ids"
    rewrite(path, says(name, shape=[2], nbytes=8))
    rows = len(columns["row/guid"])
    with Shard(path) as shard, pytest.raises(DamagedError, match=f"of 2 of {name}"):
        shard.read_rows(name, 0, rows)


def external(file, other):
    file.create_group("row")["guid"] = h5py.ExternalLink(other.name, "/row/guid")


def external_group(file, other):
    file["row"] = h5py.ExternalLink(other.name, "/row")


def soft(file, _):
    whole(file, name="other")
    file.create_group("row")["guid"] = h5py.SoftLink("/other")


def outside(file, other):
    file.create_dataset("row/guid", (9,), "i8", external=[(str(other), 0, 72)])


def virtual(file, other):
    layout = h5py.VirtualLayout((9,), "i8")
    layout[:] = h5py.VirtualSource(other, "row/guid", shape=(9,))
    file.create_group("row").create_virtual_dataset("guid", layout)


def plain(file, _):
    file["row/guid"] = np.arange(9)


def deflated(file, _):
    file.create_dataset("row/guid", data=np.arange(9), compression="gzip")


def longer(file, _):
    whole(file, size=10)


def a_group(file, _):
    file.create_group("row/guid")


def whole(file, size=9, name="row/guid"):
    filters = {"compression": hdf5.ZSTD, "compression_opts": (1,), "shuffle": True}
    file.create_dataset(name, data=np.arange(size), fletcher32=True, **filters)


KINDS = (external, external_group, soft, outside, virtual, plain, deflated, longer, a_group)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_hdf5_is_not_led_to_other_files_nor_past_the_checksums(tmp_path, kind):
    other = tmp_path / "of_the_reader"
    with h5py.File(other, "w") as file:
        file["row/guid"] = np.arange(9)
    with pytest.raises(OSError, match="libhdf5"):
        read(tmp_path, lambda file: kind(file, other))
    assert read(tmp_path, whole).tolist() == [2, 3]


def read(folder, make):
    path = folder / "made.h5"
    with h5py.File(path, "w", libver=("v110", "v110")) as file:
        make(file)
    raw = path.read_bytes()

    def pread(out, at):
        part = raw[at : at + len(out)]
        out[: len(part)] = part
        return len(part)

    field = Field("<i8", (9,), 0, 72, 0, CODEC)
    return hdf5.read_compressed(pread, len(raw), "row/guid", field, slice(2, 4))
