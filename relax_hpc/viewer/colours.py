"""The colours of tokens: what each says, once for the page and the terminal."""

import math
from bisect import bisect_left, bisect_right
from typing import NamedTuple

from relax_hpc.viewer.asked import By

LOGPROB_BOUNDS = (0.05, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Nats below 0 from which a token has the next colour."""


_ADVANTAGES: tuple[tuple[float, str, str], ...] = (
    (-1.0, "#e58a72", "advantage <= -1"),
    (-0.5, "#f2b5a0", "<= -0.5"),
    (-1e-6, "#fbe0d6", "below 0"),
    (1e-6, "#f1f1f1", "0"),
    (0.5, "#d5ebe6", "above 0"),
    (1.0, "#a3d5c9", ">= 0.5"),
    (math.inf, "#63b8a5", ">= 1"),
)
"""Upper bound (it belongs to what is further from 0), background and meaning."""


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
    """The facts of a token, or of the few that spell one character."""

    text: str
    is_sampled: bool
    """Whether the loss mask is 1."""
    logprob: float
    """Nats, by the policy that sampled it, the lowest of several tokens; 0 if not sampled."""
    version: int
    """The version of that policy; -1 if it was not sampled."""
    advantage: float | None = None
    """The one of the token, or else of its episode; None if it was not sampled, or where that is
    not known."""


def colour(token: Token, by: By) -> int | None:
    """The number of a token's colour in `COLOURS[by]`; None if this says nothing of it."""
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
