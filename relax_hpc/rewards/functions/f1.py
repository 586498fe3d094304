"""Overlap of the words of response and answer, as SQuAD has it (arXiv:1606.05250)."""

import re
import string
from collections import Counter

from relax_hpc.rewards.answers import final_text, marked, plain

REMEDY = "write at least one word that is no article"
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_CLOSED = ({"yes"}, {"no"}, {"noanswer"})


def score(response: str, answer: str, *, in_thought: bool = False) -> float:
    r"""Harmonic mean of precision and recall of words: no articles, punctuation or capitals.

    What counts is `<answer>`, what follows `Answer:` or \boxed{}, or else all. To yes, no and
    noanswer only the same is right (HotpotQA, arXiv:1809.09600).
    """
    final = final_text(response, in_thought)
    said = marked(final)
    given, wanted = _words(final if said is None else said), _words(answer)
    if given.keys() != wanted.keys() and (given.keys() in _CLOSED or wanted.keys() in _CLOSED):
        return 0.0
    common = (given & wanted).total()
    return 2 * common / (given.total() + wanted.total()) if common else 0.0


def can_match(answer: str) -> bool:
    """Whether an answer has words."""
    return bool(_words(answer))


def _words(text: str) -> Counter[str]:
    return Counter(_ARTICLES.sub(" ", plain(text).lower().translate(_PUNCTUATION)).split())
