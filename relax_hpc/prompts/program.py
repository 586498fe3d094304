"""Rows that a program of the user's makes."""

import re
from contextlib import nullcontext
from typing import Any

from relax_hpc import user_programs
from relax_hpc.errors import ConfigError, shown
from relax_hpc.prompts.order import Blocks
from relax_hpc.prompts.rows import Row

PLACE = re.compile(r".+\.py:[A-Za-z_]\w*", re.DOTALL)
"""Such a name is a program's: "folder/file.py:Class"."""


class ProgramRows:
    """An object with `__len__` and `__getitem__`, whose rows are dicts."""

    def __init__(self, place: str) -> None:
        """Makes it.

        Args:
            place: "file.py:name" of a class, or a function that returns such an object.

        Raises:
            ConfigError: it cannot be made, or has no length.
        """
        self._place, self._has_made_one = place, False
        try:
            make = user_programs.imported(place)
            with user_programs.bounded(place):
                self._rows: Any = make()
                self._count = len(self._rows)
        except Exception as error:
            raise ConfigError(
                f"{place}: cannot be made: {user_programs.raised(error)}; correct it"
            ) from error

    @property
    def blocks(self) -> Blocks:
        return Blocks.even(len(self))

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Row:
        where = self.where(index)
        try:
            # Later ones may be asked for by a run, which has its own watchdog.
            with nullcontext() if self._has_made_one else user_programs.bounded(where):
                fields = self._rows[index]
            self._has_made_one = True
        except Exception as error:
            raise ConfigError(
                f"{where}: cannot be made: {user_programs.raised(error)}; correct it"
            ) from error
        if not isinstance(fields, dict):
            raise ConfigError(f"{where}: is {shown(fields)}; return a dict, as a line of JSON")
        return Row(where, fields)

    def where(self, index: int) -> str:
        return f"{self._place}, row {index}"
