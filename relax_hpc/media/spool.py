"""Canonical media for the engines of this node: files in memory, for as long as a prompt is asked.

A file belongs to the process that made it, which removes it. What a killed process leaves, the next
one that makes such a folder removes; nobody else may read it.
"""

import itertools
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from relax_hpc.errors import RelaxError
from relax_hpc.media.expand import Span
from relax_hpc.media.extent import Extent
from relax_hpc.schema import Array
from relax_hpc.scratch import scratch_folder

_MEMORY = Path("/dev/shm")


class Spooled(NamedTuple):
    """A medium whose canonical array lies in a file."""

    extent: Extent
    digest: bytes
    """[16] `canonical.digest_of` the array."""
    path: Path
    """File of `numpy.save`."""

    def features_key(self, policy_version: int) -> int:
        """Returns what an engine keeps features by, in 64 bits: other weights make others of the
        same array."""
        import xxhash

        return xxhash.xxh3_64_intdigest(self.digest + policy_version.to_bytes(8, "big"))


class View(NamedTuple):
    """The media among some tokens, as an engine is shown them."""

    media: tuple[Spooled, ...]
    spans: tuple[Span, ...]
    """Tokens that stand for features of them."""

    @property
    def digest(self) -> bytes:
        """[16] identity of all that is shown, for the keys of caches: arrays, and times of videos,
        which positions depend on."""
        import xxhash

        times = [repr(each.extent.seconds_per_grid).encode() for each in self.media]
        parts = [each.digest + time for each, time in zip(self.media, times, strict=True)]
        return xxhash.xxh3_128(b" ".join(parts)).digest()


class Spool:
    """A folder of canonical arrays, each once."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._drafts = folder, itertools.count()
        self._held = Counter[bytes]()

    def draft(self) -> Path:
        """Names a file that nobody else writes."""
        return self._folder / f"draft-{next(self._drafts)}"

    def keep(self, draft: Path, digest: bytes) -> Path:
        """Takes a written draft into the spool; `release` it as often as it was kept."""
        path = self._path(digest)
        if self._held[digest]:
            draft.unlink()  # it is there
        else:
            draft.rename(path)
        self._held[digest] += 1
        return path

    def release(self, digest: bytes) -> None:
        """Removes the file of an array that nobody else keeps."""
        self._held[digest] -= 1
        if not self._held[digest]:
            del self._held[digest]
            self._path(digest).unlink(missing_ok=True)

    def _path(self, digest: bytes) -> Path:
        return self._folder / digest.hex()


@contextmanager
def opened_spool(parent: Path | None = None) -> Iterator[Spool]:
    """A spool in this node's memory, or in `parent`; its folder ends with the block."""
    in_memory = _MEMORY if os.access(_MEMORY, os.W_OK | os.X_OK) else None
    with scratch_folder("media", parent or in_memory) as folder:
        yield Spool(folder)


def write(path: Path, array: Array) -> None:
    """Writes an array to a new file that only this user may read.

    Raises:
        RelaxError: there is no room for it.
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
