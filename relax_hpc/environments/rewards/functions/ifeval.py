"""1 for a response that follows every machine-verifiable instruction of its prompt.

Follows IFEval (arXiv:2311.07911), strict: the response is taken as it is, after the last
`</think>`.
"""

from collections.abc import Mapping
from typing import Any, Literal

from relax_hpc.environments.rewards.answers import final_text
from relax_hpc.environments.rewards.instruction_rules import follows


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


def instructions_of(metadata: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Returns the instructions of a prompt, and their arguments.

    Raises:
        ValueError: it has none, or the two lists differ in length.
    """
    kinds, arguments = metadata.get("instruction_id_list"), metadata.get("kwargs")
    if not isinstance(kinds, list) or not kinds or not isinstance(arguments, list):
        raise ValueError(
            "the line of the data has no lists instruction_id_list and kwargs; it has "
            f"{', '.join(metadata) or 'nothing else'}"
        )
    if len(kinds) != len(arguments):
        raise ValueError(f"instruction_id_list has {len(kinds)} and kwargs {len(arguments)}")
    return [(str(kind), each or {}) for kind, each in zip(kinds, arguments, strict=True)]
