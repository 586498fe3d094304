"""Site profiles: what a cluster wants to hear from every job, written once by whoever knows it.

A profile has the keys of a component's `resources` at the top, for every component, and may have a
table per role that overrides them. A job's `[resources]` override both, and its components' own.
"""

import difflib
import os
from pathlib import Path
from typing import Any

from pydantic import ValidationError, create_model

from relax_hpc.errors import ConfigError, shown
from relax_hpc.job_file import read_toml
from relax_hpc.roles.table import profile_tables
from relax_hpc.sections import Resources, SharedResources, WholeJob

PROFILES = Path(__file__).parents[1] / "profiles"
"""Folder of the profiles that come with the package."""
VARIABLE = "RELAX_PROFILE"


class Profile(WholeJob, Resources):
    """A site's defaults for every component. Tables of roles are added by `_kind`."""

    def resources(self, table: str | None, shared: SharedResources, job: Resources) -> Resources:
        """Returns a component's requests: the job's fields over those that its components share,
        over its table's here, over the site's."""
        others = set(type(self).model_fields) - set(Resources.model_fields)
        asked = self.model_dump(exclude_unset=True, exclude=others)
        of_role: Resources = getattr(self, table) if table else Resources()
        asked |= of_role.model_dump(exclude_unset=True)
        asked |= shared.model_dump(exclude_unset=True, exclude=set(WholeJob.model_fields))
        return Resources.model_validate(asked | job.model_dump(exclude_unset=True))

    def shared(self, job: SharedResources) -> SharedResources:
        """Returns what a job's components share, with what the site wants said of a whole job."""
        of_job = set(WholeJob.model_fields)
        site = self.model_dump(exclude_unset=True, include=of_job)
        return job.model_copy(update=site | job.model_dump(exclude_unset=True, include=of_job))


def _kind() -> type[Profile]:
    """A profile with a table for each that the table of roles names."""
    tables: dict[str, Any] = {name: (Resources, Resources()) for name in profile_tables()}
    return create_model("Profile", __base__=Profile, **tables)


def folder() -> Path:
    """Folder of the user's own profiles."""
    said = os.environ.get("XDG_CONFIG_HOME", "")
    return (Path(said) if Path(said).is_absolute() else Path.home() / ".config") / "relax-hpc"


def chosen(name: str | None) -> str | None:
    """The profile of a job that names `name`: the path of a file, or one that comes along.

    None: it names none, and neither `$RELAX_PROFILE` nor `default.toml` in `folder` says which.

    Raises:
        ConfigError: no such profile.
    """
    key = "launch.profile"
    if name is None and (name := os.environ.get(VARIABLE)):
        key = f"${VARIABLE}"
    if name is None:
        default = folder() / "default.toml"
        return str(default) if _is_there(default) else None
    path = _locate(key, name)
    return path.stem if path.parent == PROFILES else str(path)


def load(name: str | None) -> Profile:
    """Reads the profile that `chosen` chooses; the empty one if there is none.

    Raises:
        ConfigError: no such profile, an unknown key, or a wrong value.
    """
    kind = _kind()
    if (found := chosen(name)) is None:
        return kind()
    path = _locate("launch.profile", found)
    tree = read_toml(path)
    for table, keys in (("", tree), *tree.items()):
        if isinstance(keys, dict) and "gpus" in keys:
            dotted = f"{table}.gpus".removeprefix(".")
            raise ConfigError(
                f"{path}: {dotted} = {keys['gpus']}: a profile does not know the nodes of a job; "
                "use gpus_per_node"
            )
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        lines = [f"{path}: {_explain(item, kind)}" for item in error.errors()]
        raise ConfigError("\n".join(lines)) from error


def _locate(key: str, name: str) -> Path:
    own = folder()
    for path in (own / f"{name}.toml", PROFILES / f"{name}.toml"):
        if _is_there(path):
            return path
    if _is_there(Path(name)):
        return Path(name).absolute()
    known = sorted({path.stem for place in (own, PROFILES) for path in place.glob("*.toml")})
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"use a path, or one of {', '.join(known)}"
    raise ConfigError(f"{key} = {name!r}: no such profile; {hint}")


def _is_there(path: Path) -> bool:
    """Whether a file can be read; one in a folder that is shut to us is as one that is not."""
    return os.access(path, os.R_OK) and path.is_file()


def _explain(item: Any, kind: type[Profile]) -> str:  # noqa: ANN401
    if item["type"] == "value_error":  # of a table as a whole
        return ": ".join([*map(str, item["loc"]), str(item["ctx"]["error"])])
    *table, key = map(str, item["loc"])
    dotted = ".".join([*table, key])
    if item["type"] != "extra_forbidden":
        return f"{dotted} = {shown(item['input'])}: {item['msg'][0].lower()}{item['msg'][1:]}"
    known = list((Resources if table else kind).model_fields)
    close = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"a profile takes {', '.join(known)}"
    return f"{dotted} = {shown(item['input'])}: unknown key; {hint}"
