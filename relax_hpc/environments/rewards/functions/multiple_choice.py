r"""1 for the right letter in `<answer>`, after `Answer:` or in \boxed{}, else 0.

The public grader takes the letter that `Answer[ \t]*:[ \t]*\$?([A-D])\$?` finds, whatever follows
(openai/simple-evals, common.py). So do we, in any brackets, unless a second letter follows.
"""

import re
from collections.abc import Mapping
from typing import Any

from relax_hpc.environments.rewards.answers import final_text, marked, plain
from relax_hpc.environments.rewards.equality import tidy

REMEDY = "write the letter of a choice, like B"
_LETTER = re.compile(
    r"(?:(?:the )?(?:(?:correct|right|best|final) )*(?:answer|option|choice)(?: is)?:?\s*)?"
    r"(?:[(\[{<]\s*([A-Z])\s*[)\]}>]|([A-Z])(?=[).:,;\]}>-]|$)|((?-i:[A-HJ-Z]))(?=\s))(.*)",
    re.IGNORECASE | re.DOTALL,
)
_QUOTES = str.maketrans("", "", "*_`\"'\u201c\u201d\u2018\u2019")
_MOST_CHARACTERS = 2000
_FURTHER = re.compile(r"\b[A-Z][)\]}>]|(?:\b(?:or|and)\b|[,/;&]) *[(\[]?[A-HJ-Z]\b")


def score(
    response: str, answer: str, metadata: Mapping[str, Any], *, in_thought: bool = False
) -> float:
    """Whether the response makes the choice of `answer`.

    A choice may be given by its text if the row lists the `choices` in order.
    """
    given = marked(final_text(response, in_thought))
    wanted = _letter(answer)
    if given is None or wanted is None:
        return 0.0
    return float((_by_text(given, metadata.get("choices")) or _letter(given)) == wanted)


def can_match(answer: str) -> bool:
    return _letter(answer) is not None


def _letter(text: str) -> str | None:
    """Returns the letter of a choice that begins the text; None if it names two."""
    found = _LETTER.fullmatch(tidy(text[:_MOST_CHARACTERS].translate(_QUOTES)))
    if found is None or _FURTHER.search(found[4]):
        return None
    return (found[1] or found[2] or found[3]).upper()


def _by_text(given: str, choices: object) -> str | None:
    if not isinstance(choices, list | tuple):
        return None
    texts = [_fold(str(choice)) for choice in choices]
    said = _fold(given)
    return chr(ord("A") + texts.index(said)) if said in texts else None


def _fold(text: str) -> str:
    return " ".join(plain(text).casefold().split()).rstrip(".")
