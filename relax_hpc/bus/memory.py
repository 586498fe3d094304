"""Where columns are read to. Fresh memory costs about as much as the copy into it."""

import numpy as np
import numpy.typing as npt

ALIGNMENT = 64


class Memory:
    """Hands out room for arrays; with `reuse`, `reset` makes it hand out the same room again.

    It grows to the most that was ever taken between two resets. The arrays taken before a reset
    are written over after it: whoever calls it must be done with them.
    """

    def __init__(self, *, reuse: bool = True) -> None:
        self._reuse = reuse
        self._room = np.empty(0, np.uint8)
        self._taken = 0

    def take(self, size: int) -> npt.NDArray[np.uint8]:
        """[size] bytes of anything."""
        start = self._taken
        self._taken += -(-size // ALIGNMENT) * ALIGNMENT
        if not self._reuse or self._taken > len(self._room):
            return np.empty(size, np.uint8)
        return self._room[start : start + size]

    def reset(self) -> None:
        """What was taken so far may be handed out again."""
        if self._reuse and self._taken > len(self._room):
            self._room = np.empty(self._taken, np.uint8)
        self._taken = 0
