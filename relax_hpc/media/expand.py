"""Text with a token for every medium -> token ids with as many as it has features."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

from relax_hpc.media.extent import Extent
from relax_hpc.media.family import Family
from relax_hpc.media.kinds import Modality


class Span(NamedTuple):
    """A stretch of tokens that stand for features of a medium; of a video there may be several."""

    medium: int
    """Place of it among the media of the row."""
    first: int
    """Token of the row."""
    tokens: int


class Expanded(NamedTuple):
    token_ids: list[int]
    spans: tuple[Span, ...]
    """By first token. Where none is, a token is text, though it may be a placeholder's."""


def with_times(text: str, extents: Sequence[Extent], family: Family) -> str:
    """Writes the frames of videos into the text, of a family that writes them one by one; of a
    video with sound, the tokens that begin and end a sound.

    The token of a video is replaced where it stands. The template's own tokens around it stay, so
    that they stand around all frames, as transformers 5 has it.

    Args:
        text: of the chat template, with one token a medium; none for the sound of a video.
        extents: of the media, in order.
        family: of the model.
    """
    token = family.placeholders["video"]
    first, *rest = text.split(token)
    videos = [number for number, extent in enumerate(extents) if extent.modality == "video"]
    assert len(rest) == len(videos), "placeholders are counted before"
    written = (_written(extents[number], _sound_of(number, extents), family) for number in videos)
    return first + "".join(f"{frames}{after}" for frames, after in zip(written, rest, strict=True))


def _written(video: Extent, sound: Extent | None, family: Family) -> str:
    token = family.placeholders["video"]
    if sound is not None:
        return family.wrapped["audio"].replace(family.placeholders["audio"], token)
    return "".join(family.frame.format(time=time) for time in video.times) or token


def _sound_of(number: int, extents: Sequence[Extent]) -> Extent | None:
    """The sound of a video."""
    after = extents[number + 1] if number + 1 < len(extents) else None
    return after if after is not None and after.is_of_video else None


def expand(
    token_ids: Sequence[int], extents: Sequence[Extent], placeholders: Mapping[int, Modality]
) -> Expanded:
    """Repeats the token of each medium as often as it has features.

    Args:
        token_ids: of the text, with one token for each stretch of a medium; for a video with sound,
            one for both.
        extents: of the media, in order of their places in the text.
        placeholders: modality by the id of its token.
    """
    found, spans = list[int](), list[Span]()
    stretches = {modality: _stretches(extents, modality) for modality in set(placeholders.values())}
    ids = {modality: token for token, modality in placeholders.items()}
    for token in token_ids:
        modality = placeholders.get(token)
        if modality is None:
            found.append(token)
            continue
        for medium, count in next(stretches[modality]):
            spans.append(Span(medium, len(found), count))
            found += [ids[extents[medium].modality]] * count
    assert all(next(rest, None) is None for rest in stretches.values()), "every medium has a place"
    return Expanded(found, tuple(spans))


def _stretches(
    extents: Sequence[Extent], modality: Modality
) -> Iterator[Sequence[tuple[int, int]]]:
    """Yields (medium, tokens) of what stands for each token of a modality in the text."""
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
