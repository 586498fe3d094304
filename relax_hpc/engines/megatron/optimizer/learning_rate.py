"""The learning rate of every step."""

import math
from collections.abc import Callable

from relax_hpc.config.optimizer import OptimizerConfig

_REMAINING: dict[str, Callable[[float], float]] = {
    "constant": lambda _: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: (1.0 + math.cos(math.pi * progress)) / 2,
    "sqrt": lambda progress: 1.0 - math.sqrt(progress),
}
"""Progress of the decay, 0 to 1 -> what is left of the way from `lr` to where it ends."""


def learning_rate(config: OptimizerConfig, step: int, num_steps: int, still: int = 0) -> float:
    """Rises linearly to `lr` at step `warmup_steps`, stays, and falls to its end at `num_steps`.

    Args:
        step: 1-based; beyond `num_steps` the rate stays where it ended.
        still: first steps that update nothing; the rest is a run of its own.
    """
    step, num_steps = step - still, num_steps - still
    if step < config.warmup_steps:
        return config.lr * step / config.warmup_steps
    begin = max(config.warmup_steps, 1)
    if config.decay_steps:
        begin = max(begin, num_steps - config.decay_steps)
    progress = (step - begin) / (num_steps - begin) if num_steps > begin else 0.0
    left = _REMAINING[config.decay](min(max(progress, 0.0), 1.0))
    return config.lr * (config.final_lr_fraction + (1.0 - config.final_lr_fraction) * left)
