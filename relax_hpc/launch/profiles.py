"""Site profiles: what a cluster wants to hear from every job, written once by whoever knows it.

A profile has the keys of `config.Resources` at the top, for every component, and may have a table
per role that overrides them. A job's own `resources` override both.
"""

import difflib
from pathlib import Path
from typing import Any

from pydantic import ValidationError, create_model

from relax_hpc.errors import ConfigError, shown
from relax_hpc.job_file import read_toml
from relax_hpc.roles.table import profile_tables
from relax_hpc.sections import Resources

PROFILES = Path(__file__).parents[2] / "slurm" / "profiles"


class Profile(Resources):
    """A site's defaults for every component. Tables of roles are added by `_kind`."""

    def resources(self, table: str | None, job: Resources) -> Resources:
        """Returns a component's requests: the job's fields over its table's over the site's."""
        tables = set(type(self).model_fields) - set(Resources.model_fields)
        site = self.model_dump(exclude_unset=True, exclude=tables)
        of_role: Resources = getattr(self, table) if table else Resources()
        return Resources.model_validate(
            site | of_role.model_dump(exclude_unset=True) | job.model_dump(exclude_unset=True)
        )


def _kind() -> type[Profile]:
    """A profile with a table for each that the table of roles names."""
    tables: dict[str, Any] = {name: (Resources, Resources()) for name in profile_tables()}
    return create_model("Profile", __base__=Profile, **tables)


def load(name: str | None) -> Profile:
    """Reads the profile `name`, or the file it is the path of; None is the empty profile.

    Raises:
        ConfigError: no such profile, an unknown key, or a wrong value.
    """
    kind = _kind()
    if name is None:
        return kind()
    path = locate(name)
    tree = read_toml(path)
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        lines = [f"{path}: {_explain(item, kind)}" for item in error.errors()]
        raise ConfigError("\n".join(lines)) from error


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


def _explain(item: Any, kind: type[Profile]) -> str:  # noqa: ANN401
    *table, key = map(str, item["loc"])
    dotted = ".".join([*table, key])
    if item["type"] != "extra_forbidden":
        return f"{dotted} = {shown(item['input'])}: {item['msg'][0].lower()}{item['msg'][1:]}"
    known = list((Resources if table else kind).model_fields)
    close = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"a profile takes {', '.join(known)}"
    return f"{dotted} = {shown(item['input'])}: unknown key; {hint}"
