"""Finds a model by its name on the Hugging Face hub in the hub's cache, without a network."""

import os
import re
from pathlib import Path
from typing import NamedTuple

from relax_hpc.errors import ConfigError
from relax_hpc.runtime.files import user_files

_PART = r"\w(?:[\w.-]{0,94}\w)?"
_NAME = re.compile(
    r"(?!(?:models|datasets|spaces)/)(?!.*(?:--|\.\.|\.git))"  # of nobody on the hub
    rf"(?P<model>{_PART}/{_PART})(?:@(?P<revision>{_PART}(?:/{_PART})*))?",
    re.ASCII,
)
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


class HubName(NamedTuple):
    """The name of a model on the hub."""

    model: str
    revision: str | None
    """A branch, a tag or a whole commit; unset is the default branch."""

    def __str__(self) -> str:
        return f"{self.model}@{self.revision}" if self.revision else self.model

    @property
    def download(self) -> str:
        """Command that brings it into the cache, for a machine with a network."""
        revision = f" --revision {self.revision}" if self.revision else ""
        return f"hf download {self.model}{revision}"


def name_of(named: Path) -> HubName | None:
    """Returns the model that "owner/name" or "owner/name@revision" means; None if it is a path.

    What exists below the working directory is a path.
    """
    found = _NAME.fullmatch(str(named))
    if found is None or os.path.lexists(named):
        return None
    return HubName(found["model"], found["revision"])


def find(key: str, named: Path) -> Path:
    """Returns the folder of a model; of a name on the hub the snapshot, which is called as its
    commit and so stays the same.

    Args:
        key: of the job, for messages.
        named: a name on the hub, or a folder, which is returned as it is.

    Raises:
        ConfigError: the cache does not have it, or only a part.
    """
    if (asked := name_of(named)) is None:
        return named
    from huggingface_hub import constants, try_to_load_from_cache

    cache = Path(constants.HF_HUB_CACHE).absolute()
    found = try_to_load_from_cache(asked.model, "config.json", cache, asked.revision)
    remedy = f"where there is a network: {asked.download}, or relax-hpc fetch JOB"
    if not isinstance(found, str):
        raise ConfigError(
            f"{key} = {str(named)!r}: no such folder, and no such model in the Hugging Face cache "
            f"{cache}; {remedy}"
        )
    folder = Path(found).parent
    if lacking := _lacking(folder):
        more = f" and {len(lacking) - 1} more" if lacking[1:] else ""
        raise ConfigError(
            f"{key} = {str(named)!r}: {folder} is not complete, it lacks {lacking[0]}{more}; "
            f"{remedy}"
        )
    return folder


def _lacking(folder: Path) -> list[str]:
    """Lists the missing files of weights."""
    if not (folder / _INDEX).exists():
        return [] if (folder / _SINGLE).exists() else [_SINGLE]
    files = user_files.read_object(folder / _INDEX, "download it again").get("weight_map")
    names = set(map(str, files.values())) if isinstance(files, dict) else ()
    return sorted(name for name in names if not (folder / name).exists())
