"""Tokens to pieces of text, one for each token where that can be."""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from relax_hpc.printable import printable
from relax_hpc.viewer.stretches import Stretch

Decode = Callable[[Sequence[int]], str]
"""Tokens to text."""
UNFINISHED = "\ufffd"
"""Stands for bytes that are no character, or not yet."""
MOST_TOKENS_OF_A_CHARACTER = 4
"""Bytes of a character in UTF-8."""


class Piece(NamedTuple):
    text: str
    lo: int
    hi: int
    """End of the tokens lo <= i < hi that the text spells."""


class Words:
    """Decodes token by token, each number once.

    Args:
        decode: of the model's tokenizer.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._known: dict[int, str] = {}

    def text(self, tokens: Sequence[int], stretches: Sequence[Stretch] = ()) -> str:
        """The text of tokens, with what is said of stretches of them."""
        said, lo = [], 0
        for each in stretches:
            said += [self._decode(tokens[lo : each.lo]), each.said]
            lo = each.hi
        return printable("".join([*said, self._decode(tokens[lo:])]))

    def pieces(self, tokens: Sequence[int], stretches: Sequence[Stretch] = ()) -> Iterator[Piece]:
        """One for each token, for the few that spell a character together, or for a stretch."""
        lo, known = 0, {each.lo: each for each in stretches}
        while lo < len(tokens):
            found = known.get(lo)
            piece = Piece(found.said, lo, found.hi) if found else self._piece(tokens, lo)
            yield Piece(_shown(piece.text), piece.lo, piece.hi)
            lo = piece.hi

    def _piece(self, tokens: Sequence[int], lo: int) -> Piece:
        alone = self._alone(tokens[lo])
        if UNFINISHED in alone:
            for hi in range(lo + 2, min(lo + MOST_TOKENS_OF_A_CHARACTER, len(tokens)) + 1):
                text = self._decode(tokens[lo:hi])
                if UNFINISHED not in text:
                    return Piece(text, lo, hi)
        return Piece(alone, lo, lo + 1)

    def _alone(self, token: int) -> str:
        """Some tokenizers leave out the space in front of a text: the second of two has it."""
        if token not in self._known:
            once, twice = self._decode([token]), self._decode([token, token])
            text = twice[len(once) :] if twice.startswith(once) else once
            self._known[token] = text
        return self._known[token]


_shown = lru_cache(1 << 16)(printable)
