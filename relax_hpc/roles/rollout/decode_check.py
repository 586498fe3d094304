"""Decodes every medium of a run's prompts: before anything is queued, where the user asks for it;
when the run starts, where rows with broken media are left out."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from typing import NamedTuple

from relax_hpc.config.run import RunConfig
from relax_hpc.errors import ConfigError
from relax_hpc.media.canonical import canonical, measured_all
from relax_hpc.media.recipe import Recipe, read_recipe
from relax_hpc.media.source import Source
from relax_hpc.media.workers import DEADLY, LONGEST_S, new_pool, within
from relax_hpc.prompts.records import Records
from relax_hpc.prompts.source import Examined, PromptSource
from relax_hpc.roles.rollout import prompt_check

_BLOCK = 512
"""Rows that are on their way at once: what they hold stays in memory."""


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
        ConfigError: data cannot be opened.
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
    for records in every:
        for block in _decoded(config, recipe, records, range(len(records))):
            num_media += block.num_media
            refused += [line for _, line in block.refused]
            done += block.num_rows
            advance(done, total)
    return Decoded(num_media, refused)


def decoded(
    config: RunConfig,
    sources: Mapping[str, PromptSource],
    rows: Mapping[str, Sequence[int]],
    found: Mapping[str, Examined],
) -> dict[str, Examined]:
    """Adds to what was found the rows with a medium that cannot be decoded.

    Args:
        config: the run.
        sources: the prompts, by key.
        rows: those that were looked at, by key.
        found: what was found of them.
    """
    recipe = read_recipe(config.model.path, config.prompts.media)
    if recipe is None:
        return dict(found)
    whole = {}
    for key, each in found.items():
        known = {row for row, _ in each.bad}
        left = [row for row in rows[key] if row not in known]
        more = [
            (row, line)
            for block in _decoded(config, recipe, sources[key].records, left)
            for row, line in block.refused
        ]
        first = dict(reversed(more))  # a line for each row
        whole[key] = each._replace(bad=sorted([*each.bad, *first.items()]))
    return whole


class _Block(NamedTuple):
    num_rows: int
    num_media: int
    refused: list[tuple[int, str]]
    """Rows, and what is wrong with each; one may be there several times."""


def _decoded(
    config: RunConfig, recipe: Recipe, records: Records, rows: Sequence[int]
) -> Iterator[_Block]:
    """Decodes the media of rows, some rows at a time."""
    workers = config.prompts.media.workers or len(os.sched_getaffinity(0))
    pool = new_pool(workers)
    try:
        for first in range(0, len(rows), _BLOCK):
            block = rows[first : first + _BLOCK]
            refused: list[tuple[int, str]] = []
            media = [_media_of(records, row, refused) for row in block]
            lines = list[list[str]]()
            try:
                lines.extend(pool.map(partial(_refused, recipe, LONGEST_S), media, chunksize=4))
            except BrokenProcessPool:  # by a medium of those that are not done
                pool.shutdown()
                lines += _one_by_one(recipe, media[len(lines) :])
                pool = new_pool(workers)
            refused += [
                (row, line) for row, each in zip(block, lines, strict=True) for line in each
            ]
            yield _Block(len(block), sum(map(len, media)), refused)
    finally:
        pool.shutdown(cancel_futures=True)


def _one_by_one(recipe: Recipe, media: Sequence[Sequence[Source]]) -> Iterator[list[str]]:
    """Yields what is wrong with the media of each row, one of which ends the process that decodes
    it."""
    pool = new_pool(1)
    try:
        for each in media:
            lines = list[str]()
            for source in each:
                try:
                    lines += pool.submit(_refused, recipe, LONGEST_S, (source,)).result()
                except BrokenProcessPool:
                    lines.append(str(source.refused(DEADLY)))
                    pool = new_pool(1)
            yield lines
    finally:
        pool.shutdown(cancel_futures=True)


def _media_of(records: Records, row: int, refused: list[tuple[int, str]]) -> tuple[Source, ...]:
    try:
        return records[row].media
    except ConfigError as error:
        refused.append((row, str(error)))
        return ()


def _refused(recipe: Recipe, longest_s: float, media: tuple[Source, ...]) -> list[str]:
    """Returns what is wrong with each that cannot be decoded, in a process of the pool."""
    found = []
    for source in media:
        try:
            with within(longest_s):
                for medium in measured_all([source], recipe):
                    canonical(medium, recipe)
        except ConfigError as error:
            found.append(str(error))
    return found
