"""A service that shows curves, as an export sees it."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

from relax_hpc.boards.description import Setting
from relax_hpc.telemetry.tensorboard import Text


class Described(NamedTuple):
    """A run as it is described to a service."""

    id: str
    """The run's own there; the same after a restart."""
    name: str
    project: str
    settings: Mapping[str, Setting]
    folder: Path
    """Run directory, for what the service keeps in files."""
    offline: bool
    """Send nothing."""
    address: str | None = None
    """Server that takes it, of services that are many."""


class Service(Protocol):
    """Takes points; each it is given once, and never one before those of its tag that it has."""

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        """Takes values by tag; the time is in seconds since the epoch."""

    def say(self, text: Text) -> None:
        """Takes a text."""

    def finish(self, *, failed: bool) -> None:
        """Ends the run there, once all is sent."""

    def pause(self) -> None:
        """Leaves it, since the run goes on and somebody will send the rest."""
