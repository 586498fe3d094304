"""Expands the token of each medium in a text to one per feature, and computes positions."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from relax_hpc.data.media.extent import Extent
from relax_hpc.data.media.kinds import Modality
from relax_hpc.data.media.recipe import MediaFamily, Recipe


class MediaSpan(NamedTuple):
    """Tokens that stand for features of a medium; a video may have several spans."""

    medium: int
    """Index among the media of the row."""
    first: int
    """Index of its first token in the row."""
    tokens: int


class Expanded(NamedTuple):
    token_ids: list[int]
    spans: tuple[MediaSpan, ...]
    """By first token. Tokens outside all spans are text, even those that look like placeholders."""


def with_times(text: str, extents: Sequence[Extent], family: MediaFamily) -> str:
    """Writes videos frame by frame into the text, for families that do; adds the begin and end
    tokens of a video's sound.

    Replaces the video's token. The template's own tokens around it stay, around all frames, as in
    transformers 5.

    Args:
        text: of the chat template, with one token per medium; none for a video's sound.
        extents: of the media, in order.
        family: of the model.
    """
    token = family.placeholders["video"]
    first, *rest = text.split(token)
    videos = [number for number, extent in enumerate(extents) if extent.modality == "video"]
    assert len(rest) == len(videos), "placeholders are counted before"
    written = (_written(extents[number], _sound_of(number, extents), family) for number in videos)
    return first + "".join(f"{frames}{after}" for frames, after in zip(written, rest, strict=True))


def _written(video: Extent, sound: Extent | None, family: MediaFamily) -> str:
    token = family.placeholders["video"]
    if sound is not None:
        return family.wrapped["audio"].replace(family.placeholders["audio"], token)
    return "".join(family.frame.format(time=time) for time in video.times) or token


def _sound_of(number: int, extents: Sequence[Extent]) -> Extent | None:
    after = extents[number + 1] if number + 1 < len(extents) else None
    return after if after is not None and after.is_of_video else None


def expand(
    token_ids: Sequence[int], extents: Sequence[Extent], placeholders: Mapping[int, Modality]
) -> Expanded:
    """Repeats the token of each medium once per feature.

    Args:
        token_ids: of the text, with one token per span of a medium; for a video with sound, one for
            both.
        extents: of the media, in order of their places in the text.
        placeholders: modality by token id.
    """
    found, spans = list[int](), list[MediaSpan]()
    stretches = {modality: _stretches(extents, modality) for modality in set(placeholders.values())}
    ids = {modality: token for token, modality in placeholders.items()}
    for token in token_ids:
        modality = placeholders.get(token)
        if modality is None:
            found.append(token)
            continue
        for medium, count in next(stretches[modality]):
            spans.append(MediaSpan(medium, len(found), count))
            found += [ids[extents[medium].modality]] * count
    assert all(next(rest, None) is None for rest in stretches.values()), "every medium has a place"
    return Expanded(found, tuple(spans))


def _stretches(
    extents: Sequence[Extent], modality: Modality
) -> Iterator[Sequence[tuple[int, int]]]:
    """Yields (medium, tokens) for each token of a modality in the text."""
    for number, extent in enumerate(extents):
        if extent.modality != modality or extent.is_of_video:
            continue
        sound = _sound_of(number, extents)
        if sound is None:
            yield from ([(number, count)] for count in extent.tokens)
            continue
        turns = zip_longest(extent.tokens, sound.tokens, fillvalue=0)
        both = (pair for turn in turns for pair in zip((number, number + 1), turn, strict=True))
        yield [(medium, count) for medium, count in both if count]


Positions = npt.NDArray[np.int64]
_Exact = npt.NDArray[np.float32]


def positions(
    num_tokens: int, spans: Sequence[MediaSpan], extents: Sequence[Extent], recipe: Recipe
) -> Positions:
    """Computes positions in time, y and x (M-RoPE) of a row: of the prompt, and of the text after
    it. Token ids are ignored, so a placeholder that a policy samples is text.

    Args:
        spans: of its media, by first token. A sound whose spans touch those of the video before it
            is the video's, and begins with it.
        extents: of its media.
        recipe: of the model.

    Returns:
        [3, num_tokens] in time, y and x.

    Source: `get_rope_index` of transformers' Qwen3-VL and Qwen3-Omni. Qwen3-Omni's times are
    fractional. transformers uses them as they are, but SGLang truncates them to look up rotations.
    Trainers must match the engine, so positions are truncated here.
    """
    found = np.empty((3, num_tokens), np.float32)
    done, after = 0, np.float32(0)
    seen: Counter[int] = Counter()
    joined: Sequence[int] = ()
    for span in spans:
        extent, end = extents[span.medium], span.first + span.tokens
        if not (span.first == done and span.medium in joined):
            joined = ()
            if extent.modality == "audio":  # alone, it is counted as text is
                continue
            after = begin = _text(found, done, span.first, after)
            joined = _with_its_sound(span.medium, extents)
        part = _part(extent, seen[span.medium], span.tokens, recipe)
        found[:, span.first : end] = part + begin
        seen[span.medium] += span.tokens
        done, after = end, found[:, end - 1].max() + np.float32(1)
    _text(found, done, num_tokens, after)
    return np.floor(found).astype(np.int64)


def next_position(found: Positions) -> int:
    """Returns the position of the token after a row; each sampled token adds 1."""
    return int(found[:, -1].max()) + 1


def _with_its_sound(medium: int, extents: Sequence[Extent]) -> Sequence[int]:
    """Returns a video and its sound, whose spans may touch; empty for other media."""
    kinds = [extent.modality for extent in extents[medium : medium + 2]]
    return (medium, medium + 1) if kinds == ["video", "audio"] else ()


def _text(found: _Exact, first: int, end: int, start: np.float32) -> np.float32:
    """Counts on from `start`, alike in all three dimensions, and returns the next one."""
    found[:, first:end] = np.arange(end - first, dtype=np.float32) + start
    return np.float32(start + (end - first))


def _part(extent: Extent, first: int, tokens: int, recipe: Recipe) -> _Exact:
    """Returns [3, tokens] of a span, from the beginning of its medium.

    Args:
        first: first token within the medium; frames are never split.
    """
    if extent.modality == "audio":
        return np.broadcast_to(np.arange(first, first + tokens, dtype=np.float32), (3, tokens))
    vision = recipe.image if extent.modality == "image" else recipe.video.vision
    height, width = (patches // vision.merge for patches in extent.grid[1:])
    frame = height * width
    begin = 0 if recipe.family.frame else first // frame  # frames that are written count as text
    times = np.arange(begin, begin + tokens // frame, dtype=np.float32)
    times = times * np.float32(extent.seconds_per_grid) * np.float32(recipe.positions_per_s)
    rows, columns = (np.arange(count, dtype=np.float32) for count in (height, width))
    return np.stack(np.meshgrid(times, rows, columns, indexing="ij")).reshape(3, -1)
