r"""Mostly 1 for the right mathematics in \boxed{}, and a little for a thought before it."""

from relax_hpc.environments.rewards.answers import final_text, last_box
from relax_hpc.environments.rewards.contract import Score
from relax_hpc.environments.rewards.equality import equal, tidy
from relax_hpc.errors import ConfigError

REMEDY = r"write what is to be in the box, like 75 or \frac{1}{2}"


def score(
    response: str,
    answer: str,
    *,
    in_thought: bool = False,
    format_weight: float = 0.1,
    opened: bool = False,
) -> Score:
    r"""Returns 0.9 if the last box equals `answer`, plus 0.1 for `<think>...</think> \boxed{...}`.

    Args:
        in_thought: the prompt opened a thought.
        format_weight: weight of the form; the answer has the rest to 1.
        opened: the prompt opened a thought, though its last characters do not show it.
    """
    opened = opened or in_thought
    box = last_box(final_text(response, opened))
    begins = opened or response.lstrip().startswith("<think>")
    is_formed = begins and "</think>" in response and box is not None
    parts = {
        "accuracy": (1 - format_weight) * equal(box or "", answer),
        "format": format_weight * is_formed,
    }
    return Score(sum(parts.values()), parts)


def can_match(answer: str) -> bool:
    return bool(tidy(answer))


def check(format_weight: float, opened: bool) -> None:
    """Raises:
    ConfigError: the weights of form and answer cannot add up to 1.
    """
    if not 0 <= format_weight <= 1:
        raise ConfigError(f"args.format_weight = {format_weight}: use 0 to 1")
