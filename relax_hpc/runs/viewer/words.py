"""Decodes tokens to pieces of text, one per token where possible, and colours them.

A media span is shown as a few words.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from relax_hpc.data.media.kinds import modality_of
from relax_hpc.runs.viewer import By
from relax_hpc.runtime.text import printable
from relax_hpc.schema import Medium, Trajectory


class CollapsedSpan(NamedTuple):
    """Tokens lo <= i < hi."""

    lo: int
    hi: int
    said: str
    """Shown in their place."""


class Cut(NamedTuple):
    """The shown part of a text: up to `head`, and from `tail` on."""

    head: int
    tail: int


def of_row(row: Trajectory) -> list[CollapsedSpan]:
    """Returns the media spans of a row in order; adjacent ones, of a video and its sound, are
    one."""
    names, found = _names(row.media), list[CollapsedSpan]()
    tokens = dict[str, int]()
    for medium, first, count in row.media_spans.tolist():
        touches = found and found[-1].hi == first
        tokens = tokens if touches else {}
        tokens[names[medium]] = tokens.get(names[medium], 0) + count
        said = "; ".join(f"{name}: {number} tokens" for name, number in tokens.items())
        lo = found.pop().lo if touches else first
        found.append(CollapsedSpan(lo, first + count, f"[{said}]"))
    return found


def within(stretches: Iterable[CollapsedSpan], lo: int, hi: int) -> list[CollapsedSpan]:
    """Returns spans that begin at tokens lo <= i < hi, relative to lo."""
    return [s._replace(lo=s.lo - lo, hi=s.hi - lo) for s in stretches if lo <= s.lo < hi]


def cut(size: int, stretches: Sequence[CollapsedSpan], cap: int) -> Cut:
    """Keeps the first and last tokens of a text, `cap` together; a span counts as one.

    Args:
        size: tokens of the text.
        stretches: media spans of the text.
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
    kinds = [modality_of(medium) for medium in media]
    return [f"{kind} {kinds[: place + 1].count(kind)}" for place, kind in enumerate(kinds)]


Decode = Callable[[Sequence[int]], str]
UNFINISHED = "\ufffd"
"""Replaces bytes that form no character yet."""
MOST_TOKENS_OF_A_CHARACTER = 4
"""Bytes of a character in UTF-8."""


class TextPiece(NamedTuple):
    text: str
    lo: int
    hi: int
    """End of the tokens lo <= i < hi behind the text."""


class Words:
    """Decodes token by token, with a cache.

    Args:
        decode: of the model's tokenizer.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._known: dict[int, str] = {}

    def text(self, tokens: Sequence[int], stretches: Sequence[CollapsedSpan] = ()) -> str:
        """Decodes tokens, with words for media spans."""
        said, lo = [], 0
        for each in stretches:
            said += [self._decode(tokens[lo : each.lo]), each.said]
            lo = each.hi
        return printable("".join([*said, self._decode(tokens[lo:])]))

    def pieces(
        self, tokens: Sequence[int], stretches: Sequence[CollapsedSpan] = ()
    ) -> Iterator[TextPiece]:
        """Yields a piece per token, per few tokens that form one character, or per media span."""
        lo, known = 0, {each.lo: each for each in stretches}
        while lo < len(tokens):
            found = known.get(lo)
            piece = TextPiece(found.said, lo, found.hi) if found else self._piece(tokens, lo)
            yield TextPiece(_shown(piece.text), piece.lo, piece.hi)
            lo = piece.hi

    def _piece(self, tokens: Sequence[int], lo: int) -> TextPiece:
        alone = self._alone(tokens[lo])
        if UNFINISHED in alone:
            for hi in range(lo + 2, min(lo + MOST_TOKENS_OF_A_CHARACTER, len(tokens)) + 1):
                text = self._decode(tokens[lo:hi])
                if UNFINISHED not in text:
                    return TextPiece(text, lo, hi)
        return TextPiece(alone, lo, lo + 1)

    def _alone(self, token: int) -> str:
        """Decodes a token as the second of two: some tokenizers strip a leading space."""
        if token not in self._known:
            once, twice = self._decode([token]), self._decode([token, token])
            text = twice[len(once) :] if twice.startswith(once) else once
            self._known[token] = text
        return self._known[token]


_shown = lru_cache(1 << 16)(printable)


LOGPROB_BOUNDS = (0.05, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Nats below 0 at which the next colour begins."""


_ADVANTAGES: tuple[tuple[float, str, str], ...] = (
    (-1.0, "#e58a72", "advantage <= -1"),
    (-0.5, "#f2b5a0", "<= -0.5"),
    (-1e-6, "#fbe0d6", "below 0"),
    (1e-6, "#f1f1f1", "0"),
    (0.5, "#d5ebe6", "above 0"),
    (1.0, "#a3d5c9", ">= 0.5"),
    (math.inf, "#63b8a5", ">= 1"),
)
"""Upper bound (inclusive on the side away from 0), background and meaning."""


_ADVANTAGE_BOUNDS = tuple(bound for bound, _, _ in _ADVANTAGES)


class Colour(NamedTuple):
    background: str
    """As #rrggbb; the text on it is black."""
    meaning: str


COLOURS: dict[By, tuple[Colour, ...]] = {
    "logprob": tuple(
        Colour(background, f"logprob {said}")
        for background, said in zip(
            (
                "#ffffff",
                "#fff7d6",
                "#ffeaa3",
                "#ffd873",
                "#ffbb5c",
                "#ff9950",
                "#f9745a",
                "#e0508a",
            ),
            ("0", *(f"<= -{bound:g}" for bound in LOGPROB_BOUNDS)),
            strict=True,
        )
    ),
    "advantage": tuple(Colour(background, said) for _, background, said in _ADVANTAGES),
    "mask": (Colour("#dddddd", "not trained on"), Colour("#c8ecc8", "sampled by the policy")),
    "version": tuple(
        Colour(background, f"policy version {number}, {number + 6}, ...")
        for number, background in enumerate(
            ("#cfe3ff", "#ffe0c2", "#d5f2cf", "#f3d3ee", "#fff3b0", "#cdf1f0")
        )
    ),
}


class Token(NamedTuple):
    """A token, or the few that form one character."""

    text: str
    is_sampled: bool
    """Whether the loss mask is 1."""
    logprob: float
    """Nats, by the sampling policy; the lowest of several tokens; 0 if not sampled."""
    version: int
    """Version of the sampling policy; -1 if not sampled."""
    advantage: float | None = None
    """The token's, or else its episode's; None if not sampled, or unknown."""


def colour(token: Token, by: By) -> int | None:
    """Returns the token's index in `COLOURS[by]`; None if not applicable."""
    if by == "mask":
        return int(token.is_sampled)
    if not token.is_sampled:
        return None
    if by == "version":
        return token.version % len(COLOURS["version"]) if token.version >= 0 else None
    if by == "advantage":
        return None if token.advantage is None else _side(token.advantage)
    return bisect_right(LOGPROB_BOUNDS, -token.logprob)


def _side(advantage: float) -> int:
    return (bisect_left if advantage < 0 else bisect_right)(_ADVANTAGE_BOUNDS, advantage)
