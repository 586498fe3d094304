r"""1 for the very text of the answer, else 0."""

from relax_hpc.rewards.answers import final_text, marked, plain

REMEDY = "write a text"


def score(
    response: str, answer: str, *, in_thought: bool = False, ignore_case: bool = False
) -> float:
    r"""Whether the response says `answer`; white space counts as one space.

    Args:
        response: text; what counts is `<answer>`, what follows `Answer:` or \boxed{}, or else all.
        answer: in the data.
        in_thought: the prompt opened a thought.
        ignore_case: capital letters are as good as small ones.
    """
    final = final_text(response, in_thought)
    given = marked(final)
    texts = [_squeezed(each) for each in (final if given is None else given, answer)]
    if ignore_case:
        texts = [each.casefold() for each in texts]
    return float(texts[0] == texts[1] != "")


def can_match(answer: str) -> bool:
    """Whether there is an answer."""
    return bool(plain(answer))


def _squeezed(text: str) -> str:
    return " ".join(plain(text).split())
