"""Decodes a medium to its canonical array, from which engine and trainer make a model's input."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from relax_hpc.data.media import decode
from relax_hpc.data.media.decode import mel
from relax_hpc.data.media.extent import Extent, extent_of, interleave
from relax_hpc.data.media.kinds import MediaFacts
from relax_hpc.data.media.recipe import Recipe
from relax_hpc.data.media.source import MediaSource
from relax_hpc.errors import ConfigError
from relax_hpc.schema import Array

MOST_ASPECT = 200
MOST_PIXELS = 2**27
"""Most pixels of an image or frame; more is an attack, or a mistake."""
MOST_RATE = 768_000
"""Highest sampling rate: memory is allocated as the header says."""
LEAST_S = 0.025
"""Shortest sound in seconds: a window of the mel spectrum."""


class Measured(NamedTuple):
    source: MediaSource
    facts: MediaFacts
    extent: Extent


class Canonical(NamedTuple):
    extent: Extent
    array: Array
    """Image: uint8 [1, height, width, 3]; video: uint8 [frames, height, width, 3]; sound: float32
    [bins, frames]."""

    @property
    def digest(self) -> bytes:
        """[16] XXH3-128 of the array's type, shape and content."""
        return digest_of(self.array)


def measure_medium(source: MediaSource, recipe: Recipe) -> Measured:
    """Reads the header of a medium, and computes its extent.

    Raises:
        ConfigError: the medium cannot be used, or a library to read it is missing.
    """
    try:
        facts = _facts(source, recipe)
    except ImportError as error:
        raise _missing(error) from None
    return _check(source, facts, recipe)


def measure_media(sources: Sequence[MediaSource], recipe: Recipe) -> tuple[Measured, ...]:
    """Reads the headers of media; if videos are heard, a video's sound follows it as a medium.

    Raises:
        ConfigError: as `measure_medium`, for the first unusable one.
    """
    found = list[Measured]()
    for source in sources:
        medium = measure_medium(source, recipe)
        sound = _sound_of(medium, recipe)
        if sound is None:
            found.append(medium)
            continue
        extents = interleave(medium.extent, sound.extent, recipe.positions_per_s)
        found += [m._replace(extent=e) for m, e in zip((medium, sound), extents, strict=True)]
    return tuple(found)


def canonical(medium: Measured, recipe: Recipe) -> Canonical:
    """Decodes a medium.

    Raises:
        ConfigError: it cannot be decoded, or contradicts its header.
    """
    source, facts, extent = medium
    try:
        if extent.modality == "image":
            array: Array = decode.resize(decode.decode_image(source), extent.size)[None]
        elif extent.modality == "video":
            array = decode.decode_video(source, facts, extent)
        else:
            assert recipe.audio is not None
            array = mel(decode.decode_sound(source, recipe.audio), recipe.audio)
    except ImportError as error:
        raise _missing(error) from None
    if extent.modality == "audio" and array.shape[1] != extent.mel_frames:
        raise source.make_error(
            f"says {extent.mel_frames} mel frames, and holds {array.shape[1]}; write it again, "
            "e.g. ffmpeg -i it it.flac"
        )
    return Canonical(extent, array)


def try_out(medium: Measured, recipe: Recipe) -> None:
    """Decodes a medium as far as it may fail: skips the resizing of images, which takes longest.

    Raises:
        ConfigError: as `canonical`.
    """
    if medium.extent.modality != "image":
        canonical(medium, recipe)
        return
    try:
        decode.decode_image(medium.source)
    except ImportError as error:
        raise _missing(error) from None


def digest_of(array: Array) -> bytes:
    import xxhash

    digest = xxhash.xxh3_128(f"{array.dtype.str} {array.shape}".encode())
    digest.update(np.ascontiguousarray(array).data)
    return digest.digest()


def _sound_of(medium: Measured, recipe: Recipe) -> Measured | None:
    """Returns the sound of a video; None for other media, or without sound."""
    source, facts, _ = medium
    if not recipe.audio_in_video or facts.modality != "video" or source.frames:
        return None
    heard = decode.sound_facts(source.its_sound)
    return _check(source.its_sound, heard, recipe) if heard.sampling_rate else None


def _check(source: MediaSource, facts: MediaFacts, recipe: Recipe) -> Measured:
    """Refuses a medium that no model should be shown, by its header.

    Raises:
        ConfigError: its shape, length or rate is outside what the recipe allows.
    """
    if facts.modality == "audio":
        _check_length(source, facts, recipe)
    else:
        _check_size(source, facts.height, facts.width)
    if facts.modality == "video":
        _check_frames(source, facts, recipe)
    return Measured(source, facts, extent_of(facts, recipe))


def _check_size(source: MediaSource, height: int, width: int) -> None:
    if min(height, width) < 2:
        raise source.make_error(f"has {width} x {height} pixels; replace it, or remove the line")
    if height * width > MOST_PIXELS:
        raise source.make_error(
            f"has {width:,} x {height:,} pixels, more than {MOST_PIXELS:,}; make it smaller"
        )
    if max(height, width) > MOST_ASPECT * min(height, width):
        raise source.make_error(
            f"has {width:,} x {height:,} pixels: one side is more than {MOST_ASPECT} times the "
            "other; crop it"
        )


def _check_frames(source: MediaSource, facts: MediaFacts, recipe: Recipe) -> None:
    video = recipe.video
    if facts.num_frames < 1:
        raise source.make_error("has no frames; replace it, or remove the line")
    if facts.fps <= 0:
        raise source.make_error(
            "does not say how many frames it has a second; write it again, e.g. ffmpeg -i it -r 30"
        )
    least = max(video.least_frames, video.vision.time)
    if facts.num_frames < least:
        raise source.make_error(
            f"has {facts.num_frames} frames, fewer than prompts.media.video_frames = [{least}, "
            f"{video.most_frames}]; lower it, or remove the line"
        )


def _check_length(source: MediaSource, facts: MediaFacts, recipe: Recipe) -> None:
    assert recipe.audio is not None, "models that do not hear are given no sound"
    if facts.sampling_rate > MOST_RATE:
        raise source.make_error(
            f"has {facts.sampling_rate:,} samples a second, more than {MOST_RATE:,}; write it "
            "again, e.g. ffmpeg -i it -ar 48000"
        )
    length_s = facts.num_samples / facts.sampling_rate
    if length_s < LEAST_S:
        raise source.make_error(
            f"has {length_s:g} s of sound, fewer than {LEAST_S}; replace it, or remove the line"
        )
    if length_s > recipe.audio.max_s:
        raise source.make_error(
            f"has {length_s:.1f} s of sound, prompts.media.advanced.audio_max_s = "
            f"{recipe.audio.max_s:g}; cut it, or raise that"
        )


def _facts(source: MediaSource, recipe: Recipe) -> MediaFacts:
    if source.modality == "image":
        return decode.image_facts(source)
    if source.modality == "video":
        return decode.video_facts(source, recipe)
    return decode.sound_facts(source)


def _missing(error: ImportError) -> ConfigError:
    return ConfigError(f"media need the package {error.name}; pip install 'relax-hpc[media]'")
