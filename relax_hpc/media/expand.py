"""Text with a token for every medium -> token ids with as many as it has features."""

from collections.abc import Iterator, Mapping, Sequence
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
    """Writes the frames of videos into the text, of a family that writes them one by one.

    The token of a video is replaced where it stands. The template's own tokens around it stay, so
    that they stand around all frames, as transformers 5 has it.

    Args:
        text: of the chat template, with one token a medium.
        extents: of the media, in order.
        family: of the model.
    """
    if not family.frame:
        return text
    videos = [extent for extent in extents if extent.modality == "video"]
    first, *rest = text.split(family.placeholders["video"])
    assert len(rest) == len(videos), "placeholders are counted before"
    written = ("".join(family.frame.format(time=time) for time in v.times) for v in videos)
    return first + "".join(f"{frames}{after}" for frames, after in zip(written, rest, strict=True))


def expand(
    token_ids: Sequence[int], extents: Sequence[Extent], placeholders: Mapping[int, Modality]
) -> Expanded:
    """Repeats the token of each medium as often as it has features.

    Args:
        token_ids: of the text, with one token for each stretch of a medium.
        extents: of the media, in order of their places in the text.
        placeholders: modality by the id of its token.
    """
    found, spans = list[int](), list[Span]()
    stretches = {modality: _stretches(extents, modality) for modality in set(placeholders.values())}
    for token in token_ids:
        modality = placeholders.get(token)
        if modality is None:
            found.append(token)
            continue
        medium, count = next(stretches[modality])
        spans.append(Span(medium, len(found), count))
        found += [token] * count
    assert all(next(rest, None) is None for rest in stretches.values()), "every medium has a place"
    return Expanded(found, tuple(spans))


def _stretches(extents: Sequence[Extent], modality: Modality) -> Iterator[tuple[int, int]]:
    """Yields (medium, tokens) of every stretch of the media of a modality."""
    for number, extent in enumerate(extents):
        if extent.modality == modality:
            yield from ((number, count) for count in extent.tokens)
