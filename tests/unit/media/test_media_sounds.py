"""Sound: one channel at the model's rate, and transformers' mel spectrum of it."""

import numpy as np
import pytest
from media_files import recipe_of, seen, source, tone

from relax_hpc.data.media import decode
from relax_hpc.data.media.canonical import canonical, measure_medium
from relax_hpc.data.media.decode import decode_sound, mel
from relax_hpc.data.media.extent import audio_tokens, count_resampled
from relax_hpc.errors import ConfigError


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return recipe_of(tmp_path_factory.mktemp("model"), "qwen3_omni_moe")


def sound(data):
    return source(data, "audio")


@pytest.mark.parametrize("seconds", [0.4, 1.0, 1.23456])
def test_mel_and_tokens_are_those_of_transformers(recipe, seconds):
    from transformers import WhisperFeatureExtractor
    from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import (
        _get_feat_extract_output_lengths,
    )

    data = tone(seconds)
    found = seen(data, recipe, "audio")
    extractor = WhisperFeatureExtractor(feature_size=128, chunk_length=300)
    samples = decode_sound(sound(data), recipe.audio)
    # As Qwen3OmniMoeProcessor asks it: audio_kwargs.
    expected = extractor(
        [samples], sampling_rate=16000, padding=True, truncation=False,
        return_attention_mask=True, return_tensors="np",
    )  # fmt: skip
    # By torch, in float32, where there is torch; in float64 without it, which is what we do.
    apart = np.abs(found.array - expected["input_features"][0])
    assert apart.max() < 1e-4 and apart.mean() < 2e-6
    exact = extractor._np_extract_fbank_features(samples[None], "cpu")[0]
    assert np.abs(found.array - exact).max() < 4e-7
    frames = expected["attention_mask"].sum()
    assert found.extent.tokens == (_get_feat_extract_output_lengths(frames),)
    assert found.array.shape == (128, frames)


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


@pytest.mark.parametrize("form", ["WAV", "FLAC", "OGG", "MP3"])
@pytest.mark.parametrize("rate", [16000, 44100])
def test_every_encoding_and_rate_is_the_same_tone(recipe, form, rate):
    data = tone(0.8, rate, channels=2, form=form)
    medium = measure_medium(sound(data), recipe)
    samples = decode_sound(sound(data), recipe.audio)
    assert medium.facts.kind.name == form
    loudest = np.abs(np.fft.rfft(samples)).argmax() * 16000 / len(samples)
    assert abs(loudest - 440) < 3 and np.abs(samples).max() == pytest.approx(0.225, abs=0.03)
    assert canonical(medium, recipe).array.shape[1] == medium.extent.mel_frames


def test_the_mean_of_two_channels_is_taken(recipe):
    samples = decode_sound(sound(tone(0.1, channels=2, loud=0.4)), recipe.audio)
    assert np.allclose(samples, decode_sound(sound(tone(0.1, loud=0.3)), recipe.audio), atol=1e-4)


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
