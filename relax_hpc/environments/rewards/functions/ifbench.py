"""1 for a response that follows every instruction of its prompt, as IFBench verifies them.

Follows IFBench (arXiv:2507.02833), strict, through its own package, which users install themselves:
it is on no package index.
"""

import importlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from relax_hpc.environments.rewards.answers import final_text
from relax_hpc.environments.rewards.instruction_rules import instructions_of
from relax_hpc.errors import ConfigError, first_line

REGISTRY = "ifbench.instructions_registry"


def score(
    response: str,
    metadata: Mapping[str, Any],
    prompt: str | Sequence[Mapping[str, Any]],
    *,
    in_thought: bool = False,
    level: Literal["prompt", "instruction"] = "prompt",
    registry: str = REGISTRY,
) -> float:
    """Verifies the instructions of a prompt.

    Args:
        metadata: `instruction_id_list` and, as long, `kwargs`, as in the public data set.
        prompt: needed by some instructions.
        in_thought: the prompt opened a thought.
        level: "prompt", 1 only if all are followed; "instruction", the fraction that is.
        registry: module of the package that has INSTRUCTION_DICT.

    Raises:
        ValueError: the metadata has none, or one that the package does not know.
    """
    rules, text = (
        importlib.import_module(registry).INSTRUCTION_DICT,
        final_text(response, in_thought),
    )
    followed = []
    for kind, arguments in instructions_of(metadata):
        if kind not in rules:
            raise ValueError(f"instruction {kind!r} is not known to {registry}")
        rule = rules[kind](kind)
        rule.build_description(**{k: v for k, v in arguments.items() if v is not None})
        if "prompt" in (rule.get_instruction_args() or {}):
            rule.build_description(prompt=_text_of(prompt))
        followed.append(bool(text.strip()) and bool(rule.check_following(text)))
    return float(all(followed)) if level == "prompt" else sum(followed) / len(followed)


def check(*, registry: str = REGISTRY, **_: object) -> None:
    """Checks that the package and its dependencies are installed.

    Raises:
        ConfigError: it is not.
    """
    try:
        found = importlib.import_module(registry)
    except Exception as error:  # noqa: BLE001 - a package of somebody else's
        raise ConfigError(
            f"registry = {registry!r}: cannot be imported ({type(error).__name__}: "
            f"{first_line(error)}); install IFBench from its repository, allenai/IFBench, and its "
            "NLTK data, on this node and on those of the job"
        ) from None
    if not isinstance(getattr(found, "INSTRUCTION_DICT", None), Mapping):
        raise ConfigError(f"registry = {registry!r}: has no INSTRUCTION_DICT; name IFBench's own")


def _text_of(prompt: str | Sequence[Mapping[str, Any]]) -> str:
    if isinstance(prompt, str):
        return prompt
    said = [str(each.get("content", "")) for each in prompt if each.get("role") == "user"]
    return said[-1] if said else ""
