"""Options of sbatch that `submit` and `check` take, too: they set what all components ask for."""

from collections.abc import Sequence
from typing import Annotated, NamedTuple

import typer

from relax_hpc.config.run import JobConfig
from relax_hpc.errors import ConfigError

Account = Annotated[
    str | None,
    typer.Option("--account", "-A", help="Charge this one: resources.account.", show_default=False),
]
Partition = Annotated[
    str | None,
    typer.Option("--partition", "-p", help="Run there: resources.partition.", show_default=False),
]
Time = Annotated[
    str | None,
    typer.Option("--time", "-t", help="Time limit: resources.time.", show_default=False),
]  # fmt: skip


class SlurmOptions(NamedTuple):
    """Requests of the command line; None is none."""

    account: str | None
    partition: str | None
    time: str | None

    def check(self, overrides: Sequence[str]) -> None:
        """Checks that no setting says the same.

        Raises:
            ConfigError: one does.
        """
        set_too = {each.partition("=")[0].strip(): each for each in overrides}
        for name, value in self._said.items():
            if (key := f"resources.{name}") in set_too:
                raise _clash(name, value, f"--set {set_too[key]} says so, too; leave one out")

    def of(self, config: JobConfig) -> JobConfig:
        """Returns a job that asks for this in place of what it says itself, as with sbatch.

        Raises:
            ConfigError: one of its components asks for something else.
        """
        from relax_hpc.roles import table

        for name, value in self._said.items():
            for _, place in table.places(config):
                own = getattr(place.resources, name)
                says_so = place.beside is None and name in place.resources.model_fields_set
                if says_so and own != value:
                    key = f"{place.section}.resources.{name}" if place.section else place.component
                    raise _clash(name, value, f"the job has {key} = {own!r}; change it with --set")
        shared = config.resources.model_copy(update=self._said)
        return config.model_copy(update={"resources": shared})

    @property
    def _said(self) -> dict[str, str]:
        return {name: value for name, value in self._asdict().items() if value is not None}


def _clash(name: str, value: str, why: str) -> ConfigError:
    return ConfigError(f"--{name} {value}: {why}")
