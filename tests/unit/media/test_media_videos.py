"""Videos and sounds: which frames, how large, in what time; one channel, and its mel spectrum."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from media_files import clip, cut, of_transformers, photo, recipe_of, seen, source, tone
from PIL import Image

from relax_hpc.data.media import decode
from relax_hpc.data.media.canonical import canonical, measure_medium
from relax_hpc.data.media.decode import decode_sound, mel
from relax_hpc.data.media.extent import (
    audio_tokens,
    count_resampled,
    fit_video,
    frame_indices,
)
from relax_hpc.data.media.patches import patches
from relax_hpc.errors import ConfigError

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


@pytest.mark.parametrize(("turned", "quarters"), [(40, 0), (50, 1), (-50, 3), (-140, 2)])
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


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return recipe_of(tmp_path_factory.mktemp("model"), "qwen3_omni_moe")


def sound(data):
    return source(data, "audio")


@pytest.mark.parametrize("count", [400, 799, 16000, 700000])
def test_a_spectrum_is_that_of_transformers_whatever_is_heard(recipe, count):
    """Noise, and noise that the loudest tone nearly hides; longer than what is done at once."""
    from transformers import WhisperFeatureExtractor

    extractor = WhisperFeatureExtractor(feature_size=128, chunk_length=300)
    random = np.random.default_rng(count)
    for loud in (0.0, 0.5):
        tone_ = loud * np.sin(np.arange(count) / 5)
        samples = (tone_ + random.normal(0, 1e-3, count)).astype(np.float32)
        exact = extractor._np_extract_fbank_features(samples[None], "cpu")[0]
        assert np.abs(mel(samples, recipe.audio) - exact).max() < 4e-7


def test_what_is_computed_at_once_changes_no_bit(recipe, monkeypatch):
    samples = np.random.default_rng(1).normal(0, 0.1, 20000).astype(np.float32)
    whole = mel(samples, recipe.audio)
    monkeypatch.setattr(decode, "_AT_ONCE", 7)
    assert np.array_equal(mel(samples, recipe.audio), whole)


def test_tokens_are_those_of_transformers_for_every_length():
    from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import (
        _get_feat_extract_output_lengths,
    )

    lengths = np.arange(1, 1000)
    expected = _get_feat_extract_output_lengths(lengths)
    assert [audio_tokens(int(n), 100) for n in lengths] == expected.tolist()


@pytest.mark.parametrize(
    ("form", "rate"), [("WAV", 16000), ("FLAC", 44100), ("OGG", 44100), ("MP3", 44100)]
)
def test_every_encoding_and_rate_is_the_same_tone(recipe, form, rate):
    data = tone(0.8, rate, channels=2, form=form)
    medium = measure_medium(sound(data), recipe)
    samples = decode_sound(sound(data), recipe.audio)
    assert medium.facts.kind.name == form
    loudest = np.abs(np.fft.rfft(samples)).argmax() * 16000 / len(samples)
    assert abs(loudest - 440) < 3 and np.abs(samples).max() == pytest.approx(0.225, abs=0.03)
    assert canonical(medium, recipe).array.shape[1] == medium.extent.mel_frames


def test_as_many_samples_are_told_as_a_resampler_makes():
    soxr = pytest.importorskip("soxr")
    for rate in (8000, 22050, 44100, 48000):
        for count in (401, 1000, 12345, 33333, 44099):
            made = soxr.resample(np.zeros(count, np.float32), rate, 16000)
            assert count_resampled(count, rate, 16000) == len(made), (rate, count)


@pytest.mark.parametrize("held_s", [0.9, 1.1])
def test_a_sound_that_holds_less_or_more_than_its_header_says_is_refused(recipe, held_s):
    said = measure_medium(sound(tone(1.0)), recipe)
    with pytest.raises(ConfigError, match=f"says 100 mel frames, and holds {held_s * 100:.0f}"):
        canonical(said._replace(source=sound(tone(held_s))), recipe)
