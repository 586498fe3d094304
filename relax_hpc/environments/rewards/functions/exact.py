r"""1 for the very text of the answer, else 0."""

from relax_hpc.environments.rewards.answers import final_text, marked, plain

REMEDY = "write a text"


def score(
    response: str, answer: str, *, in_thought: bool = False, ignore_case: bool = False
) -> float:
    r"""Whether the response is `answer`, up to white space.

    Args:
        response: `<answer>` counts, else the text after `Answer:` or in \boxed{}, else all of it.
        in_thought: the prompt opened a thought.
        ignore_case: ignore upper and lower case.
    """
    final = final_text(response, in_thought)
    given = marked(final)
    texts = [_squeeze(each) for each in (final if given is None else given, answer)]
    if ignore_case:
        texts = [each.casefold() for each in texts]
    return float(texts[0] == texts[1] != "")


def can_match(answer: str) -> bool:
    return bool(plain(answer))


def _squeeze(text: str) -> str:
    return " ".join(plain(text).split())
