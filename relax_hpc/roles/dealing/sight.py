"""Reads and decodes the media of a rank's rows when an encoder needs them."""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from relax_hpc.bus.reader import Reader, Selection
from relax_hpc.bus.shards import media
from relax_hpc.config.run import RunConfig
from relax_hpc.data.media.recipe import Recipe, read_recipe
from relax_hpc.data.media.stored import StoredMedium
from relax_hpc.schema import Row, key_of_medium
from relax_hpc.trainer.training_engine import ScoringEngine

MOST_KEPT_BYTES = 1 << 30
"""Arrays of a step kept for further passes, e.g. under the reference's weights."""
_MOST_THREADS = 16
Pixels = npt.NDArray[np.uint8]


class _MediumPlace(NamedTuple):
    """The row and the medium that hold the bytes."""

    record: Selection
    row: int
    medium: int


class StepMedia:
    """Knows the places of a step's media, and decodes them.

    A medium of several rows is identified by its digest: the rank that needs it reads and decodes
    it once, and again only if it did not fit in the cache.
    """

    def __init__(self, reader: Reader, recipe: Recipe | None) -> None:
        """`reader` reads the rows' shards; `recipe` is None for a text model."""
        self._reader, self._recipe = reader, recipe
        self._step = -1
        self._places: dict[bytes, _MediumPlace] = {}
        self._kept: dict[bytes, Pixels] = {}

    @property
    def columns(self) -> Sequence[str]:
        return media.FACTS if self._recipe else ()

    def serve(self, engine: ScoringEngine) -> None:
        """Gives an engine the pixels of all its future rows; does nothing for text."""
        if self._recipe:
            engine.see_by(self.pixels)

    def note(self, record: Selection, numbers: Sequence[int], rows: Sequence[Row]) -> None:
        """Notes the places of the rows' media, and forgets those of another step.

        Args:
            rows: read with `columns`.
        """
        if record.step != self._step:
            self._step = record.step
            self._places.clear()
            self._kept.clear()
        for number, row in zip(numbers, rows, strict=True):
            for medium in range(len(row.media)):
                place = _MediumPlace(record, number, medium)
                self._places.setdefault(key_of_medium(row, medium), place)

    def pixels(self, wanted: Sequence[tuple[Row, int]]) -> Iterator[Pixels]:
        """Yields the canonical pixels [frames, height, width, 3] of media of rows.

        Decodes all at once, in threads, while the first are in use.

        Args:
            wanted: (noted row, index of the medium in it).

        Raises:
            DamagedError: a medium is missing, damaged, or decoded to another array than the
                policy's.
        """
        keys = [key_of_medium(row, medium) for row, medium in wanted]
        missing = [key for key in dict.fromkeys(keys) if key not in self._kept]
        found = {key: self._kept[key] for key in keys if key in self._kept}
        threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)), max(len(missing), 1))
        with ThreadPoolExecutor(threads) as pool:  # decoders let other threads run
            stored = self._read(missing)
            decoded = {key: pool.submit(self._decode, stored[key]) for key in missing}
            for key in keys:
                if key not in found:
                    found[key] = decoded[key].result()
                    self._keep(key, found[key])
                yield found[key]

    def _read(self, keys: Sequence[bytes]) -> dict[bytes, StoredMedium]:
        by_record: dict[int, list[bytes]] = {}
        for key in keys:
            by_record.setdefault(id(self._places[key].record), []).append(key)
        stored: dict[bytes, StoredMedium] = {}
        for several in by_record.values():
            places = [self._places[key] for key in several]
            read = self._reader.media(places[0].record, [(row, at) for _, row, at in places])
            stored.update(zip(several, read, strict=True))
        return stored

    def _decode(self, medium: StoredMedium) -> Pixels:
        assert self._recipe is not None, "a model of text has no tower"
        # Those of decoders cannot be written, which torch does not like.
        array: Any = medium.canonical(self._recipe).array
        found: Pixels = np.require(array, requirements="W")
        return found

    def _keep(self, key: bytes, array: Pixels) -> None:
        if array.nbytes <= MOST_KEPT_BYTES - sum(each.nbytes for each in self._kept.values()):
            self._kept[key] = array


def sight_of(config: RunConfig, reader: Reader) -> StepMedia:
    """Returns the media reader of a run's policy, and of all models with the same inputs."""
    return StepMedia(reader, read_recipe(config.model.path, config.prompts.media))
