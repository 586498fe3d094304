"""Scores a model on sets of prompts on this machine, in a small run directory without a trainer."""

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from relax_hpc.algorithms.statistics import check_k
from relax_hpc.config import job_file, programs
from relax_hpc.config.run import RunConfig
from relax_hpc.errors import ConfigError
from relax_hpc.launch.submit import make_run_dir, resolve
from relax_hpc.roles.context import TaskContext
from relax_hpc.roles.rollout import alone, row_gate
from relax_hpc.roles.rollout.check import check_evaluations
from relax_hpc.roles.rollout.row_gate import Advance
from relax_hpc.roles.task import allow_open_files
from relax_hpc.runtime import kernel_cache
from relax_hpc.runtime.files import permissions
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.runtime.telemetry import logs
from relax_hpc.runtime.telemetry.events import EventWriter
from relax_hpc.sections import INT32

_OF_JOB = {"name", "run_root", "seed", "model", "prompts", "reward", "rollout", "engines", "eval"}
"""Tables of a job that an evaluation uses; the others concern training."""
_OF_TRAINING: Mapping[str, Any] = {
    "model": {"weights"},
    "rollout": {"samples_per_prompt": True, "advanced": {"over_sampling", "routed_experts"}},
}
"""Keys of those tables that concern training."""


class EvaluationRequest(NamedTuple):
    """The request for an evaluation."""

    model: Path
    job: Path | None = None
    """Job file with settings; default is none."""
    sets: Mapping[str, str] = {}
    """Data by name of the set, besides the job's; all their prompts are scored."""
    settings: Mapping[str, Any] = {}
    """Keys of `[eval.NAME]`, for every set."""
    overrides: Sequence[str] = ()
    """section.key=value, for the job."""
    name: str | None = None
    """Name of the run directory; default is the model's name and the time."""


def job_of(asked: EvaluationRequest) -> RunConfig:
    """Builds the job of an evaluation.

    Raises:
        ConfigError: a wrong key or value, or no set at all.
    """
    config = job_file.with_overrides(_tree(asked), asked.overrides, source=str(asked.job or "eval"))
    assert isinstance(config, RunConfig)
    if not config.eval:
        raise ConfigError("no set of prompts is named; add --set NAME=FILE, or --job with [eval]")
    tables = config.model_dump(mode="json", include=_OF_JOB, exclude=_OF_TRAINING)
    tables["engines"] = {name: _here(name, pool) for name, pool in tables["engines"].items()}
    data = {"train": next(iter(tables["eval"].values()))["path"], "sources": {}}
    tables["prompts"] |= data  # nothing is trained on
    config = job_file.validate(tables | {"schedule": {"num_steps": 1}}, source="eval")
    resolved, _ = resolve(config)
    assert isinstance(resolved, RunConfig)
    return resolved


def _tree(asked: EvaluationRequest) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    if asked.job:
        # Mistakes that are the job's own come first.
        if not isinstance(job_file.load(asked.job, asked.overrides), RunConfig):
            raise ConfigError(f"{asked.job}: a job with [sft] samples nothing; name one of rollout")
        tree = job_file.read_toml(asked.job)
    now = time.strftime("%Y%m%d-%H%M%S")
    tree["name"] = asked.name or f"eval-{asked.model.absolute().name}-{now}"
    tree["model"] = tree.get("model", {}) | {"path": str(asked.model)}
    if not asked.job:
        tree = {"prompts": {"train": "-"}} | tree
    tree.setdefault("schedule", {}).setdefault("num_steps", 1)
    sets = tree.setdefault("eval", {})
    for name, path in asked.sets.items():
        sets[name] = {"num_prompts": INT32} | sets.get(name, {}) | {"path": path}
    tree["eval"] = {name: each | dict(asked.settings) for name, each in sets.items()}
    return tree


def _here(name: str, pool: dict[str, Any]) -> dict[str, Any]:
    """Makes a pool fit one task on this machine."""
    if pool["nodes_per_engine"] > 1:
        raise ConfigError(
            f"engines.{name}.nodes_per_engine = {pool['nodes_per_engine']}: relax-hpc eval starts "
            "engines on one node; set it to 1, or evaluate in a run"
        )
    gpus = pool["resources"]["gpus_per_node"]
    own = {"placement": "own", "count": pool["engines_per_task"]}
    return pool | own | {"resources": {"gpus_per_node": gpus}}


def evaluate(
    asked: EvaluationRequest,
    ks: Sequence[int] = (),
    *,
    say: Callable[[str], None] = lambda _: None,
    advance: Advance = lambda *_: None,
) -> Path:
    """Scores every set once, with its own engines.

    Continues an interrupted run directory.

    Args:
        ks: to report.
        say: gets messages: where the samples are, and what is left out.
        advance: gets the number of rows whose media are decoded, if the job requests that.

    Returns:
        The run directory.

    Raises:
        ConfigError: something does not fit, or the name is another run's.
        EngineError: an engine does not come back.
    """
    config = job_of(asked)
    for name, each in config.eval.items():
        for k in ks:
            try:
                check_k(k, each.samples_per_prompt)
            except ConfigError as error:
                raise ConfigError(f"{name}: {error}") from None
    check_evaluations(config)
    sources = alone.read(config, say)
    paths = RunPaths(config.run_dir)
    with permissions.set_umask(permissions.UMASKS[config.launch.advanced.share]):
        _open(config, paths)
        say(f"run directory: {paths.root}; if interrupted, --name {config.name} goes on there")
        files = {key: each.records for key, each in sources.by_key.items()}
        row_gate.decide_media_once(config, paths, say=say, advance=advance, files=files)
        kernel_cache.keep(os.environ, config.launch.advanced.kernel_cache)
        logs.setup("rollout", 0, paths.log("rollout", "0"))
        attempt = f"{time.time():.0f}.{os.getpid()}"
        context = TaskContext("rollout", 0, 1, 0, attempt, 1, socket.gethostname())
        allow_open_files()
        with EventWriter(paths.events("rollout", 0), "rollout", 0) as events:
            events.emit("start", attempt=attempt, start=1, node=context.node)
            alone.main(config, paths, context, sources, events)
            events.emit("end")
    return paths.root


def _open(config: RunConfig, paths: RunPaths) -> None:
    if not paths.config.exists():
        make_run_dir(config, paths)
        return
    permissions.check_run(paths)
    if job_file.read_resolved(paths.config) != programs.name_copies(config, paths.programs):
        raise ConfigError(
            f"--name {config.name}: {paths.root} is a run of other settings; choose another name"
        )
