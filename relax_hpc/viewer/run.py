"""A run as the viewer needs it: its bus, its algorithm, its words."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from relax_hpc import job_file
from relax_hpc.config.run import RunConfig
from relax_hpc.errors import ConfigError
from relax_hpc.paths import RunPaths
from relax_hpc.prompts import tokenizer
from relax_hpc.viewer.asked import Asked
from relax_hpc.viewer.choice import choose
from relax_hpc.viewer.groups import Group, Groups
from relax_hpc.viewer.words import Words


class View(NamedTuple):
    groups: Iterator[Group]
    """Read one by one as they are asked for."""
    remarks: list[str]
    """Say what is not shown, and why."""


def view(run_dir: Path, asked: Asked, tokens: int) -> View:
    """Looks at a run, while it goes on or afterwards.

    Args:
        run_dir: of the run.
        asked: which prompt groups.
        tokens: of a prompt and of a response that are shown at most: the first and the last.

    Raises:
        ConfigError: not a run with a bus, no such prompt group, or the model's tokenizer cannot
            be read.
        BusError: damage, or a step that is not planned.
    """
    paths = RunPaths(run_dir)
    config = job_file.read_resolved(paths.config)
    if not isinstance(config, RunConfig):
        raise ConfigError(f"{run_dir}: trains on documents; it samples nothing that can be shown")
    found = choose(paths.bus, asked)
    if not found.chosen:
        return View(iter(()), found.remarks)
    decode = tokenizer.load(config.model.path).decode
    look = Groups(paths.bus, config.algorithm, Words(lambda tokens: str(decode(tokens))))
    groups = (look.read(chosen, tokens) for chosen in found.chosen)
    return View((group for group in groups if group is not None), found.remarks)
