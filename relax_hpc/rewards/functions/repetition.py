"""A penalty for loops: how many sequences of words have been said before."""

import re

from relax_hpc.errors import ConfigError

_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W\u3040-\u30ff\u3400-\u9fff]+")


def score(response: str, *, words: int = 20) -> float:
    """Returns minus the fraction of sequences of `words` words that stood there before.

    0 is none, and a response that loops for ever comes close to -1. All of the response counts, the
    thought, too. A Chinese or Japanese character is a word.

    Args:
        response: text.
        words: in a sequence.
    """
    said = _WORD.findall(response.lower())
    count = len(said) - words + 1
    if count <= 0:
        return 0.0
    return len(set(zip(*(said[i:] for i in range(words)), strict=False))) / count - 1.0


def lowest(**_: object) -> float:
    """Returns the reward of a loop for ever."""
    return -1.0


def check(words: int) -> None:
    """Checks the settings.

    Raises:
        ConfigError: a sequence has no words, or too many to be kept.
    """
    if not 1 <= words <= 100:
        raise ConfigError(f"args.words = {words}: use 1 to 100")
