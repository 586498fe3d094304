"""Shards: what is put in comes back, damage is found, and only what is asked for is read."""

import errno
import os
import struct
from pathlib import Path

import crc32c
import h5py
import hdf5plugin  # noqa: F401 - stock h5py reads zstd through it
import numpy as np
import pytest
from bus_fixtures import group, same, trajectory
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_hpc.bus.shards import media, shard_write
from relax_hpc.bus.shards.encode import from_columns, gather, to_columns
from relax_hpc.bus.shards.shard import HEAD_READ, Memory, Shard
from relax_hpc.bus.shards.shard_format import BLOCK, CODEC, HEADER
from relax_hpc.bus.tools import show
from relax_hpc.errors import BusError
from relax_hpc.runtime.files import storage
from relax_hpc.schema import NO_EXPERT, OFFSETS, MediaKind, Medium, PromptGroup, columns_of

ATTRIBUTES = {
    "producer": "rollout-0", "fence": 1, "seq": 4, "run": "test", "role": "rollout", "parent": "",
}  # fmt: skip
EXPERTS = "ragged/routed_experts"
WIDTH = 6


def write(path, groups):
    columns = to_columns(groups)
    return columns, shard_write.write(path, columns, ATTRIBUTES)


def test_large_columns_begin_on_a_page_and_others_where_the_last_one_ended(tmp_path):
    around = []
    for tokens, of_pages in ((9, []), (9_000, []), (300_000, ["token_ids", "rollout_logprobs"])):
        path = tmp_path / f"{tokens}.h5"
        row = trajectory(0, 0, prompt=tokens, response=0)
        columns, info = write(path, [PromptGroup(0, [row])])
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


def test_a_descriptor_that_the_server_forgot_is_opened_anew(tmp_path, monkeypatch):
    write(tmp_path / "s.h5", [group(0)])
    read, close = os.preadv, os.close
    with Shard(tmp_path / "s.h5") as shard:
        forgotten = {shard._fd}

        def preadv(fd, *rest):
            if fd in forgotten:
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            return read(fd, *rest)

        monkeypatch.setattr(os, "preadv", preadv)
        monkeypatch.setattr(os, "close", lambda fd: (forgotten.discard(fd), close(fd)))
        monkeypatch.setattr(storage._terms, "patience_s", 2.0)
        assert shard._pread(memoryview(bytearray(9)), 0) == 9 and not forgotten


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


def test_columns_of_another_dtype_or_length_are_refused(tmp_path):
    columns = to_columns([group(0)])
    for name, values in [
        ("row/guid", columns["row/guid"].astype(np.int32)),
        ("ragged/loss_mask", columns["ragged/loss_mask"][:-1]),
        ("row/unheard_of", columns["row/guid"]),
        ("row/guid", columns["row/guid"][:-1]),
        ("index/offsets__runs", columns["index/offsets__runs"][:-1]),
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
    "places", [[(0, 0), (0, 2)], [(0, 0), (1, 1)], [(1, 0)], [(0, 0), (1, 0), (0, 1)]]
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


# media, routed experts and compressed columns: large, shared, and read only when asked for


def image(seed, size=5000, kind=MediaKind.JPEG):
    data = np.random.default_rng(seed).integers(0, 256, size).astype(np.uint8)
    frames = tuple(range(0, 3 * (seed % 3), 3))
    return Medium(kind, data, (1, seed % 7, 3), bytes([seed + 1] * 16), frames, 0.5 * len(frames))


def experts(guid, sibling, prompt, response, *, own_prompt=False):
    shared = np.random.default_rng([guid, 99, sibling if own_prompt else 0])
    own = np.random.default_rng([guid, sibling])
    parts = [shared.integers(0, 128, (prompt, WIDTH)), own.integers(0, 128, (response, WIDTH))]
    return np.concatenate(parts).astype(np.int16)


def rich(guid, siblings, *, prompt=3, shown=(), own_prompt=(), more=None):
    """A prompt group with media and routed experts; responses of the given lengths.

    `more` is, by sibling, the (prompt, response) lengths of the further sequences of its episode.
    """
    rows = []
    for sibling, response in enumerate(siblings):
        t = trajectory(guid, sibling, prompt=prompt, response=response)
        own = sibling in own_prompt
        routed = experts(guid, sibling, prompt, response, own_prompt=own)
        spans = [(n, n, 1) for n in range(min(len(shown), prompt))]
        spans = np.array(spans, np.int32).reshape(-1, 3)
        rows.append(t._replace(media=tuple(shown), media_spans=spans, routed_experts=routed))
        for segment, (before, after) in enumerate((more or {}).get(sibling, ()), start=1):
            t = trajectory(guid, sibling, segment=segment, prompt=before, response=after)
            # Begins as the group's prompt does, as far as it goes.
            routed = experts(guid, sibling, before, after, own_prompt=before % 2)
            rows.append(t._replace(routed_experts=routed))
    return PromptGroup(guid, rows)


def rows_of(groups):
    return [t for g in groups for t in g.trajectories]


def equal(a, b):
    """`bus_fixtures.same` for what lies one level deeper."""
    media_equal = len(a.media) == len(b.media) and all(map(same, a.media, b.media))
    return media_equal and same(a._replace(media=()), b._replace(media=()))


shapes = st.lists(
    st.tuples(
        st.lists(st.integers(0, 6), min_size=1, max_size=4),  # responses
        st.integers(0, 5),  # prompt
        st.lists(st.integers(0, 3), max_size=3),  # which media
        st.sets(st.integers(0, 3)),  # siblings whose prompt took another way
        st.dictionaries(  # sibling -> (prompt, response) of further sequences
            st.integers(0, 3), st.lists(st.tuples(st.integers(0, 9), st.integers(0, 6)), max_size=2)
        ),
    ),
    min_size=1,
    max_size=4,
)


@given(shapes, st.booleans(), st.data())
@settings(max_examples=80, deadline=None)
def test_media_and_experts_of_any_shape_come_back_whole_and_in_any_span(
    tmp_path_factory, shape, packed, data
):
    groups = [
        rich(
            guid,
            responses,
            prompt=prompt,
            shown=[image(s, 40 * s) for s in shown],
            own_prompt=own,
            more=more,
        )
        for guid, (responses, prompt, shown, own, more) in enumerate(shape)
    ]
    rows = rows_of(groups)
    path = tmp_path_factory.mktemp("media") / "s.h5"
    compress = {EXPERTS} if packed else ()
    info = shard_write.write(path, gather(groups), ATTRIBUTES, compress=compress)
    lo = data.draw(st.integers(0, len(rows)))
    hi = data.draw(st.integers(lo, len(rows)))
    columns = to_columns(groups)
    with Shard(path) as shard, h5py.File(path, "r", locking=False) as stock:
        assert shard.info == info
        assert [stock.attrs[name] for name in ("n_samples", "shard_uuid", "seq")] == [
            len(rows), info.uuid, 4,
        ]  # fmt: skip
        for name, values in columns.items():
            np.testing.assert_array_equal(shard.read(name), values)
            np.testing.assert_array_equal(stock[name][...], values)
            assert shard.read(name).dtype == values.dtype == stock[name].dtype
        assert shard.fields[EXPERTS].codec == (CODEC if packed else "")
        found = from_columns(shard.read_span(lo, hi))
    assert len(found) == hi - lo
    assert all(map(equal, found, rows[lo:hi]))


def test_each_sequence_of_an_episode_has_the_experts_of_its_own_prompt_once():
    groups = [
        rich(0, [4], prompt=6, more={0: [(6, 2), (9, 3)]}),
        rich(1, [1, 2], more={1: [(8, 1)]}),
    ]
    columns = to_columns(groups)
    # 6 + 4, then 2 of a prompt that went the same way, and a longer one whole; then the next group.
    assert np.diff(columns[OFFSETS["routed"]]).tolist() == [10, 2, 12, 4, 2, 9]
    assert all(map(equal, from_columns(columns), rows_of(groups)))


def test_a_row_without_experts_among_others_has_none_for_every_token():
    first, other = rich(3, [2, 2]).trajectories
    bare = first._replace(routed_experts=None)
    for rows in ([first, other._replace(routed_experts=None)], [bare, other]):
        found = from_columns(to_columns([PromptGroup(3, rows)]))
        for row, before in zip(found, rows, strict=True):
            experts = before.routed_experts
            if experts is None:
                experts = np.full((len(row.token_ids), first.routed_experts.shape[1]), NO_EXPERT)
            assert np.array_equal(row.routed_experts, experts)


def test_experts_of_only_some_tokens_are_refused():
    row = rich(3, [2]).trajectories[0]
    short = row._replace(routed_experts=row.routed_experts[:-1])
    with pytest.raises(BusError, match=r"trajectory 3/0: routed experts of every token"):
        gather([PromptGroup(3, [short])])


def test_an_image_shown_by_sixteen_rows_is_stored_once_and_hashes_as_before(tmp_path):
    one, other = image(1, 3 * BLOCK // 2), image(2)
    again = one._replace(data=one.data.copy())
    groups = [rich(0, [1] * 16, shown=[one]), rich(1, [1] * 2, shown=[other, again])]
    path = tmp_path / "s.h5"
    info = shard_write.write(path, gather(groups), ATTRIBUTES)
    assert info.length < one.data.nbytes + other.data.nbytes + 100_000
    with Shard(path) as shard:
        assert shard.fields["media/kind"].shape == (2,)
        span = shard.read_span(0, 18)
        found = from_columns(span)
    assert found[0].media[0].data is found[15].media[0].data
    for row in found[:16]:
        assert media.digest(row.media[0].data) == media.digest(one.data)
    assert [m.data.tobytes() for m in found[17].media] == [other.data.tobytes(), one.data.tobytes()]
    assert bytes(span["media/xxh3"][0]) == media.digest(one.data)


def test_digest_is_the_xxh3_128_that_other_languages_compute():
    # From the reference implementation: XXH128 of the empty input, seed 0.
    assert media.digest(np.zeros(0, np.uint8)).hex() == "99aa06d3014798d86001c324468d497f"


class ReadBytes:
    """Counts what os.preadv is asked for, by place in the file."""

    def __init__(self, monkeypatch):
        self.spans = []
        real = os.preadv

        def counted(fd, buffers, offset, *flags):
            got = real(fd, buffers, offset, *flags)
            self.spans.append((offset, offset + got))
            return got

        monkeypatch.setattr(os, "preadv", counted)

    def touching(self, field):
        lo, hi = field.offset, field.offset + field.nbytes
        return sum(max(0, min(b, hi) - max(a, lo)) for a, b in self.spans)


def test_a_reader_that_does_not_want_media_or_experts_touches_none_of_their_bytes(
    tmp_path, monkeypatch
):
    groups = [rich(g, [3] * 4, shown=[image(g, BLOCK)]) for g in range(4)]
    shard_write.write(tmp_path / "s.h5", gather(groups), ATTRIBUTES)
    read = ReadBytes(monkeypatch)
    with Shard(tmp_path / "s.h5") as shard:
        pixels = shard.fields[media.BYTES]
        found = from_columns(shard.read_span(0, 16, columns_of("rollout")))
        assert read.touching(pixels) <= HEAD_READ < pixels.nbytes  # the header's read may overlap
        assert sum(b - a for a, b in read.spans) < 2 * HEAD_READ
        assert all(not t.media and t.routed_experts is None for t in found)
        read.spans.clear()
        one = from_columns(shard.read_span(9, 10))[0]
        # One of four media, between the edges of the blocks that are checked.
        assert BLOCK <= read.touching(pixels) <= 2 * BLOCK
    assert equal(one, rows_of(groups)[9])


def test_memory_used_again_gives_the_same_and_is_the_same(tmp_path):
    groups = [rich(g, [3] * 4, shown=[image(g, BLOCK)]) for g in range(3)]
    shard_write.write(tmp_path / "s.h5", gather(groups), ATTRIBUTES)
    memory, rows, places = Memory(), rows_of(groups), []
    for _ in range(3):
        memory.reset()
        with Shard(tmp_path / "s.h5", memory=memory) as shard:
            span = shard.read_span(0, 12)
        assert all(map(equal, from_columns(span), rows))
        places.append(span[media.BYTES].ctypes.data)
    assert places[1] == places[2]


def compressed(path):
    """Experts of 2.3 MiB: several chunks."""
    groups = [rich(0, [100_000, 100_000], prompt=9)]
    shard_write.write(path, gather(groups), ATTRIBUTES, compress={EXPERTS})
    return groups


def test_compression_takes_less_room_and_needs_the_newer_format(tmp_path):
    groups = compressed(tmp_path / "packed.h5")
    shard_write.write(tmp_path / "plain.h5", gather(groups), ATTRIBUTES)
    sizes = {name: (tmp_path / f"{name}.h5").stat().st_size for name in ("packed", "plain")}
    assert sizes["plain"] - sizes["packed"] > to_columns(groups)[EXPERTS].nbytes * 0.45
    formats = [HEADER.unpack_from((tmp_path / f"{name}.h5").read_bytes())[1] for name in sizes]
    assert formats == [2, 1]
    with Shard(tmp_path / "packed.h5") as shard:
        assert not shard.fields["row/guid"].codec


@given(st.booleans(), st.data())
@settings(max_examples=150, deadline=None)
def test_any_flipped_bit_or_truncation_is_an_error_never_data(tmp_path_factory, packed, data):
    path = tmp_path_factory.mktemp("damage") / "s.h5"
    if packed:
        compressed(path)
        with h5py.File(path, "r", locking=False) as stock:
            column = stock[EXPERTS].id
            chunks = [column.get_chunk_info(i) for i in range(column.get_num_chunks())]
        assert len(chunks) > 2
        spans = [(chunk.byte_offset, chunk.size) for chunk in chunks]
    else:
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
    with pytest.raises(BusError, match=r"s\.h5: is "), Shard(path) as shard:
        shard.verify()
