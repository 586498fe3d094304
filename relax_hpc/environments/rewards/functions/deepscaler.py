r"""1 for the right mathematics in the last \boxed{} of a response that has thought, else 0.

After DeepScaleR: a response without `</think>` or `###Response` has not ended its thought.
"""

from relax_hpc.environments.rewards.answers import final_text, last_box
from relax_hpc.environments.rewards.equality import equal, tidy

REMEDY = r"write what is to be in the box, like 75 or \frac{1}{2}"
_RESPONSE = "###Response"


def score(response: str, answer: str, *, in_thought: bool = False) -> float:
    """Whether the last box after the thought equals `answer`, which may be in a box, too."""
    if "</think>" not in response and _RESPONSE not in response:
        return 0.0
    in_thought = in_thought and _RESPONSE not in response
    final = final_text(response, in_thought).rpartition(_RESPONSE)[2]
    return float(equal(last_box(final) or "", answer))


def can_match(answer: str) -> bool:
    return bool(tidy(answer))
