"""Changes of a job between two starts of a run: those that leave alone what is trained."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from relax_hpc.config.run import JobConfig
from relax_hpc.engines.megatron.optimizer.learning_rate import learning_rate
from relax_hpc.errors import CheckpointError, ConfigError, shown
from relax_hpc.job_file import with_overrides
from relax_hpc.launch.placement import place
from relax_hpc.paths import RunPaths
from relax_hpc.sections import Resources

_FREE = re.compile(
    r"(.+\.)?resources\.\w+"
    r"|launch\.(max_restarts|peer_timeout_s|idle_s)"
    r"|\w+\.(save_every|keep_checkpoints|keep_every|save_hf_every)"
    r"|bus\.keep_steps|weights\.timeout_s|notify\.\w+"
    r"|engines\.[^.]+\.(start_timeout_s|hang_timeout_s)"
)
"""Keys that say where and how long a run computes, and what it keeps."""
_STEPS = ("schedule.num_steps", "sft.num_steps")


def changed(config: JobConfig, overrides: Sequence[str]) -> tuple[JobConfig, list[str]]:
    """Applies `section.key=value` to the job of a run.

    Returns:
        The job, and a line for each key whose value is another one now.

    Raises:
        ConfigError: a key would change what is trained, or is none.
    """
    tree = config.model_dump(mode="json")
    everywhere = [each for asked in overrides for each in _of_components(config, asked)]
    new = with_overrides(
        config.model_dump(mode="json"), [*everywhere, *overrides], source="resume --set"
    )
    before, after = dict(_flat(tree)), dict(_flat(new.model_dump(mode="json")))
    keys = [key for key in {**before, **after} if before.get(key) != after.get(key)]
    return new, [_allowed(config, key, before.get(key), after.get(key)) for key in keys]


def another_run(config: JobConfig) -> str:
    """Says how another run begins with the policy of this one."""
    from relax_hpc.checkpoints import store  # seconds, for torch

    said = "submit a run of another name"
    try:
        newest = store.find(RunPaths(config.run_dir).checkpoints, None)
    except CheckpointError:
        return said
    return f"{said} that begins with this one's checkpoint: --set model.weights={newest}"


def _of_components(config: JobConfig, override: str) -> Iterator[str]:
    """Says of every component what is asked of `resources`: in the job of a run, each has its
    own."""
    section, _, field = override.strip().partition(".")
    if section == "resources" and field.split("=")[0].strip() in Resources.model_fields:
        for component in place(config):
            if component.section:
                yield f"{component.section}.{override.strip()}"


def _allowed(config: JobConfig, key: str, before: Any, after: Any) -> str:  # noqa: ANN401
    said = f"{key}: {shown(before)} -> {shown(after)}"
    if _FREE.fullmatch(key):
        return said
    if key not in _STEPS:
        raise ConfigError(
            f"--set {key}={shown(after)}: would change what is trained, and a run has one job for "
            f"all its steps; {another_run(config)}"
        )
    if after is None or before is None or after < before:
        raise ConfigError(
            f"--set {key}={shown(after)}: is less than {shown(before)}; to end earlier, cancel it"
        )
    return said + _of_rate(config, before, after)


def _of_rate(config: JobConfig, before: int, after: int) -> str:
    """Says what more steps make of a learning rate that falls; nothing of one that does not."""
    optimizer, done = config.actor.optimizer, _steps_saved(config)
    if optimizer.final_lr_fraction == 1:
        return ""

    def rate(step: int, num_steps: int) -> str:
        return f"{learning_rate(optimizer, step, num_steps, config.steps_of_critic_alone):.3g}"

    said = f"; the learning rate falls over all of them: {rate(done + 1, after)} at step {done + 1}"
    if done < before:
        return f"{said}, {rate(done + 1, before)} over {before}"
    return f"{said}, after {rate(done, before)} at step {done}"


def _steps_saved(config: JobConfig) -> int:
    from relax_hpc.checkpoints import store  # seconds, for torch

    try:
        return store.step_of(store.find(RunPaths(config.run_dir).checkpoints, None)) or 0
    except CheckpointError:
        return 0


def _flat(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
