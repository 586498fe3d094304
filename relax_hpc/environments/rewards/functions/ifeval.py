"""1 for a response that follows every machine-verifiable instruction of its prompt.

Follows IFEval (arXiv:2311.07911), strict: the response is taken as it is, after the last
`</think>`.
"""

from collections.abc import Mapping
from typing import Any, Literal

from relax_hpc.environments.rewards.answers import final_text
from relax_hpc.environments.rewards.instruction_rules import follows, instructions_of


def score(
    response: str,
    metadata: Mapping[str, Any],
    *,
    in_thought: bool = False,
    level: Literal["prompt", "instruction"] = "prompt",
) -> float:
    """Verifies the instructions of a prompt.

    Args:
        metadata: `instruction_id_list` and, as long, `kwargs`, as in the public data set.
        in_thought: the prompt opened a thought.
        level: "prompt", 1 only if all are followed; "instruction", the fraction that is.

    Raises:
        ValueError: the metadata has none, or one without a rule.
    """
    followed = [
        follows(final_text(response, in_thought), *each) for each in instructions_of(metadata)
    ]
    return float(all(followed)) if level == "prompt" else sum(followed) / len(followed)
