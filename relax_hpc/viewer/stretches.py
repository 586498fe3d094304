"""Tokens that stand for features of media: many of the same, of which a few words are shown."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from relax_hpc.media.kinds import modality_of
from relax_hpc.schema import Medium, Trajectory


class Stretch(NamedTuple):
    """Tokens lo <= i < hi."""

    lo: int
    hi: int
    said: str
    """Shown in their place."""


class Cut(NamedTuple):
    """The part of a text that is shown: up to `head`, and from `tail` on."""

    head: int
    tail: int


def of_row(row: Trajectory) -> list[Stretch]:
    """The stretches of a row, in order; those that touch, of a video and its sound, are one."""
    names, found = _names(row.media), list[Stretch]()
    tokens = dict[str, int]()
    for medium, first, count in row.media_spans.tolist():
        touches = found and found[-1].hi == first
        tokens = tokens if touches else {}
        tokens[names[medium]] = tokens.get(names[medium], 0) + count
        said = "; ".join(f"{name}: {number} tokens" for name, number in tokens.items())
        lo = found.pop().lo if touches else first
        found.append(Stretch(lo, first + count, f"[{said}]"))
    return found


def within(stretches: Iterable[Stretch], lo: int, hi: int) -> list[Stretch]:
    """Returns those that begin at tokens lo <= i < hi, counted from lo."""
    return [s._replace(lo=s.lo - lo, hi=s.hi - lo) for s in stretches if lo <= s.lo < hi]


def cut(size: int, stretches: Sequence[Stretch], cap: int) -> Cut:
    """Chooses the first and last tokens of a text, `cap` together; a stretch counts as one.

    Args:
        size: tokens of the text.
        stretches: of the text.
        cap: 2 or more.
    """
    if size - sum(s.hi - s.lo - 1 for s in stretches) <= cap:
        return Cut(size, size)
    head, tail = cap - cap // 2, size - cap // 2
    for each in stretches:
        if each.lo < head:
            head += each.hi - each.lo - 1
    for each in reversed(stretches):
        if each.hi > tail:
            tail -= each.hi - each.lo - 1
    return Cut(head, tail)


def _names(media: Sequence[Medium]) -> list[str]:
    """The names of media, each numbered among those of its kind."""
    kinds = [modality_of(medium) for medium in media]
    return [f"{kind} {kinds[: place + 1].count(kind)}" for place, kind in enumerate(kinds)]
