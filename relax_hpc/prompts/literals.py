"""Texts in a conversation that are written like a template's own tokens, and are not."""

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_HIDDEN = "c94e07d2a6b8515f"
"""Stands, with a number, for the text of a token while a template renders what is around it."""


class Literals:
    """Keeps what somebody wrote apart from what the template writes.

    Special tokens that the template writes, and those that begin, end or fill a text, are tokens
    where the template writes them; in messages they are text. Other special tokens, say tags that
    somebody added to the vocabulary, are tokens in messages, too.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", template: str) -> None:
        """Takes the special tokens of a tokenizer that `template` writes."""
        self._tokenizer = tokenizer
        special = [str(t) for t in tokenizer.added_tokens_decoder.values() if t.special]
        named = {tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token} - {None, ""}
        own = {*named, *(text for text in special if text in template)}
        self._texts = sorted(map(str, own), key=lambda text: (-len(text), text))
        self._own = re.compile("|".join(map(re.escape, self._texts)) or r"(?!)")
        self._hidden = re.compile(rf"{_HIDDEN}(\d+)x")

    def hide(self, value: Any) -> Any:  # noqa: ANN401
        """Returns messages, or anything that JSON writes, with no such text in them."""
        if isinstance(value, str):
            return self._own.sub(lambda m: f"{_HIDDEN}{self._texts.index(m[0])}x", value)
        if isinstance(value, dict):
            return {key: self.hide(inside) for key, inside in value.items()}
        return [self.hide(inside) for inside in value] if isinstance(value, list) else value

    def are_in(self, text: str) -> bool:
        """Whether some text was hidden in what a template made of messages."""
        return self._hidden.search(text) is not None

    def last_token_end(self, text: str) -> int:
        """Returns where the last of the template's tokens ends in what it rendered; 0 of none."""
        return max((found.end() for found in self._own.finditer(text)), default=0)

    def encode(self, text: str) -> list[int]:
        """Token ids of what a template rendered; what was hidden is text again."""
        ids = list[int]()
        for place, part in enumerate(self._hidden.split(text)):
            if place % 2:
                ids += self._tokenizer.encode(
                    self._texts[int(part)], add_special_tokens=False, split_special_tokens=True
                )
            elif part:
                ids += self._tokenizer.encode(part, add_special_tokens=False)
        return ids
