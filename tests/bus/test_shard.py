import os
import struct
from pathlib import Path

import crc32c
import h5py
import numpy as np
import pytest
from bus_fixtures import group, same, trajectory
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_hpc.bus.shards import shard_write
from relax_hpc.bus.shards.encode import from_columns, to_columns
from relax_hpc.bus.shards.shard import Shard
from relax_hpc.bus.shards.shard_format import BLOCK, HEADER
from relax_hpc.bus.tools import show
from relax_hpc.errors import BusError
from relax_hpc.schema import COLUMNS, OFFSETS, FinishReason, PromptGroup, columns_of

ATTRIBUTES = {"producer": "rollout-0", "fence": 1, "seq": 4, "run": "test", "parent": ""}


def write(path, groups):
    columns = to_columns(groups)
    return columns, shard_write.write(path, columns, ATTRIBUTES)


lengths = st.tuples(st.integers(0, 9), st.integers(0, 9))
ragged_groups = st.lists(st.lists(lengths, min_size=1, max_size=4), min_size=1, max_size=5)


def build(shape):
    return [
        PromptGroup(
            guid, [trajectory(guid, s, prompt=p, response=r) for s, (p, r) in enumerate(siblings)]
        )
        for guid, siblings in enumerate(shape)
    ]


@given(ragged_groups)
@settings(max_examples=40, deadline=None)
def test_any_ragged_shape_comes_back_exactly_and_stock_h5py_reads_the_same(tmp_path_factory, shape):
    groups = build(shape)
    path = tmp_path_factory.mktemp("shard") / "s.h5"
    columns, info = write(path, groups)
    rows = [t for g in groups for t in g.trajectories]
    with Shard(path) as shard, h5py.File(path, "r", locking=False) as stock:
        assert shard.info == info
        for name, values in columns.items():
            assert shard.read(name).dtype == values.dtype == stock[name].dtype
            np.testing.assert_array_equal(shard.read(name), values)
            np.testing.assert_array_equal(stock[name][...], values)
        assert stock.attrs["n_samples"] == len(rows)
        assert stock.attrs["shard_uuid"] == info.uuid
        assert stock.attrs["seq"] == 4
        assert all(map(same, from_columns(shard.read_span(0, len(rows))), rows))
        for i, row in enumerate(rows):
            assert same(from_columns(shard.read_span(i, i + 1))[0], row)
    path.unlink()


def read_with_stock_tools(path):
    """All a stranger needs: h5py and docs/bus.md."""
    rows = []
    with h5py.File(path, "r", locking=False) as file:
        tokens, runs = file["index/offsets"][:], file["index/offsets__runs"][:]
        for i in range(file.attrs["n_samples"]):
            lo, hi = tokens[i], tokens[i + 1]
            row = {name: file[f"row/{name}"][i] for name in file["row"]}
            for name in ("token_ids", "loss_mask", "rollout_logprobs"):
                row[name] = file[f"ragged/{name}"][lo:hi]
            row["version_runs"] = file["ragged/version_runs"][runs[i] : runs[i + 1]]
            rows.append(row)
    return rows


def test_a_reader_of_ten_lines_of_h5py_gets_every_trajectory(tmp_path):
    groups = [group(5), group(9, response=0)]
    write(tmp_path / "s.h5", groups)
    found = read_with_stock_tools(tmp_path / "s.h5")
    assert len(found) == 4
    for row, t in zip(found, (t for g in groups for t in g.trajectories), strict=True):
        assert (row["guid"], row["sibling"], row["seed"]) == (t.guid, t.sibling, t.seed)
        assert row["rewards"] == t.reward
        assert row["response_len"] == len(t.token_ids) - t.prompt_len
        assert row["token_ids"].tolist() == t.token_ids.tolist()
        assert row["rollout_logprobs"].tobytes() == t.columns["rollout_logprobs"].tobytes()
        assert row["version_runs"].tolist() == t.version_runs.tolist()


def test_a_shard_holds_every_required_column_of_the_schema(tmp_path):
    columns, _ = write(tmp_path / "s.h5", [group(0)])
    assert set(columns_of("rollout")) == set(columns) - set(OFFSETS.values())
    assert all(columns[name].dtype == COLUMNS[name].dtype for name in columns_of("rollout"))


def test_large_columns_begin_on_a_page_and_others_where_the_last_one_ended(tmp_path):
    around = []
    for tokens, of_pages in ((9, []), (9_000, []), (300_000, ["token_ids", "rollout_logprobs"])):
        path = tmp_path / f"{tokens}.h5"
        columns, info = write(path, build([[(tokens, 0)]]))
        with Shard(path) as shard:
            assert not any(shard.fields[f"ragged/{name}"].offset % 4096 for name in of_pages)
        around.append(info.length - sum(values.nbytes for values in columns.values()))
    assert around[1] - around[0] < 2048, "HDF5 takes room for small columns 2 KiB at a time"
    assert around[2] - around[0] < 2048 + 2 * 4096


def test_turns_are_those_that_were_written_whatever_the_mask_says():
    """A mask that leaves sampled tokens out, as of a row that is too old, changes no turn."""
    turns = np.array([[0, 0], [2, 1], [4, 2], [6, 1]], np.int32)
    t = trajectory(0, 0, prompt=2, response=5)._replace(turns=turns)
    t = t._replace(loss_mask=np.array([0, 0, 0, 1, 0, 0, 0], np.uint8))
    columns = to_columns([PromptGroup(0, [t, trajectory(0, 1, prompt=3, response=0)])])
    assert columns["ragged/turns"].tolist() == [*turns.tolist(), [0, 0]]
    assert columns["index/offsets__turns"].tolist() == [0, 4, 5]
    assert [row.turns.tolist() for row in from_columns(columns)] == [turns.tolist(), [[0, 0]]]
    plain = [t._replace(turns=None), trajectory(0, 1, prompt=0, response=2)._replace(turns=None)]
    columns = to_columns([PromptGroup(0, plain)])
    assert columns["ragged/turns"].tolist() == [[0, 0], [2, 1], [0, 1]]


def test_versions_of_a_row_are_the_oldest_and_newest_that_sampled_it():
    runs = np.array([[3, 6], [4, 5], [6, 8]], np.int32)
    columns = to_columns([PromptGroup(0, [trajectory(0, 0)._replace(version_runs=runs)])])
    assert columns["row/policy_version_min"].tolist() == [5]
    assert columns["row/policy_version_max"].tolist() == [8]


def large_shard(path):
    """Token columns of 2.5 MiB, so that blocks have edges inside."""
    n = (5 << 20) // 8
    rows = [trajectory(0, s, prompt=7, response=n // 3) for s in range(3)]
    write(path, [PromptGroup(0, rows)])
    return rows


def test_row_ranges_across_block_edges_are_exact(tmp_path):
    rows = large_shard(tmp_path / "s.h5")
    for verify in (True, False):
        with Shard(tmp_path / "s.h5", verify=verify) as shard:
            assert shard.fields["ragged/token_ids"].nbytes > 2 * BLOCK
            for lo, hi in [(0, 1), (1, 2), (1, 3), (0, 3), (2, 2)]:
                expected = [t.token_ids for t in rows[lo:hi]] or [np.zeros(0, np.int32)]
                np.testing.assert_array_equal(
                    shard.read_rows("ragged/token_ids", lo, hi), np.concatenate(expected)
                )


def test_damage_is_found_in_the_block_that_holds_it_and_only_there(tmp_path):
    path = tmp_path / "s.h5"
    large_shard(path)
    with Shard(path) as shard:
        flip(path, shard.fields["ragged/token_ids"].offset + 2 * BLOCK + 17)
        shard.read_rows("ragged/token_ids", 0, 1)
        with pytest.raises(BusError, match=r"s\.h5: is corrupt.*ragged/token_ids"):
            shard.read_rows("ragged/token_ids", 2, 3)


def flip(path, at, bit=3):
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_any_flipped_bit_or_truncation_is_an_error_never_data(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("damage") / "s.h5"
    write(path, [group(3, response=300), group(4)])
    with Shard(path) as shard:
        spans = [(f.offset, f.nbytes) for f in shard.fields.values() if f.nbytes]
    header = HEADER.unpack_from(path.read_bytes())
    spans.append((0, HEADER.size + header[6] + 4 * header[7]))
    if data.draw(st.booleans(), "truncate"):
        os.truncate(path, data.draw(st.integers(0, path.stat().st_size - 1)))
    else:
        offset, size = data.draw(st.sampled_from(spans))
        flip(path, offset + data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, 7)))
    with pytest.raises(BusError, match=r"s\.h5"), Shard(path) as shard:
        shard.verify()


def newer_format(path):
    data = bytearray(path.read_bytes())
    struct.pack_into("<I", data, 8, 3)
    struct.pack_into("<I", data, HEADER.size - 4, crc32c.crc32c(bytes(data[: HEADER.size - 4])))
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.write_bytes(b""), "is empty: its writer died"),
        (lambda path: path.write_bytes(b"PK\x03\x04" + bytes(100)), "is not a shard .*shards lie"),
        (newer_format, "is shard format 3, this relax-hpc reads up to 2"),
        (lambda path: path.write_bytes(bytes(4096)), "is torn"),
        (lambda path: os.truncate(path, path.stat().st_size - 1), "is torn"),
        (lambda path: flip(path, 20), "is corrupt: the header"),
        (lambda path: flip(path, HEADER.size + 5), "is corrupt: the field table"),
        (Path.unlink, "cannot be opened: No such file"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_with_its_path(tmp_path, damage, message):
    path = tmp_path / "s.h5"
    write(path, [group(0)])
    damage(path)
    with pytest.raises(BusError, match=rf"s\.h5: {message}"):
        show.shard(path)


def test_an_hdf5_file_of_someone_else_is_called_foreign(tmp_path):
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["row/guid"] = np.arange(3)
    with pytest.raises(BusError, match="is not a shard"):
        show.shard(tmp_path / "other.h5")


def test_columns_of_another_dtype_or_length_are_refused(tmp_path):
    columns = to_columns([group(0)])
    for name, values in [
        ("row/guid", columns["row/guid"].astype(np.int32)),
        ("ragged/loss_mask", columns["ragged/loss_mask"][:-1]),
        ("row/unheard_of", columns["row/guid"]),
    ]:
        with pytest.raises(BusError, match=name):
            shard_write.write(tmp_path / "s.h5", {**columns, name: values}, ATTRIBUTES)
    assert list(tmp_path.iterdir()) == []


def test_groups_must_be_whole_and_in_order():
    full = group(0)
    with pytest.raises(BusError, match=r"rows are \[\(1, 0\), \(0, 0\)\]"):
        to_columns([PromptGroup(0, full.trajectories[::-1])])
    short = full.trajectories[0]._replace(loss_mask=np.zeros(3, np.uint8))
    with pytest.raises(BusError, match="trajectory 0/0"):
        to_columns([PromptGroup(0, [short])])


@pytest.mark.parametrize(
    "places",
    [
        [(0, 1), (1, 0)],
        [(0, 0), (0, 2)],
        [(0, 0), (0, 0)],
        [(0, 0), (1, 1)],
        [(0, 0), (2, 0)],
        [(1, 0)],
        [(0, 0), (1, 0), (0, 1)],
        [(-1, 1), (0, 0)],
    ],
)
def test_rows_of_a_group_are_by_sibling_and_segment(places):
    rows = [trajectory(0, 0)._replace(sibling=at[0], segment=at[1]) for at in places]
    with pytest.raises(BusError, match=r"\(sibling, segment\) of its rows are"):
        to_columns([PromptGroup(0, rows)])


def test_an_episode_of_several_sequences_comes_back_with_their_order_and_one_reward(tmp_path):
    places = [(0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (2, 1)]
    rows = [trajectory(7, sibling, segment=segment) for sibling, segment in places]
    write(tmp_path / "s.h5", [PromptGroup(7, rows), group(8)])
    with Shard(tmp_path / "s.h5") as shard:
        assert shard.read("row/segment").tolist() == [0, 1, 2, 0, 0, 1, 0, 0]
        found = from_columns(shard.read_span(0, 8))
        assert [(row.sibling, row.segment) for row in found[:6]] == places
        assert all(map(same, found[:6], rows))
    rows[2] = rows[2]._replace(reward=0.5)
    with pytest.raises(BusError, match=r"sibling 0: .* segments 1 and 2 have 0 and 0\.5"):
        to_columns([PromptGroup(7, rows)])


def test_show_prints_attributes_columns_and_rows(tmp_path):
    write(tmp_path / "s.h5", [group(41_000_000, version=6)])
    text = show.shard(tmp_path / "s.h5").splitlines()
    assert any(line.split() == ["producer", "rollout-0"] for line in text)
    logprobs = next(line for line in text if line.startswith("ragged/rollout_logprobs"))
    assert logprobs.split()[1:5] == ["float32", "14", "56", "rollout"]
    assert text[-1].split() == [
        "1",
        "41000000",
        "1",
        "0",
        "1",
        "0",
        "6",
        "6",
        "3",
        "4",
        FinishReason.STOP.name.lower(),
    ]
