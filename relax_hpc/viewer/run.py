"""A run as the viewer needs it: its bus, its algorithm, its words."""

import time
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from relax_hpc import job_file
from relax_hpc.config.run import RunConfig
from relax_hpc.errors import ConfigError
from relax_hpc.paths import RunPaths
from relax_hpc.prompts import tokenizer
from relax_hpc.viewer.asked import Asked
from relax_hpc.viewer.choice import Found, choose
from relax_hpc.viewer.groups import Group, Groups
from relax_hpc.viewer.words import Words

_POLL_S = 1.0


class View(NamedTuple):
    groups: Iterator[Group]
    """Read one by one as they are asked for."""
    remarks: list[str]
    """Say what is not shown, and why."""


class Sight:
    """A run that somebody looks at, while it goes on or afterwards.

    Raises:
        ConfigError: not a run with a bus.
    """

    def __init__(self, run_dir: Path) -> None:
        self._paths = RunPaths(run_dir)
        config = job_file.read_resolved(self._paths.config)
        if not isinstance(config, RunConfig):
            raise ConfigError(
                f"{run_dir}: trains on documents; it samples nothing that can be shown"
            )
        self._config = config

    @property
    def solved_at(self) -> float:
        """Reward from which on a response is right."""
        return self._config.reward.solved_at

    def view(self, asked: Asked, tokens: int) -> View:
        """Looks once.

        Args:
            asked: which prompt groups.
            tokens: of a prompt and of a response that are shown at most: the first and the last.

        Raises:
            ConfigError: no such prompt group, or the model's tokenizer cannot be read.
            BusError: damage, or a step that is not planned.
        """
        found = self._choose(asked)
        return View(self._read(found, tokens), found.remarks)

    def follow(self, groups: int, tokens: int, *, until: Callable[[], bool]) -> Iterator[View]:
        """Looks again and again, each time at the newest prompt groups that were not shown yet.

        Args:
            groups: at most, each time.
            tokens: as in `view`.
            until: it is over after the time at which this holds.
        """
        seen: set[int] = set()
        while True:
            over = until()  # asked first: what was committed before it became true is shown
            found = self._choose(Asked("newest", groups))
            fresh = [group for group in found.chosen if group.guid not in seen]
            seen.update(group.guid for group in fresh)
            yield View(self._read(found._replace(chosen=fresh[::-1]), tokens), found.remarks)
            if over:
                return
            time.sleep(_POLL_S)

    def _choose(self, asked: Asked) -> Found:
        masks_errors = self._config.reward.masks_errors
        return choose(self._paths.bus, asked, self.solved_at, masks_errors=masks_errors)

    def _read(self, found: Found, tokens: int) -> Iterator[Group]:
        for chosen in found.chosen:
            group = self._groups.read(chosen, tokens, found.notes.get(chosen.guid, ""))
            if group is not None:
                yield group

    @cached_property
    def _groups(self) -> Groups:
        decode = tokenizer.load(self._config.model.path).decode
        words = Words(lambda tokens: str(decode(tokens)))
        return Groups(
            self._paths.bus,
            self._config.algorithm,
            words,
            masks_errors=self._config.reward.masks_errors,
            longest=self._config.rollout.max_new_tokens,
        )
