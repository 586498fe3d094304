"""The canonical form of a medium: the array that engine and trainer make a model's input of."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from relax_hpc.errors import ConfigError
from relax_hpc.media import images, limits, sounds, videos
from relax_hpc.media.extent import Extent, extent_of, interleaved
from relax_hpc.media.facts import Facts
from relax_hpc.media.mel import mel
from relax_hpc.media.recipe import Recipe
from relax_hpc.media.source import Source
from relax_hpc.schema import Array


class Measured(NamedTuple):
    """A medium whose header was read."""

    source: Source
    facts: Facts
    extent: Extent


class Canonical(NamedTuple):
    extent: Extent
    array: Array
    """uint8 [1, height, width, 3] of an image, uint8 [frames, height, width, 3] of a video, float32
    [bins, frames] of a sound."""

    @property
    def digest(self) -> bytes:
        """[16] XXH3-128 of the type, the shape and the content of the array."""
        return digest_of(self.array)


def measured(source: Source, recipe: Recipe) -> Measured:
    """Reads the header of a medium, and computes the room that it takes.

    Raises:
        ConfigError: the medium cannot be used, or a library that reads it is missing.
    """
    try:
        facts = _facts(source, recipe)
    except ImportError as error:
        raise _missing(error) from None
    return _checked(source, facts, recipe)


def measured_all(sources: Sequence[Source], recipe: Recipe) -> tuple[Measured, ...]:
    """Reads the headers of media; the sound of a video, if videos are heard, is one of its own, and
    comes after it.

    Raises:
        ConfigError: as `measured`, of the first that cannot be used.
    """
    found = list[Measured]()
    for source in sources:
        medium = measured(source, recipe)
        sound = _sound_of(medium, recipe)
        if sound is None:
            found.append(medium)
            continue
        extents = interleaved(medium.extent, sound.extent, recipe.positions_per_s)
        found += [m._replace(extent=e) for m, e in zip((medium, sound), extents, strict=True)]
    return tuple(found)


def canonical(medium: Measured, recipe: Recipe) -> Canonical:
    """Decodes a medium.

    Raises:
        ConfigError: it cannot be decoded, or is not what its header says.
    """
    source, facts, extent = medium
    try:
        if extent.modality == "image":
            array: Array = images.resized(images.decoded(source), extent.size)[None]
        elif extent.modality == "video":
            array = videos.decoded(source, facts, extent)
        else:
            assert recipe.audio is not None
            array = mel(sounds.decoded(source, recipe.audio), recipe.audio)
    except ImportError as error:
        raise _missing(error) from None
    if extent.modality == "audio" and array.shape[1] != extent.mel_frames:
        raise source.refused(
            f"says {extent.mel_frames} mel frames, and holds {array.shape[1]}; write it again, "
            "e.g. ffmpeg -i it it.flac"
        )
    return Canonical(extent, array)


def try_out(medium: Measured, recipe: Recipe) -> None:
    """Decodes a medium as far as it may fail: an image is not resized, which takes longest.

    Raises:
        ConfigError: as `canonical`.
    """
    if medium.extent.modality != "image":
        canonical(medium, recipe)
        return
    try:
        images.decoded(medium.source)
    except ImportError as error:
        raise _missing(error) from None


def digest_of(array: Array) -> bytes:
    """Returns the identity of a canonical array; see `Canonical.digest`."""
    import xxhash

    digest = xxhash.xxh3_128(f"{array.dtype.str} {array.shape}".encode())
    digest.update(np.ascontiguousarray(array).data)
    return digest.digest()


def _sound_of(medium: Measured, recipe: Recipe) -> Measured | None:
    """The sound of a video; None of other media, and where there is none."""
    source, facts, _ = medium
    if not recipe.audio_in_video or facts.modality != "video" or source.frames:
        return None
    heard = sounds.read_facts(source.its_sound)
    return _checked(source.its_sound, heard, recipe) if heard.sampling_rate else None


def _checked(source: Source, facts: Facts, recipe: Recipe) -> Measured:
    limits.check(source, facts, recipe)
    return Measured(source, facts, extent_of(facts, recipe))


def _facts(source: Source, recipe: Recipe) -> Facts:
    if source.modality == "image":
        return images.read_facts(source)
    if source.modality == "video":
        return videos.read_facts(source, recipe)
    return sounds.read_facts(source)


def _missing(error: ImportError) -> ConfigError:
    return ConfigError(f"media need the package {error.name}; pip install 'relax-hpc[media]'")
