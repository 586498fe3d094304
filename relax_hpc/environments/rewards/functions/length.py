"""A penalty for long responses: DAPO's soft overlong punishment (arXiv:2503.14476)."""

from relax_hpc.errors import ConfigError


def score(num_tokens: int, *, limit: int = 20_480, cache: int = 4_096) -> float:
    """Returns 0 up to `limit - cache` tokens, falling linearly to -1 at `limit`.

    Args:
        limit: tokens from which on it is -1.
        cache: tokens before that in which it falls.
    """
    over = num_tokens - (limit - cache)
    if over <= 0:
        return 0.0
    return -min(1.0, over / cache) if cache else -1.0


def lowest(**_: object) -> float:
    return -1.0


def check(limit: int, cache: int) -> None:
    """Raises:
    ConfigError: the reward falls before the first token.
    """
    if not 0 <= cache <= limit:
        raise ConfigError(f"args.cache = {cache}: use 0 to args.limit = {limit}")
