"""Reads config.json of a Hugging Face folder key by key; errors name the key."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from relax_hpc.errors import ConfigError, show
from relax_hpc.runtime.files import user_files

_MOST = 2**24
_MOST_OF = {
    **dict.fromkeys(("num_hidden_layers", "depth", "encoder_layers"), 1024),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_window_infer"), 2**16),
    **dict.fromkeys(("hidden_size", "d_model", "head_dim"), 2**20),
    "max_position_embeddings": 2**40,
}
"""Largest accepted sizes, far above those of any model: they bound the time and memory of a
forged file."""


class Table:
    """An object of the file, with its place for messages."""

    def __init__(self, record: Mapping[str, Any], place: str) -> None:
        self.record = record
        self.place = place
        """File and keys, before the next key."""

    def get(self, key: str, default: Any = None) -> Any:  # noqa: ANN401
        return self.record.get(key, default)

    def table(self, key: str) -> "Table":
        """Returns a nested object; empty if missing or null.

        Raises:
            ConfigError: something else.
        """
        value = self.record.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.make_error(key, "an object is expected")
        return Table(value or {}, f"{self.place}{key}.")

    def size(self, key: str, default: int | None = None) -> int:
        """Returns a positive integer within bounds.

        Raises:
            ConfigError: missing without a default, or something else.
        """
        value, most = self.record.get(key, default), _MOST_OF.get(key, _MOST)
        if type(value) is not int or value < 1:
            raise self.make_error(key, "a positive integer is expected")
        if value > most:
            raise self.make_error(key, f"no more than {most:,} is expected")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Returns a positive finite number.

        Raises:
            ConfigError: missing without a default, or something else.
        """
        value = self.record.get(key, default)
        if type(value) not in (int, float) or not 0 < value <= sys.float_info.max:
            raise self.make_error(key, "a positive number is expected")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """Raises:
        ConfigError: present, but neither true nor false.
        """
        value = self.record.get(key, default)
        if not isinstance(value, bool):
            raise self.make_error(key, "true or false is expected")
        return value

    def make_error(self, key: str, expected: str) -> ConfigError:
        found = show(self.record[key]) if key in self.record else "missing"
        return ConfigError(f"{self.place}{key} = {found}: {expected}")


class ConfigJson(Table):
    def __init__(self, folder: Path) -> None:
        """Raises:
        ConfigError: the file is missing, unreadable, or not a JSON object.
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
    """Returns the token ids that end a sequence: of config.json and generation_config.json, as far
    as they exist.

    Raises:
        ConfigError: one of them is not a JSON object.
    """
    ids: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        if (folder / name).exists():
            eos = user_files.read_object(folder / name, "download it again").get("eos_token_id")
            ids.update(eos if isinstance(eos, list) else [] if eos is None else [eos])
    return frozenset(ids)
