r"""1 for the right mathematics after `Answer:`, or else in the last \boxed{}; wrong is -1.

As DAPO trained (arXiv:2503.14476), and verl reads it (verl/utils/reward_score/math_dapo.py:
`Answer\s*:\s*([^\n]+)`). There, only the last 300 characters were searched.
"""

from relax_hpc.environments.rewards.answers import final_text, line_or_box
from relax_hpc.environments.rewards.equality import equal, tidy

REMEDY = "write what is to follow `Answer:`, like 75"


def score(response: str, answer: str, *, in_thought: bool = False, wrong: float = -1.0) -> float:
    """Returns 1 if the last line `Answer: ...` equals `answer`, or the last box if there is none.

    Args:
        response: only the text after the last `</think>` counts.
        in_thought: the prompt opened a thought.
        wrong: reward of anything else.
    """
    return 1.0 if equal(line_or_box(final_text(response, in_thought)) or "", answer) else wrong


def marks(response: str) -> bool:
    return line_or_box(final_text(response)) is not None


def lowest(wrong: float) -> float:
    return wrong


def can_match(answer: str) -> bool:
    return bool(tidy(answer))
