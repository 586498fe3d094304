"""Images: what transformers makes of them, turned, over white, of every mode, in any process."""

import io
import itertools
import json
import os
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from media_files import (
    FOLDERS,
    VISION,
    clip,
    encoded,
    model_folder,
    photo,
    pixels,
    recipe_of,
    seen,
    source,
    tone,
)  # fmt: skip
from PIL import Image

from relax_hpc.config.prompts import MediaConfig
from relax_hpc.data.media.canonical import canonical, digest_of, measure_medium
from relax_hpc.data.media.decode import decode_image
from relax_hpc.data.media.expand import MediaSpan
from relax_hpc.data.media.extent import Extent
from relax_hpc.data.media.patches import patches
from relax_hpc.data.media.recipe import read_recipe
from relax_hpc.data.media.spool import MediaView, Spooled
from relax_hpc.schema import MediaKind, Medium, key_of_medium

EMPTY = np.empty(0, np.uint8)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return recipe_of(tmp_path_factory.mktemp("model"), "qwen3_vl", image_tokens=[4, 64])


def reference_of(recipe):
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    size = {"shortest_edge": recipe.image.least, "longest_edge": recipe.image.most}
    half = [0.5] * 3
    return Qwen2VLImageProcessorPil(patch_size=16, image_mean=half, image_std=half, size=size)


def assert_patches_are_those_of(reference, data, recipe):
    found = seen(data, recipe)
    with Image.open(io.BytesIO(data)) as image:
        expected = reference(images=[image.convert("RGB")], return_tensors="pt")
    ours = patches(torch.from_numpy(found.array.copy()), recipe.image, torch.float32)
    assert torch.equal(ours, expected["pixel_values"])
    assert [list(found.extent.grid)] == expected["image_grid_thw"].tolist()
    assert found.extent.tokens == (len(ours) // 4,)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP"])
def test_patches_are_bitwise_those_of_transformers(recipe, form):
    assert_patches_are_those_of(reference_of(recipe), photo(320, 210, form), recipe)


def test_patches_of_300_sizes_are_bitwise_those_of_transformers(tmp_path):
    """Made smaller, larger, and left as they are; of every shape up to 1 to 200."""
    recipe = recipe_of(tmp_path, "qwen3_vl", image_tokens=[2, 8])
    reference, bounds, kinds = reference_of(recipe), (recipe.image.least, recipe.image.most), set()
    random, noise = np.random.default_rng(0), pixels(300, 300)
    shapes = np.exp(random.uniform(0.7, 5.7, (400, 2))).astype(int).tolist()
    shapes = [each for each in shapes if max(each) <= 200 * min(each)][:300]
    for height, width in shapes:
        image = Image.fromarray(np.ascontiguousarray(noise[:height, :width]))
        assert_patches_are_those_of(reference, encoded(image, compress_level=0), recipe)
        kinds.add(int(np.searchsorted(bounds, height * width)))
    assert len(shapes) == 300 and kinds == {0, 1, 2}


@pytest.mark.parametrize("model_type", ["qwen3_vl", "qwen3_omni_moe"])
def test_bounds_that_neither_job_nor_model_says_are_those_of_relax(tmp_path, model_type):
    """4 to 16,384 tokens of an image, 128 to 768 of a frame, 2 frames a second, 4 to 768 of them,
    300 s of sound; of a family that bounds all frames together, 4 to 24,576 tokens."""
    folder = model_folder(tmp_path, model_type)
    for name in FOLDERS[model_type]:
        if "preprocessor" in name:
            (folder / name).write_text(json.dumps(VISION))
    found, area = read_recipe(folder, MediaConfig()), 32 * 32
    assert (found.image.least, found.image.most) == (4 * area, 16_384 * area)
    frames = (4, 24_576) if model_type == "qwen3_vl" else (128, 768)
    video = found.video
    assert (video.vision.least, video.vision.most) == tuple(n * area for n in frames)
    assert (video.fps, video.least_frames, video.most_frames) == (2.0, 4, 768)
    assert found.audio is None if model_type == "qwen3_vl" else found.audio.max_s == 300


GREY = Image.fromarray(pixels(40, 64)[:, :, 0])
COLOUR = Image.fromarray(pixels(40, 64))
ALPHA = Image.fromarray(np.full((40, 64), 128, np.uint8))
DEEP = Image.fromarray(np.asarray(GREY).astype(np.uint16) * 257)


def with_alpha(image):
    image.putalpha(ALPHA)
    return image


def over_white(image):
    """Half of the colour, half of white, to a level."""
    return (np.asarray(image.convert("RGB")).astype(int) * 128 + 255 * 127 + 127) // 255


MODES = {
    "1": (encoded(GREY.convert("1")), GREY.convert("1").convert("RGB")),
    "I;16": (encoded(DEEP), GREY.convert("RGB")),
    "LA": (encoded(with_alpha(GREY.copy())), over_white(GREY)),
    "P": (encoded(COLOUR.quantize(16)), COLOUR.quantize(16).convert("RGB")),
    "RGB": (encoded(COLOUR), COLOUR),
    "RGBA": (encoded(with_alpha(COLOUR.copy())), over_white(COLOUR)),
    "RGB, JPEG": (encoded(COLOUR, "JPEG", quality=100, subsampling=0), COLOUR),
    "CMYK, JPEG": (encoded(COLOUR.convert("CMYK"), "JPEG", quality=100), COLOUR),
}


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_becomes_rgb_of_8_bits_over_white(recipe, mode):
    data, expected = MODES[mode]
    found = decode_image(source(data))
    assert found.mode == "RGB" and found.size == (64, 40)
    lossy = {"RGB, JPEG": 6, "CMYK, JPEG": 12}.get(mode, 0)
    off = np.abs(np.asarray(found).astype(int) - np.asarray(expected).astype(int))
    assert off.max() <= max(lossy, 1 if "A" in mode else 0)
    assert seen(data, recipe).array.dtype == np.uint8


def png(kind, bits, row, transparent=None):
    """A PNG of one row, in bits that Pillow does not write."""

    def chunk(name, data):
        crc = zlib.crc32(name + data)
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", crc)

    levels = np.asarray(row, ">u2")
    wide = levels.size // {0: 1, 2: 3, 4: 2, 6: 4}[kind]
    unpacked = np.unpackbits(levels.view(np.uint8).reshape(-1, 2), axis=1)[:, 16 - bits :]
    data = b"\0" + np.packbits(unpacked).tobytes()
    made = b"\x89PNG\r\n\x1a\n"
    made += chunk(b"IHDR", struct.pack(">IIBBBBB", wide, 1, bits, kind, 0, 0, 0))
    if transparent is not None:
        made += chunk(b"tRNS", np.asarray(transparent, ">u2").tobytes())
    return made + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")


def greys(*levels):
    return [[level] * 3 for level in levels]


DARK = [0x0210, 0x0320, 0x0430]
SINGLED_OUT = {
    "grey of 4 bits": (png(0, 4, [0, 3, 4, 10], [3]), greys(0, 255, 68, 170)),
    "colour of 16 bits": (
        png(2, 16, [*DARK, 0x1000, 0x2000, 0x3000, 0x0310, 0x0320, 0x0430], DARK),
        [[255] * 3, [16, 32, 48], [3, 3, 4]],
    ),
    "colour and alpha of 16 bits": (
        png(6, 16, [*DARK, 0, *DARK, 0xFFFF, 0, 0, 0, 0x8000]), [[255] * 3, [2, 3, 4], [127] * 3],
    ),
}  # fmt: skip
"""PNGs with a transparent colour or alpha, and their pixels over white."""


@pytest.mark.parametrize("what", SINGLED_OUT)
def test_what_is_transparent_is_white_in_any_number_of_bits(what):
    data, expected = SINGLED_OUT[what]
    assert np.asarray(decode_image(source(data)))[0].tolist() == expected


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_photo_is_turned_as_its_camera_was_held(recipe, orientation):
    upright = np.zeros((40, 64, 3), np.uint8)
    upright[:10, :10] = 255
    undo = {1: lambda a: a, 2: np.fliplr, 3: lambda a: np.rot90(a, 2), 4: np.flipud,
            5: lambda a: a.transpose(1, 0, 2), 6: np.rot90, 8: lambda a: np.rot90(a, 3),
            7: lambda a: np.rot90(a, 2).transpose(1, 0, 2)}[orientation]  # fmt: skip
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(Image.fromarray(np.ascontiguousarray(undo(upright))), exif=exif)
    medium = measure_medium(source(data), recipe)
    assert (medium.facts.height, medium.facts.width) == (40, 64)
    array = canonical(medium, recipe).array[0]
    assert array[4, 4].min() > 200 and array[-4, 4].max() < 50 and array[4, -4].max() < 50


def test_the_digest_is_of_pixels_and_shape_and_nothing_else(recipe):
    data = photo(64, 64)
    with Image.open(io.BytesIO(data)) as image:
        again = encoded(image, "WEBP", lossless=True)
    found, same = seen(data, recipe), seen(again, recipe)
    assert found.digest == same.digest and len(found.digest) == 16
    assert found.digest != found._replace(array=found.array.transpose(0, 2, 1, 3)).digest
    assert found.digest != found._replace(array=found.array.reshape(1, 32, 128, 3)).digest
    assert found.digest != seen(photo(64, 64, seed=1), recipe).digest


def test_ten_thousand_images_of_one_size_have_keys_of_their_own():
    """They differ in one level of one pixel. Digest, key of features, of prefixes, and on the bus;
    the features of other weights, and the same images the other way round."""
    base = np.random.default_rng(0).integers(0, 250, (1, 32, 32, 3)).astype(np.uint8)
    extent = Extent("image", (1,), (32, 32), (1, 2, 2))
    spooled = []
    for number in range(10_000):
        array = base.copy()
        array.reshape(-1)[number % base.size] += 1 + number // base.size
        spooled.append(Spooled(extent, digest_of(array), Path("a")))
    assert len({each.digest for each in spooled}) == 10_000
    assert len({each.features_key(version) for each in spooled for version in (0, 1)}) == 20_000
    spans = (MediaSpan(0, 3, 1), MediaSpan(1, 9, 1))
    views = [MediaView((each,), spans[:1]) for each in spooled]
    views += [
        MediaView(pair, spans) for a, b in itertools.pairwise(spooled) for pair in ((a, b), (b, a))
    ]
    assert len({view.digest for view in views}) == len(views) == 29_998
    media = [Medium(MediaKind.PNG, EMPTY, extent.grid, each.digest) for each in spooled]
    assert len({key_of_medium(SimpleNamespace(media=(m,), guid=0), 0) for m in media}) == 10_000


PROGRAM = """
import sys
from pathlib import Path
from relax_hpc.config.prompts import MediaConfig
from relax_hpc.data.media.canonical import canonical, measure_medium
from relax_hpc.data.media.recipe import read_recipe
from relax_hpc.data.media.source import MediaSource
recipe = read_recipe(Path(sys.argv[1]), MediaConfig(video_frames=[2, 8]))
for name in sys.argv[2:]:
    medium = MediaSource("x", name.partition("-")[0], path=Path(sys.argv[1]) / name)
    print(canonical(measure_medium(medium, recipe), recipe).digest.hex())
print("torch" in sys.modules)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = model_folder(tmp_path_factory.mktemp("model"), "qwen3_omni_moe")
    (made / "image-1").write_bytes(photo(500, 700, "JPEG"))
    (made / "video-1").write_bytes(clip(range(20)))
    (made / "audio-1").write_bytes(tone(0.7, 44100))
    return made


def digests_of(folder, names):
    recipe = read_recipe(folder, MediaConfig(video_frames=[2, 8]))
    made = (seen((folder / n).read_bytes(), recipe, n.partition("-")[0]) for n in names)
    return [each.digest.hex() for each in made]


def in_a_process(folder, threads, names):
    command = [sys.executable, "-c", PROGRAM, str(folder), *names]
    count = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    ran = subprocess.run(
        command, env=os.environ | count, capture_output=True, text=True, check=True
    )
    return ran.stdout.split()


def test_digests_are_the_same_in_fresh_processes_with_one_and_two_threads(folder):
    seen = ["image-1", "video-1"]
    *one, has_torch = in_a_process(folder, 1, seen)
    assert has_torch == "False", "pixels are made without torch"
    *two, _ = in_a_process(folder, 2, [*seen, "audio-1"])
    assert [*one, two[-1]] == two == digests_of(folder, [*seen, "audio-1"])
    assert len(set(two)) == 3
