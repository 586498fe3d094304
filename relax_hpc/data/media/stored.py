"""Media as the bus stores them: the bytes of their files, and what they are decoded to."""

import io
import zipfile
from importlib import metadata
from typing import NamedTuple

import numpy as np

from relax_hpc.data.media.canonical import Canonical, Measured, canonical, digest_of, measure_medium
from relax_hpc.data.media.extent import Extent, extent_of_array
from relax_hpc.data.media.kinds import VIDEOS, modality_of
from relax_hpc.data.media.recipe import Recipe
from relax_hpc.data.media.source import MediaSource
from relax_hpc.errors import ConfigError, DamagedError
from relax_hpc.schema import Array, MediaKind, Medium

DECODERS = "decoders"
"""Attribute of a shard: the libraries that made the canonical arrays its digests are of."""
_PACKAGES = ("pillow", "av", "soundfile", "soxr", "numpy")
_LONG_AGO = (1980, 1, 1, 0, 0, 0)


class StoredMedium(NamedTuple):
    """A medium as it was read, and where."""

    medium: Medium
    place: str
    """Shard and number of it, for messages."""
    decoders: str = ""
    """Libraries that decoded it when it was stored; "" where nobody wrote them down."""

    def canonical(self, recipe: Recipe) -> Canonical:
        """Decodes it, to the very array that the policy was shown.

        Args:
            recipe: of the run.

        Raises:
            DamagedError: it cannot be decoded, or is decoded to another array.
        """
        medium = self.medium
        if medium.kind is MediaKind.TENSOR:
            return self._as_it_is(recipe)
        try:
            size = measure_medium(self._as_source(), recipe)
            if size.extent.grid != medium.grid_thw or size.extent.frames != medium.frames:
                raise DamagedError(
                    f"{self.place}: has {_room(medium.grid_thw, medium.frames)}, and "
                    f"{_room(size.extent.grid, size.extent.frames)} by prompts.media and the "
                    "preprocessor of the model; use those of the run"
                )
            found = canonical(size, recipe)
        except ConfigError as error:
            raise DamagedError(
                f"{error}; it could be decoded when it was stored{self._describe()}"
            ) from None
        if medium.canonical_xxh3 and found.digest != medium.canonical_xxh3:
            raise DamagedError(
                f"{self.place} ({medium.kind.name}): is decoded to an array of digest "
                f"{found.digest.hex()}, not {medium.canonical_xxh3.hex()}{self._describe()}; use "
                "the same versions on all nodes"
            )
        return found

    def _as_it_is(self, recipe: Recipe) -> Canonical:
        """Reads the canonical array itself."""
        medium = self.medium
        try:
            array: Array = np.load(io.BytesIO(medium.data.tobytes()), allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise DamagedError(f"{self.place}: holds no array: {error}") from None
        if (found := digest_of(array)) != medium.canonical_xxh3:
            raise DamagedError(
                f"{self.place}: holds an array of digest {found.hex()}, not "
                f"{medium.canonical_xxh3.hex()}; restore the file"
            )
        seconds = medium.seconds_per_grid
        extent = extent_of_array(array, medium.grid_thw, medium.frames, seconds, recipe)
        vision = recipe.video.vision if medium.frames else recipe.image
        patches = tuple(pixels // vision.patch for pixels in extent.size)
        if medium.grid_thw[1:] != patches:
            raise DamagedError(
                f"{self.place}: has {medium.grid_thw[1:]} patches, and {patches} by the "
                "preprocessor of the model; use that of the run"
            )
        return Canonical(extent, array)

    def _as_source(self) -> MediaSource:
        data = self.medium.data.tobytes()
        source = MediaSource(self.place, modality_of(self.medium))
        if self.medium.kind is not MediaKind.FRAMES:
            is_of_video = source.modality == "audio" and self.medium.kind in VIDEOS
            return source._replace(data=data, is_of_video=is_of_video)
        frames, fps = _unpack(data)
        named = enumerate(frames, start=1)
        each = (MediaSource(f"{self.place}, frame {n}", "image", data=frame) for n, frame in named)
        return source._replace(frames=tuple(each), fps=fps)

    def _describe(self) -> str:
        wrote = f"by {self.decoders}, " if self.decoders else ""
        return f": stored {wrote}read by {decoders()}"


def make_stored_array(found: Canonical, digest: bytes) -> Medium:
    """Returns a medium that is stored as its canonical array, which no decoder has to make again.

    Args:
        found: the medium, decoded.
        digest: of it.
    """
    file = io.BytesIO()
    np.save(file, found.array, allow_pickle=False)
    return _medium(MediaKind.TENSOR, file.getvalue(), found.extent, digest)


def read_stored(medium: Measured, canonical_xxh3: bytes = b"") -> Medium:
    """Reads the bytes of a medium as they are to be stored.

    Args:
        medium: whose header was read.
        canonical_xxh3: digest of its canonical array, where it was decoded.

    Raises:
        ConfigError: it cannot be read.
    """
    source, facts, extent = medium
    data = _pack(source, facts.fps) if source.frames else source.read()
    return _medium(facts.kind, data, extent, canonical_xxh3)


def _medium(kind: MediaKind, data: bytes, extent: Extent, digest: bytes) -> Medium:
    seconds = float(np.float32(extent.seconds_per_grid))
    bytes_ = np.frombuffer(data, np.uint8)
    return Medium(kind, bytes_, extent.grid, digest, extent.frames, seconds)


def decoders() -> str:
    """Names the libraries that decode media here, with their versions."""
    found = []
    for package in _PACKAGES:
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def _room(grid: tuple[int, int, int], frames: tuple[int, ...]) -> str:
    said = " x ".join(map(str, grid))
    return f"{said} patches of {len(frames)} frames" if frames else f"{said} patches"


def _pack(source: MediaSource, fps: float) -> bytes:
    """The frames of a list as a ZIP file that is the same whenever it is made."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:  # stored, not compressed: they are already
        archive.comment = repr(fps).encode()
        for number, frame in enumerate(source.frames):
            archive.writestr(zipfile.ZipInfo(f"{number:06d}", _LONG_AGO), frame.read())
    return file.getvalue()


def _unpack(data: bytes) -> tuple[list[bytes], float]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return [archive.read(name) for name in archive.namelist()], float(archive.comment)
