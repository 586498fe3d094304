"""Videos: which frames, how large, in what time; MP4, WEBM and lists of images."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from media_files import clip, cut, of_transformers, photo, recipe_of, seen, source
from PIL import Image

from relax_hpc.data.media.canonical import canonical, measure_medium
from relax_hpc.data.media.extent import extent_of, fit_video, frame_indices
from relax_hpc.data.media.kinds import MediaFacts
from relax_hpc.data.media.patches import patches
from relax_hpc.schema import MediaKind

EVEN = list(range(40))
LENGTHS = list(itertools.product([4, 5, 7, 30, 299, 2000, 5001], [1.0, 7.5, 24.0, 30000 / 1001]))


@pytest.fixture(scope="module")
def recipes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {name: recipe_of(folder, name) for name in ("qwen3_vl", "qwen3_omni_moe")}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    settings = {"video_frames": [2, 16], "video_tokens_per_frame": [2, 6]}
    return recipe_of(tmp_path_factory.mktemp("small"), "qwen3_vl", **settings)


@pytest.fixture(scope="module")
def mp4():
    return clip(EVEN)


def vl_reference():
    module = "qwen3_vl/video_processing_qwen3_vl"
    names = "smart_resize", "Qwen3VLVideoProcessor.sample_frames", "Qwen3VLVideoProcessor.patchify"
    return of_transformers(module, *names)


def test_frames_of_qwen3_vl_are_those_of_transformers(recipes):
    settings = SimpleNamespace(fps=2, min_frames=4, max_frames=768)
    _, sample, _ = vl_reference()
    for count, fps in LENGTHS:
        metadata = SimpleNamespace(total_num_frames=count, fps=fps)
        expected = sample(settings, metadata)
        assert frame_indices(count, fps, recipes["qwen3_vl"]) == tuple(expected), (count, fps)


def test_frames_of_qwen3_omni_are_those_of_transformers(recipes):
    [sample] = of_transformers(
        "qwen2_vl/video_processing_qwen2_vl", "Qwen2VLVideoProcessor.sample_frames"
    )
    settings = SimpleNamespace(
        fps=2.0, min_frames=4, max_frames=768, num_frames=None, temporal_patch_size=2
    )
    lengths = [*LENGTHS, *((count, 30.0) for count in range(60, 2000, 7))]
    # Of 30 frames 22, and all such: in float64 other frames would be taken of 2.5 % of them.
    lengths += [(n, 2.0 * n / taken) for n in range(4, 90) for taken in range(4, n, 2)]
    for count, fps in lengths:
        expected = sample(settings, SimpleNamespace(total_num_frames=count, fps=fps)).tolist()
        if expected[-1] == count:  # transformers' arange has one too many, which is no frame
            expected.pop()
        found = frame_indices(count, fps, recipes["qwen3_omni_moe"])
        assert found == tuple(expected), (count, fps)


def test_sizes_of_qwen3_vl_are_those_of_transformers(recipes):
    smart_resize, _, _ = vl_reference()
    video = recipes["qwen3_vl"].video
    random = np.random.default_rng(1)
    for _ in range(300):
        frames = int(random.integers(2, 768))
        height, width = np.exp(random.uniform(2.5, 7.6, 2)).astype(int).tolist()
        bounds = {"min_pixels": video.vision.least, "max_pixels": video.vision.most}
        expected = smart_resize(frames, height, width, 2, 32, **bounds)
        assert fit_video(frames, height, width, video) == expected, (frames, height, width)


def test_tokens_of_a_frame_bound_its_pixels(tmp_path):
    bound = {name: recipe_of(tmp_path, name, video_tokens_per_frame=[20, 30])
             for name in ("qwen3_vl", "qwen3_omni_moe")}  # fmt: skip
    for recipe in bound.values():
        for height, width in ((64, 64), (1080, 1920)):
            found = extent_of(MediaFacts("video", MediaKind.MP4, height, width, 300, 30.0), recipe)
            assert 20 <= found.size[0] * found.size[1] / 32**2 <= 30
            assert sum(found.tokens) == len(found.frames) / 2 * found.size[0] * found.size[1] / 1024


def test_patches_of_a_clip_are_those_of_transformers_and_its_last_frame_fills_up(small, mp4):
    found = seen(mp4, small, "video")
    _, _, patchify = vl_reference()
    for count in (7, 8):
        array = torch.from_numpy(found.array[:count].copy())
        batch = (((array / 255) - 0.5) / 0.5).permute(0, 3, 1, 2)[None]
        expected, *grid = patchify(None, batch, 16, 2, 2)
        ours = patches(array, small.video.vision, torch.float32)
        assert (ours - expected[0]).abs().max() <= 2**-23 and grid[0] == 4
        assert ours.shape == expected[0].shape


def grey_levels(array):
    return [round((int(frame[-1, -1, 0]) - 20) / 20) for frame in array]


@pytest.mark.parametrize("form", ["mp4", "webm"])
def test_the_frames_that_are_said_are_those_that_are_taken(small, mp4, form):
    data = mp4 if form == "mp4" else clip(EVEN, form=form)
    medium = measure_medium(source(data, "video"), small)
    facts = medium.facts
    assert (facts.kind.name, facts.num_frames, facts.fps) == (form.upper(), 40, 10)
    assert medium.extent.frames == (0, 6, 11, 17, 22, 28, 33, 39)
    assert medium.extent.times == pytest.approx([0.3, 1.4, 2.5, 3.6])
    found = canonical(medium, small).array
    assert found.shape == (8, *medium.extent.size, 3)
    assert grey_levels(found) == [n % 11 for n in medium.extent.frames]


@pytest.mark.parametrize(("begin", "end"), [(0, 20), (5, 40), (15, 40), (15, 30)])
def test_of_a_clip_that_was_cut_the_frames_that_are_left_are_all(small, mp4, begin, end):
    """The header counts those that are not shown, too."""
    medium = measure_medium(source(cut(mp4, begin / 10, end / 10), "video"), small)
    assert (medium.facts.num_frames, medium.facts.fps) == (end - begin, 10)
    found = canonical(medium, small).array
    assert grey_levels(found) == [(begin + n) % 11 for n in medium.extent.frames]
    assert medium.extent.frames[-1] == end - begin - 1


@pytest.mark.parametrize(("turned", "quarters"), [(40, 0), (50, 1), (89, 1), (-50, 3), (-140, 2)])
def test_a_clip_that_is_not_turned_by_quarters_is_by_the_nearest(small, turned, quarters):
    upright, skew = (seen(clip(EVEN, turned=each), small, "video").array for each in (0, turned))
    assert np.array_equal(skew, np.rot90(upright, quarters, (1, 2)))


@pytest.mark.parametrize(("turned", "corner"), [(90, (-1, 0)), (180, (-1, -1)), (-90, (0, -1))])
def test_a_clip_is_turned_as_its_file_says(small, turned, corner):
    medium = measure_medium(source(clip(EVEN, turned=turned), "video"), small)
    assert (medium.facts.height, medium.facts.width) == ((64, 48) if turned % 180 else (48, 64))
    first = canonical(medium, small).array[0, :, :, 0].astype(int)
    ends = {place: first[place] for place in itertools.product([0, -1], repeat=2)}
    assert max(ends, key=ends.get) == corner


def frames_of(count, **more):
    frames = tuple(source(photo(48, 64, seed=n))._replace(place=f"frame {n}") for n in range(count))
    return source(None, "video")._replace(frames=frames, **more)


def test_a_list_of_images_is_a_video_at_the_rate_that_the_row_or_the_job_says(small):
    whole = measure_medium(frames_of(5), small)
    assert whole.extent.frames == (0, 1, 2, 3, 4) and whole.facts.fps == small.video.fps
    assert whole.extent.times == (0.25, 1.25, 2.0)
    found = canonical(whole, small).array
    image = Image.open(whole.source.frames[3].open_bytes()).resize(whole.extent.size[::-1], 3)
    assert np.array_equal(found[3], np.asarray(image))
    assert measure_medium(frames_of(8, fps=4.0), small).extent.frames == (0, 2, 5, 7)
