r"""1 for the right mathematics in a single `<answer>`, or else in the last \boxed{}; else 0."""

from relax_hpc.rewards.answers import final_text, last_box, last_tag
from relax_hpc.rewards.equality import equal, tidy

REMEDY = "write what is to be in the tag, like 75 or <answer>75</answer>"
_ONCE = ("</think>", "<answer>", "</answer>")


def score(response: str, answer: str, *, in_thought: bool = False) -> float:
    """Whether the tag `<answer>`, or the last box where there is none, equals `answer`.

    0 where the thought or the answer is closed twice. `answer` may be in a tag, too.
    """
    if any(response.count(tag) > 1 for tag in _ONCE):
        return 0.0
    return float(equal(_said(final_text(response, in_thought)), _wanted(answer)))


def can_match(answer: str) -> bool:
    """Whether there is an answer."""
    return bool(tidy(_wanted(answer)))


def _said(text: str) -> str:
    tag = last_tag(text, "answer")
    box = last_box(text if tag is None else tag)
    return (tag if box is None else box) or ""


def _wanted(answer: str) -> str:
    tag = last_tag(answer, "answer")
    return answer if tag is None else tag
