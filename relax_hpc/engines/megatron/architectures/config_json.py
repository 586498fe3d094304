"""config.json of a Hugging Face folder, read key by key with errors that name the key."""

from pathlib import Path
from typing import Any

from relax_hpc.errors import ConfigError
from relax_hpc.records import read_json


class ConfigJson:
    """The record, and where it came from."""

    def __init__(self, folder: Path) -> None:
        """Reads it.

        Raises:
            ConfigError: there is none, or it is not a JSON object.
        """
        self.path = folder / "config.json"
        try:
            record = read_json(self.path)
        except ValueError as error:
            raise ConfigError(
                f"model.path = {folder}: config.json is not JSON: {error}; download it again"
            ) from None
        if record is None:
            raise ConfigError(
                f"model.path = {folder}: has no config.json; name a Hugging Face folder"
            )
        if not isinstance(record, dict):
            raise ConfigError(
                f"model.path = {folder}: config.json is not an object; name a Hugging Face folder"
            )
        self._record: dict[str, Any] = record

    def get(self, key: str, default: Any = None) -> Any:  # noqa: ANN401
        return self._record.get(key, default)

    def size(self, key: str) -> int:
        """A positive integer.

        Raises:
            ConfigError: missing, or something else.
        """
        value = self._record.get(key)
        if type(value) is not int or value < 1:
            raise self._refused(key, "a positive integer is expected")
        return value

    def number(self, key: str) -> float:
        """A positive number.

        Raises:
            ConfigError: missing, or something else.
        """
        value = self._record.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise self._refused(key, "a positive number is expected")
        return float(value)

    def flag(self, key: str) -> bool:
        """false where the key is missing.

        Raises:
            ConfigError: something else than true or false.
        """
        value = self._record.get(key, False)
        if not isinstance(value, bool):
            raise self._refused(key, "true or false is expected")
        return value

    def require(self, key: str, known: object) -> None:
        """Refuses any other value of `key`; a missing one is taken for `known`."""
        if self._record.get(key, known) != known:
            raise self._refused(key, f"only {known!r} is supported")

    def rope_base(self) -> float:
        """The base of plain rotary positions.

        Raises:
            ConfigError: rotary positions of another kind.
        """
        rope = self._record.get("rope_parameters") or self._record.get("rope_scaling") or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise ConfigError(f"{self.path}: rope type = {kind!r}: only 'default' is supported")
        return float(rope.get("rope_theta") or self._record.get("rope_theta", 10000.0))

    def _refused(self, key: str, expected: str) -> ConfigError:
        found = repr(self._record[key]) if key in self._record else "missing"
        return ConfigError(f"{self.path}: {key} = {found}: {expected}")
