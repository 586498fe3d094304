"""A reward as one of the package's own, which refuses some of its settings."""

from relax_hpc.errors import ConfigError

REMEDY = "say yes"


def score(response: str, *, level: int = 1, manner: str = "mild") -> float:
    return float(level)


def can_match(answer: str) -> bool:
    return answer == "yes"


def check(*, level: int, manner: str) -> None:
    if level < 1:
        raise ConfigError(f"level {level} of {manner} is none")
