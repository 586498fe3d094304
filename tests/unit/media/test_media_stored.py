"""Media on the bus: stored once, read one by one, decoded again to what the policy was shown."""

import re

import h5py
import numpy as np
import pytest
from bus_fixtures import PRODUCERS, make_bus, trajectory
from media_files import clip, photo, recipe_of, seen, source, tone

from relax_hpc.bus.producer import Producer
from relax_hpc.bus.reader import Reader
from relax_hpc.bus.shards import media
from relax_hpc.bus.tools import inventory, verify
from relax_hpc.data.media import stored as stored_media
from relax_hpc.data.media.canonical import canonical, measure_medium
from relax_hpc.data.media.expand import MediaSpan, positions
from relax_hpc.data.media.stored import DECODERS, decoders, make_stored_array, read_stored
from relax_hpc.errors import BusError, DamagedError
from relax_hpc.schema import MediaKind, PromptGroup

SOURCES = {
    "jpeg": source(photo(form="JPEG")),
    "webp": source(photo(seed=2, form="WEBP")),
    "mp4": source(clip(range(40)), "video"),
    "frames": source(None, "video")._replace(
        frames=tuple(source(photo(48, 64, seed=n)) for n in range(8)), fps=4.0
    ),
    "sound": source(tone(), "audio"),
}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return recipe_of(folder, "qwen3_omni_moe", image_tokens=[4, 64], video_tokens_per_frame=[2, 16])


def made(each, recipe):
    found = measure_medium(each, recipe)
    return read_stored(found, canonical(found, recipe).digest)


@pytest.fixture
def jpeg(recipe):
    return made(SOURCES["jpeg"], recipe)


def group_of(guid, shown, siblings=8, tokens=20, spans=None):
    """Siblings that share their media, each written with two tokens."""
    spans = spans or [(n, 1 + 3 * n, 2) for n in range(len(shown))]
    spans = np.array(spans, np.int32).reshape(-1, 3)
    rows = [
        trajectory(guid, sibling, prompt=tokens)._replace(media=tuple(shown), media_spans=spans)
        for sibling in range(siblings)
    ]
    return PromptGroup(guid, rows)


def put(root, groups, **attributes):
    """Puts groups into one shard of a new bus; returns the bus and the file."""
    paths = make_bus(root)
    with Producer(paths, PRODUCERS[0], attributes) as producer:
        producer.put(groups)
    return paths, next(paths.root.glob("p/*/f*/*.h5"))


def read(paths, guid=0, place=0):
    reader = Reader(paths)
    [found] = reader.media(inventory.of_guid(paths, guid), [(0, place)])
    return found


def test_media_of_every_kind_come_back_and_are_decoded_to_the_same_array(tmp_path, recipe):
    shown = [made(each, recipe) for each in SOURCES.values()]
    paths, _ = put(tmp_path, [group_of(0, shown)], **{DECODERS: decoders()})
    record = inventory.of_guid(paths, 0)
    found = Reader(paths).media(record, [(row, n) for row in (7, 0) for n in range(len(shown))])
    assert [each.medium.kind.name for each in found[:5]] == ["JPEG", "WEBP", "MP4", "FRAMES", "WAV"]
    for each, given in zip(found, SOURCES.values(), strict=False):
        array = canonical(measure_medium(given, recipe), recipe).array
        assert np.array_equal(each.canonical(recipe).array, array)
    assert found[0].medium.data.tobytes() == SOURCES["jpeg"].data
    assert found[0].medium.data is found[5].medium.data  # of another sibling
    [row] = Reader(paths).rows(record, [3], media.FACTS)
    assert [m.data.size for m in row.media] == [0] * 5
    assert [m[2:] for m in row.media] == [m[2:] for m in shown]
    assert row.media[2].frames
    assert row.media_spans.tolist() == [[n, 1 + 3 * n, 2] for n in range(5)]


@pytest.mark.parametrize(
    "spans",
    [[(1, 0, 2)], [(0, 23, 2)], [(0, 3, 0)], [(0, 2, 3), (0, 4, 3)]],
)
def test_spans_outside_the_row_or_its_media_or_over_others_are_refused(tmp_path, jpeg, spans):
    wrong = re.escape(f"trajectory 0/0: span {[*spans[-1]]}")
    with pytest.raises(BusError, match=rf"{wrong} .*of a row of 24 tokens and 1 med"):
        put(tmp_path, [group_of(0, [jpeg], spans=spans)])


def changed(path, name, at):
    """Flips a bit of a column in the file."""
    with h5py.File(path, "r") as stock:
        at += stock[name].id.get_offset()
    whole = bytearray(path.read_bytes())
    whole[at] ^= 1
    path.write_bytes(whole)


def test_a_flipped_byte_is_named_by_medium_and_file(tmp_path, recipe):
    shown = [made(SOURCES[name], recipe) for name in ("jpeg", "webp")]
    paths, path = put(tmp_path, [group_of(0, shown)])
    changed(path, media.BYTES, shown[0].data.size + 9)
    with pytest.raises(DamagedError, match=rf"{path}: is corrupt: medium 1 \(WEBP, [\d,]+ bytes"):
        read(paths, place=1)
    assert read(paths, place=0).medium.data.size == shown[0].data.size
    with pytest.raises(DamagedError, match=r"block \d+ \(ragged/media_bytes\) does not match"):
        Reader(paths).rows(inventory.of_guid(paths, 0), [0])


def test_another_decoder_is_named_with_both_versions(tmp_path, recipe, jpeg):
    drifted = jpeg._replace(canonical_xxh3=bytes(range(16)))
    paths, path = put(tmp_path, [group_of(0, [drifted])], **{DECODERS: "pillow 9.0"})
    message = rf"{path}: medium 0 \(JPEG\): is decoded to .*0f: stored by pillow 9.0, read by pill"
    with pytest.raises(DamagedError, match=message):
        read(paths).canonical(recipe)


def wrong(paths):
    found = verify.verify(paths, lambda: [], lambda *_: None)
    return [(each.kind, each.what) for each in found.findings if each.harmful]


def test_verify_compares_media_with_their_digests(tmp_path, recipe, monkeypatch):
    """A digest that was wrong from the start has a right checksum."""
    shown = [made(SOURCES["jpeg"], recipe), made(SOURCES["webp"], recipe)]
    paths, _ = put(tmp_path / "sound", [group_of(0, shown)])
    assert wrong(paths) == []
    real = media.digest
    with monkeypatch.context() as patch:
        patch.setattr(media, "digest", lambda data: real(data[1:]))
        paths, _ = put(tmp_path / "wrong", [group_of(0, shown)])
    [(kind, what)] = wrong(paths)
    assert kind == "shard" and "medium 0 (JPEG, " in what and media.DIGEST in what


@pytest.mark.parametrize("span", [(1, 1, 2), (0, 19, 6)])
def test_verify_finds_spans_that_are_not_in_their_rows(tmp_path, jpeg, monkeypatch, span):
    """Rows of 24 tokens with one medium."""
    group = group_of(0, [jpeg], siblings=2, spans=[span])
    assert len(group.trajectories[0].token_ids) == 24
    monkeypatch.setattr(media, "_check_spans", lambda _: None)
    paths, _ = put(tmp_path, [group])
    [(kind, what)] = wrong(paths)
    assert kind == "shard" and f"{media.SPANS}: row 0 has {list(span)}" in what


@pytest.mark.parametrize("name", SOURCES)
def test_an_array_that_is_stored_needs_no_decoder(tmp_path, recipe, monkeypatch, name):
    expected = canonical(measure_medium(SOURCES[name], recipe), recipe)
    medium = make_stored_array(expected, expected.digest)
    assert medium.kind is MediaKind.TENSOR
    paths, _ = put(tmp_path, [group_of(0, [medium])])
    monkeypatch.setattr(stored_media, "canonical", pytest.fail)
    found = read(paths).canonical(recipe)
    assert np.array_equal(found.array, expected.array) and found.array.dtype == expected.array.dtype
    room = expected.extent._replace(times=())
    assert found.extent._replace(seconds_per_grid=0) == room._replace(seconds_per_grid=0)
    assert found.extent.seconds_per_grid == np.float32(room.seconds_per_grid)
    one, other = (
        positions(500, [MediaSpan(0, 5, sum(each.tokens))], [each], recipe)
        for each in (found.extent, expected.extent)
    )
    assert np.array_equal(one, other)


def test_an_array_that_is_not_of_its_digest_or_of_another_recipe_is_named(tmp_path, recipe):
    found = seen(SOURCES["jpeg"].data, recipe)
    paths, _ = put(tmp_path / "digest", [group_of(0, [make_stored_array(found, bytes(range(16)))])])
    with pytest.raises(DamagedError, match="medium 0: holds an array of digest"):
        read(paths).canonical(recipe)
    paths, _ = put(tmp_path / "patch", [group_of(0, [make_stored_array(found, found.digest)])])
    other = recipe._replace(image=recipe.image._replace(patch=8))
    with pytest.raises(DamagedError, match="use that of the run"):
        read(paths).canonical(other)
