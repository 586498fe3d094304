"""A penalty for loops: the fraction of word sequences that repeat earlier ones."""

import re

from relax_hpc.errors import ConfigError

_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W\u3040-\u30ff\u3400-\u9fff]+")


def score(response: str, *, words: int = 20) -> float:
    """Returns minus the fraction of sequences of `words` words that occurred before.

    0 without repeats, near -1 for an endless loop. The whole response counts, thoughts included. A
    Chinese or Japanese character is a word.
    """
    said = _WORD.findall(response.lower())
    count = len(said) - words + 1
    if count <= 0:
        return 0.0
    return len(set(zip(*(said[i:] for i in range(words)), strict=False))) / count - 1.0


def lowest(**_: object) -> float:
    return -1.0


def check(words: int) -> None:
    """Raises:
    ConfigError: a sequence has no words, or too many to be kept.
    """
    if not 1 <= words <= 100:
        raise ConfigError(f"args.words = {words}: use 1 to 100")
