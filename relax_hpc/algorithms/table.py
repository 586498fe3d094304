"""The algorithms by name: a file each, and a line here."""

import difflib
from typing import Any

from relax_hpc.algorithms.algorithm import Algorithm, Needs, Settings
from relax_hpc.algorithms.grpo import GRPO

ALGORITHMS: dict[str, Algorithm] = {algorithm.name: algorithm for algorithm in (GRPO,)}
DEFAULT = GRPO


def settings_of(value: Any) -> Any:  # noqa: ANN401
    """A table [algorithm] as the settings of the algorithm that it names.

    Raises:
        ValueError: there is no such algorithm, or it does not take these settings.
    """
    if not isinstance(value, dict):
        return value
    name = value.get("name", DEFAULT.name)
    if name not in ALGORITHMS:
        close = difflib.get_close_matches(str(name), ALGORITHMS, n=1) or list(ALGORITHMS)
        raise ValueError(f"there is no algorithm {name!r}; use {' or '.join(close)}")
    return ALGORITHMS[name].settings.model_validate({**value, "name": name})


def sections() -> list[type[Settings]]:
    """The sections that may stand in [algorithm]."""
    return [algorithm.settings for algorithm in ALGORITHMS.values()]


def algorithm_of(settings: Settings) -> Algorithm:
    """The algorithm that `settings` are of."""
    return ALGORITHMS[settings.name]


def needs_of(settings: Settings) -> Needs:
    """Returns what its algorithm needs with these settings."""
    return algorithm_of(settings).needs(settings)
