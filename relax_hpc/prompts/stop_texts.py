"""Texts that end a response, found in its tokens."""

from bisect import bisect_left
from collections.abc import Callable, Sequence

_SPARE = 8
"""Tokens looked at before those that a text can reach back to: some decode to nothing, and the
first ones that are decoded may look different."""


class StopTexts:
    """Tells the end of a response: the first token with which it holds one of the texts.

    Args:
        decode: returns the text of tokens, special ones included.
        texts: none empty.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], texts: Sequence[str]) -> None:
        self._decode, self._texts = decode, tuple(texts)
        self._reach = max(len(text.encode()) for text in texts) + _SPARE

    def __call__(self, token_ids: Sequence[int], seen: int) -> int | None:
        """Returns the number of tokens of the response; None while it is not over.

        Args:
            token_ids: of the response so far.
            seen: tokens that were looked at before, without an end.
        """
        first = max(0, seen - self._reach)  # a token that shows is a byte or more
        if not self._is_in(token_ids[first:]):
            return None
        ends = range(seen, len(token_ids) + 1)
        return ends[bisect_left(ends, True, key=lambda end: self._is_in(token_ids[first:end]))]

    def _is_in(self, token_ids: Sequence[int]) -> bool:
        decoded = self._decode(token_ids)
        return any(text in decoded for text in self._texts)
