"""Shares canonical media with the engines of this node, as files in memory.

A file belongs to the process that made it, which removes it; the next process that makes such a
folder removes those of killed ones. Nobody else may read it. A request to an engine names the
files, or carries their contents.
"""

import base64
import io
import itertools
import json
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from relax_hpc.data.media.expand import MediaSpan
from relax_hpc.data.media.extent import Extent
from relax_hpc.errors import RelaxError
from relax_hpc.runtime.files.scratch import scratch_folder
from relax_hpc.schema import Array

_MEMORY = Path("/dev/shm")


class Spooled(NamedTuple):
    """A medium whose canonical array lies in a file."""

    extent: Extent
    digest: bytes
    """[16] `canonical.digest_of` the array."""
    path: Path
    """File of `numpy.save`."""

    def features_key(self, policy_version: int) -> int:
        """Returns the 64-bit key of cached features: new weights make new features of the same
        array."""
        import xxhash

        return xxhash.xxh3_64_intdigest(self.digest + policy_version.to_bytes(8, "big"))


class MediaView(NamedTuple):
    """The media among some tokens, as an engine is shown them."""

    media: tuple[Spooled, ...]
    spans: tuple[MediaSpan, ...]
    """Tokens that stand for their features."""

    @property
    def digest(self) -> bytes:
        """[16] cache key of all that is shown: arrays, and the times of videos, which set
        positions."""
        import xxhash

        times = [repr(each.extent.seconds_per_grid).encode() for each in self.media]
        parts = [each.digest + time for each, time in zip(self.media, times, strict=True)]
        return xxhash.xxh3_128(b" ".join(parts)).digest()


class Spool:
    """A folder of canonical arrays, each stored once."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._drafts = folder, itertools.count()
        self._held = Counter[bytes]()

    def draft(self) -> Path:
        """Returns a unique file name."""
        return self._folder / f"draft-{next(self._drafts)}"

    def keep(self, draft: Path, digest: bytes) -> Path:
        """Takes a written draft into the spool; call `release` once per `keep`."""
        path = self._path(digest)
        if self._held[digest]:
            draft.unlink()  # it is there
        else:
            draft.rename(path)
        self._held[digest] += 1
        return path

    def release(self, digest: bytes) -> None:
        """Removes an array's file after its last `release`."""
        self._held[digest] -= 1
        if not self._held[digest]:
            del self._held[digest]
            self._path(digest).unlink(missing_ok=True)

    def _path(self, digest: bytes) -> Path:
        return self._folder / digest.hex()


@contextmanager
def open_spool(parent: Path | None = None) -> Iterator[Spool]:
    """Opens a spool in this node's memory, or in `parent`; removes it after the block."""
    in_memory = _MEMORY if os.access(_MEMORY, os.W_OK | os.X_OK) else None
    with scratch_folder("media", parent or in_memory) as folder:
        yield Spool(folder)


def write(path: Path, array: Array) -> None:
    """Writes an array to a new file that only this user may read.

    Raises:
        RelaxError: there is no space for it.
    """
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:  # noqa: PTH123
            np.save(file, array, allow_pickle=False)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise RelaxError(
            f"{path.parent}: {array.nbytes:,} bytes of a medium cannot be written for the engines: "
            f"{error.strerror}; give the node more memory, or lower max_running_requests"
        ) from None


BEGIN = "relax-media:"
"""Prefix of the text; impossible in URLs and base64."""
MISSING = "relax-media-missing"
"""Prefix of an engine's answer that it cannot read the files: it runs on another node."""


class SentView(NamedTuple):
    view: MediaView
    policy_version: int
    """Policy version of the engine at the request."""
    contents: tuple[bytes, ...] = ()
    """Files of the media, if they were sent along."""


def text_of(view: MediaView, policy_version: int, *, with_contents: bool = False) -> str:
    """Serialises a view, with the contents of its files if requested."""
    media = [
        {
            "extent": each.extent._asdict(),
            "digest": each.digest.hex(),
            "path": str(each.path),
            "content": base64.b64encode(each.path.read_bytes()).decode() if with_contents else "",
        }
        for each in view.media
    ]
    said = {"version": policy_version, "spans": view.spans, "media": media}
    return BEGIN + json.dumps(said, separators=(",", ":"))


def view_of(text: str) -> SentView:
    """Reads the output of `text_of`.

    Raises:
        ValueError: not such an output.
    """
    said = json.loads(text.removeprefix(BEGIN))
    try:
        media = [
            Spooled(_extent(each["extent"]), bytes.fromhex(each["digest"]), Path(each["path"]))
            for each in said["media"]
        ]
        spans = [MediaSpan(*(int(number) for number in span)) for span in said["spans"]]
        contents = [base64.b64decode(each["content"]) for each in said["media"]]
        version = int(said["version"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"no media of relax-hpc: {error!r}") from None
    view = MediaView(tuple(media), tuple(spans))
    return SentView(view, version, tuple(contents) if all(contents) else ())


def array_in(file: bytes) -> Array:
    """Reads the array of a spool file; raises ValueError if it is none."""
    array: Array = np.load(io.BytesIO(file), allow_pickle=False)
    return array


def _extent(said: dict[str, object]) -> Extent:
    lists = {key: tuple(value) for key, value in said.items() if isinstance(value, list)}
    return Extent(**{**said, **lists})  # type: ignore[arg-type]
