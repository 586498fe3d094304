"""Decodes every medium of a run's prompts: before anything is queued, where the user asks for it;
when the run starts, where rows with broken media are left out."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from relax_hpc.config.run import RunConfig
from relax_hpc.errors import ConfigError
from relax_hpc.media.canonical import canonical, measured_all
from relax_hpc.media.recipe import Recipe, read_recipe
from relax_hpc.media.source import Source
from relax_hpc.media.workers import Decoders
from relax_hpc.prompts.records import Records
from relax_hpc.prompts.source import Examined, PromptSource
from relax_hpc.roles.rollout import prompt_check

_BLOCK = 512
"""Rows that are on their way at once: what they hold stays in memory."""


class Decoded(NamedTuple):
    """The media of a run that were decoded, and those that could not be."""

    num_media: int
    """All of them; of a row that cannot be read, one."""
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
    workers = config.prompts.media.workers or len(os.sched_getaffinity(0))
    with Decoders(workers) as decoders:
        for records in every:
            for block in _decoded(decoders, recipe, records, range(len(records))):
                num_media += block.num_media
                refused += [line for _, line in block.refused]
                done += block.num_rows
                advance(done, total)
    return Decoded(num_media, refused)


def decoded(
    sources: Mapping[str, PromptSource],
    rows: Mapping[str, Sequence[int]],
    found: Mapping[str, Examined],
) -> dict[str, Examined]:
    """Adds to what was found the rows with a medium that cannot be decoded.

    Args:
        sources: the prompts, by key.
        rows: those that were looked at, by key.
        found: what was found of them.
    """
    whole = dict(found)
    for key, each in found.items():
        if (media := sources[key].media_tokens) is None:
            continue
        known = {row for row, _ in each.bad}
        left = [row for row in rows[key] if row not in known]
        more = [
            (row, line)
            for block in _decoded(media.decoders, media.recipe, sources[key].records, left)
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
    decoders: Decoders, recipe: Recipe, records: Records, rows: Sequence[int]
) -> Iterator[_Block]:
    """Decodes the media of rows, some rows at a time."""
    for first in range(0, len(rows), _BLOCK):
        block, refused = rows[first : first + _BLOCK], list[tuple[int, str]]()
        media = [(row, each) for row in block for each in _media_of(records, row, refused)]
        num_media = len(media) + len(refused)
        jobs = [decoders.submit(each, _decode, each, recipe) for _, each in media]
        for (row, _), job in zip(media, jobs, strict=True):
            try:
                job.result()
            except ConfigError as error:
                refused.append((row, str(error)))
        yield _Block(len(block), num_media, refused)


def _media_of(records: Records, row: int, refused: list[tuple[int, str]]) -> tuple[Source, ...]:
    try:
        return records[row].media
    except ConfigError as error:
        refused.append((row, str(error)))
        return ()


def _decode(source: Source, recipe: Recipe) -> None:
    """Decodes a medium, in a process; raises ConfigError where it cannot be."""
    for medium in measured_all([source], recipe):
        canonical(medium, recipe)
