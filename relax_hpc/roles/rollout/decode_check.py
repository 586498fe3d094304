"""Decodes every medium of prompts, before anything is queued."""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from relax_hpc.errors import ConfigError, MediumError
from relax_hpc.media.canonical import measured_all, try_out
from relax_hpc.media.recipe import Recipe
from relax_hpc.media.source import Source
from relax_hpc.media.workers import Decoders
from relax_hpc.prompts.media_tokens import check_taken
from relax_hpc.prompts.records import Records

_BLOCK = 512
"""Rows that are on their way at once: what they hold stays in memory."""
Advance = Callable[[int, int], None]
"""Is told how many rows are done, of how many."""


class Refused(NamedTuple):
    """A medium, or a row, that cannot be used."""

    key: str
    """Key of the job that names the data."""
    row: int
    reason: str
    """File, line, medium and remedy."""
    is_medium: bool


class Decoded(NamedTuple):
    """The media of prompts that were decoded, and those that could not be."""

    num_media: int
    """All of them; of a row that cannot be read, one."""
    refused: list[Refused]
    """All that cannot be used; several may be of one row."""

    @property
    def broken(self) -> dict[str, dict[int, str]]:
        """Rows with a medium that cannot be used, with the reason that was found first, by key."""
        found = dict[str, dict[int, str]]()
        for each in self.refused:
            if each.is_medium:
                found.setdefault(each.key, {}).setdefault(each.row, each.reason)
        return found


def decode(
    files: Mapping[str, Records], recipe: Recipe, num_processes: int | None, advance: Advance
) -> Decoded:
    """Decodes the media of all prompts.

    Args:
        files: the prompts, by the key that names the file.
        recipe: of the model.
        num_processes: see `Decoders`.
        advance: is told how far it is.
    """
    total, done, num_media, refused = sum(map(len, files.values())), 0, 0, list[Refused]()
    advance(done, total)
    with Decoders(num_processes) as decoders:
        for key, records in files.items():
            for first in range(0, len(records), _BLOCK):
                block = range(first, min(first + _BLOCK, len(records)))
                media, bad = _media_of(key, records, block, recipe)
                num_media += len(media) + len(bad)
                refused += bad
                jobs = [decoders.submit(each, _decode, each, recipe) for _, each in media]
                for (row, _), job in zip(media, jobs, strict=True):
                    try:
                        job.result()
                    except ConfigError as error:
                        refused.append(_refused(key, row, error))
                    advance(done + row - first, total)
                done += len(block)
                advance(done, total)
    return Decoded(num_media, refused)


def _media_of(
    key: str, records: Records, rows: Iterable[int], recipe: Recipe
) -> tuple[list[tuple[int, Source]], list[Refused]]:
    """Returns media that can be tried, with the row of each, and rows that cannot be used."""
    media, refused = list[tuple[int, Source]](), list[Refused]()
    for row in rows:
        try:
            own = records[row].media
            check_taken(own, recipe)
        except ConfigError as error:
            refused.append(_refused(key, row, error))
        else:
            media += [(row, each) for each in own]
    return media, refused


def _refused(key: str, row: int, error: ConfigError) -> Refused:
    return Refused(key, row, str(error), isinstance(error, MediumError))


def _decode(source: Source, recipe: Recipe) -> None:
    """Decodes a medium, in a process; raises ConfigError where it cannot be."""
    for medium in measured_all([source], recipe):
        try_out(medium, recipe)
