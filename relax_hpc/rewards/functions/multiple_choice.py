r"""1 for the right letter in `<answer>`, after `Answer:` or in \boxed{}, else 0."""

import re
from collections.abc import Mapping
from typing import Any

from relax_hpc.rewards.answers import final_text, marked, plain
from relax_hpc.rewards.equality import tidy

REMEDY = "write the letter of a choice, like B"
_LETTER = re.compile(
    r"(?:(?:the )?(?:correct )?(?:answer|option|choice)(?: is)?:? )?"
    r"(?:\(([A-Z])\)|([A-Z])(?:[).:]|$))(.*)",
    re.IGNORECASE | re.DOTALL,
)
_MOST_CHARACTERS = 2000
_FURTHER = re.compile(r"\b[A-Z]\)|(?:\b(?:or|and)\b|[,/;&]) *\(?[A-Z]\b")


def score(
    response: str, answer: str, metadata: Mapping[str, Any], *, in_thought: bool = False
) -> float:
    """Whether the response chooses as `answer` does.

    Choices may be told by their text where the line of the data has them, in order, as `choices`.
    """
    given = marked(final_text(response, in_thought))
    wanted = _letter(answer)
    if given is None or wanted is None:
        return 0.0
    return float((_by_text(given, metadata.get("choices")) or _letter(given)) == wanted)


def can_match(answer: str) -> bool:
    """Whether an answer is a letter."""
    return _letter(answer) is not None


def _letter(text: str) -> str | None:
    """Letter of a choice that text begins with; None of one that names two."""
    found = _LETTER.fullmatch(tidy(text[:_MOST_CHARACTERS].strip("*_ ")))
    if found is None or _FURTHER.search(found[3]):
        return None
    return (found[1] or found[2]).upper()


def _by_text(given: str, choices: object) -> str | None:
    if not isinstance(choices, list | tuple):
        return None
    texts = [_folded(str(choice)) for choice in choices]
    said = _folded(given)
    return chr(ord("A") + texts.index(said)) if said in texts else None


def _folded(text: str) -> str:
    return " ".join(plain(text).casefold().split()).rstrip(".")
