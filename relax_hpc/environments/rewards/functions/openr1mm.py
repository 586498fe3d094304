r"""1 for the right mathematics in a single `<answer>`, or else in the last \boxed{}; else 0."""

from relax_hpc.environments.rewards.answers import final_text, last_box, last_tag
from relax_hpc.environments.rewards.equality import equal, tidy

REMEDY = "write what is to be in the tag, like 75 or <answer>75</answer>"
_ONCE = ("</think>", "<answer>", "</answer>")


def score(response: str, answer: str, *, in_thought: bool = False) -> float:
    """Whether the tag `<answer>`, or the last box without one, equals `answer`.

    0 if the thought or the answer is closed twice. `answer` may be in a tag, too.
    """
    if any(response.count(tag) > 1 for tag in _ONCE):
        return 0.0
    return float(equal(_parse_answer(final_text(response, in_thought)), _parse_wanted(answer)))


def can_match(answer: str) -> bool:
    return bool(tidy(_parse_wanted(answer)))


def _parse_answer(text: str) -> str:
    tag = last_tag(text, "answer")
    box = last_box(text if tag is None else tag)
    return (tag if box is None else box) or ""


def _parse_wanted(answer: str) -> str:
    tag = last_tag(answer, "answer")
    return answer if tag is None else tag
