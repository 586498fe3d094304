"""Decodes every medium of a run's prompts before anything is queued, where the user asks for it."""

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from typing import NamedTuple

from relax_hpc.config.run import RunConfig
from relax_hpc.errors import ConfigError
from relax_hpc.media.canonical import canonical, measured
from relax_hpc.media.recipe import Recipe, read_recipe
from relax_hpc.media.source import Source
from relax_hpc.prompts.records import Records
from relax_hpc.roles.rollout import prompt_check

_BLOCK = 64
"""Rows of a process that are on their way at once: what they hold stays in memory."""


class Decoded(NamedTuple):
    """The media of a run that were decoded, and those that could not be."""

    num_media: int
    refused: list[str]
    """A line for each medium, and each row, that cannot be used."""


def decode(config: RunConfig, advance: Callable[[int, int], None]) -> Decoded:
    """Decodes the media of all prompts, held-out ones too, on all cores of this machine.

    Args:
        config: the run.
        advance: is told how many rows are done, of how many.

    Raises:
        ConfigError: data cannot be opened, or a decoder ended its process.
    """
    recipe = read_recipe(config.model.path, config.prompts.media)
    if recipe is None:
        raise ConfigError(
            f"--decode: the model in {config.model.path} reads text only; leave it out, or use a "
            "model that takes media"
        )
    files = prompt_check.open_files(config)
    every = [files.train, *files.heldout.values()]
    total, done, num_media, refused = sum(map(len, every)), 0, 0, list[str]()
    workers = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        for records in every:
            for block in _blocks(len(records), workers * _BLOCK):
                rows = [_media_of(records, row, refused) for row in block]
                num_media += sum(map(len, rows))
                try:
                    for lines in pool.map(partial(_refused, recipe), rows, chunksize=4):
                        refused += lines
                except BrokenProcessPool:
                    first, last = records.where(block[0]), records.where(block[-1])
                    raise ConfigError(
                        f"a decoder ended its process, on a medium from {first} to {last}; remove "
                        "half of these lines at a time to find which"
                    ) from None
                done += len(block)
                advance(done, total)
    return Decoded(num_media, refused)


def _blocks(count: int, size: int) -> Iterator[range]:
    return (range(first, min(first + size, count)) for first in range(0, count, size))


def _media_of(records: Records, row: int, refused: list[str]) -> tuple[Source, ...]:
    try:
        return records[row].media
    except ConfigError as error:
        refused.append(str(error))
        return ()


def _refused(recipe: Recipe, media: tuple[Source, ...]) -> list[str]:
    """Returns what is wrong with each that cannot be decoded, in a process of the pool."""
    found = []
    for source in media:
        try:
            canonical(measured(source, recipe), recipe)
        except ConfigError as error:
            found.append(str(error))
    return found
