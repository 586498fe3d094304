"""Changes a run's job at a resume, without changing what is trained."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from relax_hpc.config.job_file import read_resolved, with_overrides
from relax_hpc.config.model import learning_rate
from relax_hpc.config.moved import with_advanced
from relax_hpc.config.run import JobConfig
from relax_hpc.errors import CheckpointError, ConfigError, show
from relax_hpc.launch import record
from relax_hpc.launch.placement import place
from relax_hpc.runtime.files.records import read_json
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.sections import Resources

_FREE = re.compile(
    r"(.+\.)?resources\.\w+"
    r"|launch\.(max_restarts|advanced\.(peer_timeout_s|hang_timeout_s|idle_s|kernel_cache))"
    r"|\w+\.(save_every|keep_checkpoints|keep_every|save_hf_every)|actor\.advanced\.keep_best"
    r"|bus\.keep_steps|weights\.advanced\.(timeout_s|checksum_every)"
    r"|(notify|boards)\.(advanced\.)?\w+|engines\.[^.]+\.advanced\.(start|hang)_timeout_s"
)
"""Keys about where and how long a run computes, what it keeps, and notifications."""
_COMPUTED = re.compile(
    r"(actor|critic|reference|teachers\.[^.]+)\.layout(\.\w+)?"
    r"|actor\.(tokens_per_micro_batch|optimizer\.offload|transformer\.recompute_\w+)"
    r"|actor\.advanced\.(portion_micro_batches|attention|recomputed_passes|kept_logits_gib)"
    r"|actor\.advanced\.(tower_patches|features_gib)"
    r"|engines\.[^.]+\.advanced\.(drain_slow|engines_per_gpu)"
    r"|engines\.[^.]+\.(count|engines_per_task|nodes_per_engine|max_running_requests)"
    r"|engines\.[^.]+\.args\.(tp_size|ep_size|mem_fraction_static|chunked_prefill_size)"
    r"|engines\.[^.]+\.args\.(max_prefill_tokens|max_total_tokens|cuda_graph_max_bs)"
    r"|weights\.advanced\.bucket_bytes|launch\.advanced\.bootstrap"
)
"""Keys about how the same is computed: ranks and memory. The order of sums changes."""
_STEPS = ("schedule.num_steps", "sft.num_steps")
_TRAINED = "would change what is trained, and a run has one job for all its steps"
_REASONS = {
    r"name|run_root": "is where the run is; move or rename its folder, and resume it there",
    r"launch\.profile": "was read when the run was submitted; set resources, which it has given",
    r"launch\.advanced\.share": "is said before anything is written that others would read or not",
    r"launch\.layout|\w+\.placement|engines\.[^.]+\.(placement|kind)": (
        "a run has the components that its bus was made for"
    ),
    r"eval\..+": "points of a curve would be of different evaluations",
}
"""Keys that cannot change, each with its own reason."""


@dataclass(frozen=True, slots=True)
class Change:
    """The keys that one resume changed."""

    number: int
    """Number of the launch."""
    time: float | None
    """When its job was started; None if none was."""
    keys: dict[str, tuple[Any, Any]]
    """Key -> value before, and after; None where there was none."""

    def lines(self) -> list[str]:
        return [_line(key, *values) for key, values in self.keys.items()]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Changed(NamedTuple):
    job: JobConfig
    lines: Sequence[str] = ()
    """A line per changed key."""
    is_computed_otherwise: bool = False
    """Whether the computation is distributed differently, which models and memory may not allow."""


def change(config: JobConfig, overrides: Sequence[str]) -> Changed:
    """Applies `section.key=value` to the job of a run.

    Raises:
        ConfigError: unknown key, or it would change what is trained.
    """
    everywhere = [each for asked in overrides for each in _of_components(config, asked)]
    tree = _without_gpus_per_node(config.model_dump(mode="json"), overrides)
    new = with_overrides(tree, [*everywhere, *overrides], source="resume --set")
    found = _between(config.model_dump(mode="json"), new.model_dump(mode="json"))
    lines = [_check_allowed(config, key, *values) for key, values in found.items()]
    return Changed(new, lines, any(_COMPUTED.fullmatch(key) for key in found))


def of_run(paths: RunPaths) -> list[Change]:
    """Lists what resumes have changed in a run's job, oldest first.

    Raises:
        ConfigError: the record of what was started is not ours.
    """
    numbers = _numbers(paths)
    if not numbers:
        return []
    launches = record.read(paths.root).all[::-1]
    files = [*map(paths.config_before, numbers), paths.config]
    jobs = [with_advanced(read_json(file) or {}) for file in files]
    changes = [
        Change(
            number,
            next((each.time for each in launches if each.number >= number), None),
            _between(before, after),
        )
        for number, before, after in zip(numbers, jobs, jobs[1:], strict=False)
    ]
    return [change for change in changes if change.keys]


def jobs_at(paths: RunPaths, times: Sequence[float]) -> list[JobConfig]:
    """Returns a run's job at each of some times, before later resumes changed it.

    Raises:
        ConfigError: one cannot be read.
    """
    launches, numbers = record.read(paths.root).all, _numbers(paths)
    jobs = dict[Path, JobConfig]()
    found = []
    for time in times:
        began = [each.number for each in launches if each.time <= time]
        later = (number for number in numbers if number > max(began, default=1))
        path = next(map(paths.config_before, later), paths.config)
        if path not in jobs:
            jobs[path] = read_resolved(path, run_dir=paths.root)
        found.append(jobs[path])
    return found


def another_run(config: JobConfig) -> str:
    """Says how another run can begin with this run's policy."""
    from relax_hpc.trainer.checkpoints import store  # seconds, for torch

    said = "submit a run of another name"
    try:
        newest = store.find(RunPaths(config.run_dir).checkpoints, None)
    except CheckpointError:
        return said
    return f"{said} that begins with this one's checkpoint: --set model.weights={newest}"


def _of_components(config: JobConfig, override: str) -> Iterator[str]:
    """Applies an override of `resources` to every component: a run's job has no shared table."""
    section, _, field = override.strip().partition(".")
    if section == "resources" and field.split("=")[0].strip() in Resources.model_fields:
        for component in place(config):
            if component.section:
                yield f"{component.section}.{override.strip()}"


def _numbers(paths: RunPaths) -> list[int]:
    """Numbers of the launches that may have changed the job, ascending."""
    begin, end = paths.config_before(0).name.split("0")
    found = (path.name for path in paths.control.glob(f"{begin}*{end}"))
    numbers = (name.removeprefix(begin).removesuffix(end) for name in found)
    return sorted(int(number) for number in numbers if number.isdecimal())


def _line(key: str, before: Any, after: Any) -> str:  # noqa: ANN401
    return f"{key}: {_value(before)} -> {_value(after)}"


def _value(value: Any) -> str:  # noqa: ANN401
    return "unset" if value is None else show(value)


def _without_gpus_per_node(tree: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Makes `gpus` settable again: a run's job has the resolved value."""
    for override in overrides:
        *section, field = override.partition("=")[0].strip().split(".")
        if field == "gpus":
            asked: Any = tree
            for name in section:
                asked = asked.get(name, {}) if isinstance(asked, dict) else {}
            asked.pop("gpus_per_node", None)
    return tree


def _check_allowed(config: JobConfig, key: str, before: Any, after: Any) -> str:  # noqa: ANN401
    said = _line(key, before, after)
    if _FREE.fullmatch(key) or _COMPUTED.fullmatch(key):
        return said
    if key not in _STEPS:
        found = (why for keys, why in _REASONS.items() if re.fullmatch(keys, key))
        why = next(found, f"{_TRAINED}; {another_run(config)}")
        raise ConfigError(f"--set {key}={_value(after)}: {why}")
    if after is None or before is None or after < before:
        raise ConfigError(
            f"--set {key}={show(after)}: is less than {show(before)}; to end earlier, cancel it"
        )
    return said + _of_rate(config, before, after)


def _of_rate(config: JobConfig, before: int, after: int) -> str:
    """Describes the effect of more steps on a decaying learning rate; empty otherwise."""
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
    from relax_hpc.trainer.checkpoints import store  # seconds, for torch

    try:
        return store.step_of(store.find(RunPaths(config.run_dir).checkpoints, None)) or 0
    except CheckpointError:
        return 0


def _between(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Returns the differing keys of two jobs with both values."""
    one, other = dict(flat(before)), dict(flat(after))
    return {
        key: (one.get(key), other.get(key))
        for key in {**one, **other}
        if one.get(key) != other.get(key)
    }


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
