r"""1 for the right mathematics in the last \boxed{}, else 0."""

from relax_hpc.environments.rewards.answers import final_text, last_box
from relax_hpc.environments.rewards.equality import equal, tidy

REMEDY = r"write what is to be in the box, like 75 or \frac{1}{2}"


def score(response: str, answer: str, *, in_thought: bool = False) -> float:
    r"""Whether the last \boxed{...} after the last `</think>` equals `answer`."""
    return float(equal(last_box(final_text(response, in_thought)) or "", answer))


def marks(response: str) -> bool:
    return last_box(final_text(response)) is not None


def can_match(answer: str) -> bool:
    return bool(tidy(answer))
