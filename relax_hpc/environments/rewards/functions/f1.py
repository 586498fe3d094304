"""F1 score of the words of response and answer, as in SQuAD (arXiv:1606.05250)."""

import re
import string
from collections import Counter

from relax_hpc.environments.rewards.answers import final_text, marked, plain

REMEDY = "write at least one word that is no article"
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_CLOSED = ({"yes"}, {"no"}, {"noanswer"})


def score(response: str, answer: str, *, in_thought: bool = False) -> float:
    r"""Harmonic mean of precision and recall of words, without articles, punctuation or case.

    `<answer>` counts, else the text after `Answer:` or in \boxed{}, else all of it. The answers
    yes, no and noanswer need an exact match (HotpotQA, arXiv:1809.09600).
    """
    final = final_text(response, in_thought)
    said = marked(final)
    given, wanted = _words(final if said is None else said), _words(answer)
    if given.keys() != wanted.keys() and (given.keys() in _CLOSED or wanted.keys() in _CLOSED):
        return 0.0
    common = (given & wanted).total()
    return 2 * common / (given.total() + wanted.total()) if common else 0.0


def can_match(answer: str) -> bool:
    return bool(_words(answer))


def _words(text: str) -> Counter[str]:
    return Counter(_ARTICLES.sub(" ", plain(text).lower().translate(_PUNCTUATION)).split())
