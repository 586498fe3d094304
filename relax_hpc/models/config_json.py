"""config.json of a Hugging Face folder, read key by key with errors that name the key."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from relax_hpc import user_files
from relax_hpc.errors import ConfigError


class Table:
    """An object of the file, and where it is, for messages."""

    def __init__(self, record: Mapping[str, Any], place: str) -> None:
        self.record = record
        self.place = place
        """File and keys, before the next key."""

    def get(self, key: str, default: Any = None) -> Any:  # noqa: ANN401
        return self.record.get(key, default)

    def table(self, key: str) -> "Table":
        """An object below; an empty one where the key is missing or null.

        Raises:
            ConfigError: something else.
        """
        value = self.record.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.refused(key, "an object is expected")
        return Table(value or {}, f"{self.place}{key}.")

    def size(self, key: str, default: int | None = None) -> int:
        """A positive integer.

        Raises:
            ConfigError: missing without a default, or something else.
        """
        value = self.record.get(key, default)
        if type(value) is not int or value < 1:
            raise self.refused(key, "a positive integer is expected")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number, a finite one.

        Raises:
            ConfigError: missing without a default, or something else.
        """
        value = self.record.get(key, default)
        if type(value) not in (int, float) or value <= 0 or not math.isfinite(value):
            raise self.refused(key, "a positive number is expected")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """Raises ConfigError: neither missing nor true nor false."""
        value = self.record.get(key, default)
        if not isinstance(value, bool):
            raise self.refused(key, "true or false is expected")
        return value

    def refused(self, key: str, expected: str) -> ConfigError:
        found = repr(self.record[key]) if key in self.record else "missing"
        return ConfigError(f"{self.place}{key} = {found}: {expected}")


class ConfigJson(Table):
    """The whole file."""

    def __init__(self, folder: Path) -> None:
        """Reads it.

        Raises:
            ConfigError: there is none, it cannot be read, or it is not a JSON object.
        """
        user_files.check_folder(
            f"model.path = {str(folder)!r}", folder, "name a downloaded Hugging Face model"
        )
        self.path = folder / "config.json"
        if not self.path.exists():
            raise ConfigError(
                f"model.path = {folder}: has no config.json; name a Hugging Face folder"
            )
        record = user_files.read_object(self.path, "download it again")
        super().__init__(record, f"{self.path}: ")


def ends_of(folder: Path) -> frozenset[int]:
    """Returns the token ids that end a sequence for engines: those of config.json and
    generation_config.json; none where a file is missing.

    Raises:
        ConfigError: one of them is not a JSON object.
    """
    ids: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        if (folder / name).exists():
            eos = user_files.read_object(folder / name, "download it again").get("eos_token_id")
            ids.update(eos if isinstance(eos, list) else [] if eos is None else [eos])
    return frozenset(ids)
