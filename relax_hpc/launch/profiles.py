"""Site profiles: what a cluster wants to hear from every job, written once by whoever knows it.

A profile has the keys of `config.Resources` at the top, for every component, and may have a table
per role that overrides them. A job's own `resources` override both.
"""

import difflib
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from relax_hpc.config.sections import Resources
from relax_hpc.errors import ConfigError, shown
from relax_hpc.job_file import read_toml

PROFILES = Path(__file__).parents[2] / "slurm" / "profiles"


class Profile(Resources):
    rollout: Resources = Resources()
    actor: Resources = Resources()
    reference: Resources = Resources()

    def resources(self, role: str, job: Resources) -> Resources:
        """What `role` asks for: the job's fields over the role's over the site's."""
        of_role: Resources = getattr(self, role)
        site = self.model_dump(exclude_unset=True, exclude={"rollout", "actor", "reference"})
        return Resources.model_validate(
            site | of_role.model_dump(exclude_unset=True) | job.model_dump(exclude_unset=True)
        )


def load(name: str | None) -> Profile:
    """Reads the profile `name`, or the file it is the path of; None is the empty profile.

    Raises:
        ConfigError: no such profile, an unknown key, or a wrong value.
    """
    if name is None:
        return Profile()
    path = locate(name)
    tree = read_toml(path)
    try:
        return Profile.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("\n".join(f"{path}: {_explain(item)}" for item in error.errors())) from (
            error
        )


def locate(name: str) -> Path:
    """The file of a profile.

    Raises:
        ConfigError: neither a name in slurm/profiles nor a file.
    """
    for path in (PROFILES / f"{name}.toml", Path(name)):
        if path.is_file():
            return path.resolve()
    known = sorted(path.stem for path in PROFILES.glob("*.toml"))
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"use a path, or one of {', '.join(known)}"
    raise ConfigError(f"launch.profile = {name!r}: no such profile; {hint}")


def _explain(item: Any) -> str:  # noqa: ANN401
    *table, key = map(str, item["loc"])
    dotted = ".".join([*table, key])
    if item["type"] != "extra_forbidden":
        return f"{dotted} = {shown(item['input'])}: {item['msg'][0].lower()}{item['msg'][1:]}"
    known = list((Resources if table else Profile).model_fields)
    close = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"a profile takes {', '.join(known)}"
    return f"{dotted} = {shown(item['input'])}: unknown key; {hint}"
