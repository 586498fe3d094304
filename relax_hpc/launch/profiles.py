"""Loads site profiles: a cluster's defaults for every job.

A profile has the keys of `resources` at the top, for every component, and optional tables per role
that override them. A job's `[resources]` and its components' own override both.
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError, create_model

from relax_hpc.config.job_file import read_toml
from relax_hpc.config.run import Network
from relax_hpc.errors import ConfigError, nearest, show
from relax_hpc.roles.table import profile_tables
from relax_hpc.runtime.text import wrong
from relax_hpc.sections import Resources, SharedResources, WholeJob

PROFILES = Path(__file__).parent / "sites"
"""Profiles in the package."""
VARIABLE = "RELAX_PROFILE"


class Profile(WholeJob, Resources):
    """A site's defaults for every component. `_kind` adds tables of roles."""

    network: Network | None = None
    """Default of `launch.advanced.network`."""

    def resources(self, table: str | None, shared: SharedResources, job: Resources) -> Resources:
        """Merges a component's requests: the job's own fields, its shared ones, this profile's
        table, then the profile's top level."""
        others = set(type(self).model_fields) - set(Resources.model_fields)
        asked = self.model_dump(exclude_unset=True, exclude=others)
        of_role: Resources = getattr(self, table) if table else Resources()
        asked |= of_role.model_dump(exclude_unset=True)
        asked |= shared.model_dump(exclude_unset=True, exclude=set(WholeJob.model_fields))
        return Resources.model_validate(asked | job.model_dump(exclude_unset=True))

    def merge_shared(self, job: SharedResources) -> SharedResources:
        """Merges what a job's components share with the site's options for a whole job."""
        of_job = set(WholeJob.model_fields)
        site = self.model_dump(exclude_unset=True, include=of_job)
        return job.model_copy(update=site | job.model_dump(exclude_unset=True, include=of_job))


def _kind() -> type[Profile]:
    """Returns a profile class with a table per role."""
    tables: dict[str, Any] = {name: (Resources, Resources()) for name in profile_tables()}
    return create_model("Profile", __base__=Profile, **tables)


def folder() -> Path:
    """Returns the folder of the user's own profiles.

    Raises:
        ConfigError: the user has no home, and no variable names the folder.
    """
    said = os.environ.get("XDG_CONFIG_HOME", "")
    try:
        return (Path(said) if Path(said).is_absolute() else Path.home() / ".config") / "relax-hpc"
    except RuntimeError:
        raise ConfigError(
            "you have no home folder here, so no profiles; say HOME=... or XDG_CONFIG_HOME=..."
        ) from None


def _places() -> list[Path]:
    """Returns the profile folders, the user's first."""
    with suppress(ConfigError):
        return [folder(), PROFILES]
    return [PROFILES]


def chosen(name: str | None) -> str | None:
    """Resolves a profile's name to a file's path or an included profile.

    None if the job, `$RELAX_PROFILE` and `default.toml` name none.

    Raises:
        ConfigError: no such profile.
    """
    key = "launch.profile"
    if name is None and (name := os.environ.get(VARIABLE)):
        key = f"${VARIABLE}"
    if name is None:
        own = [place / "default.toml" for place in _places() if place != PROFILES]
        return next((str(default) for default in own if _is_there(default)), None)
    path = _locate(key, name)
    return path.stem if path.parent == PROFILES else str(path)


def load(name: str | None) -> Profile:
    """Reads the profile that `chosen` chooses; an empty one if there is none.

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
    places = _places()
    for path in (place / f"{name}.toml" for place in places):
        if _is_there(path):
            return path
    if _is_there(Path(name)):
        return Path(name).absolute()
    known = sorted({path.stem for place in places for path in place.glob("*.toml")})
    hint = nearest(name, known) or f"use a path, or one of {', '.join(known)}"
    raise ConfigError(f"{key} = {name!r}: no such profile; {hint}")


def _is_there(path: Path) -> bool:
    """Whether a file can be read; an inaccessible folder counts as missing."""
    return os.access(path, os.R_OK) and path.is_file()


def _explain(item: Any, kind: type[Profile]) -> str:  # noqa: ANN401
    dotted = ".".join(map(str, item["loc"]))
    if item["type"] != "extra_forbidden":
        said = wrong(item)
        return f"{dotted} = {show(item['input'])}: {said}" if dotted else said
    *table, key = map(str, item["loc"])
    known = list((Resources if table else kind).model_fields)
    hint = nearest(key, known) or f"a profile takes {', '.join(known)}"
    return f"{dotted} = {show(item['input'])}: unknown key; {hint}"
