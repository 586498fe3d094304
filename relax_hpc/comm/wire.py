"""The protocol by which buckets leave a process, whatever carries them."""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor


class Sending(Protocol):
    """A bucket under way."""

    def order_after(self) -> None:
        """Makes what the current stream does next happen after it."""
        ...

    def wait(self, deadline: float, give_up: Callable[[], None]) -> None:
        """Blocks until it is over.

        Args:
            deadline: of time.monotonic().
            give_up: called again and again meanwhile; what it raises ends the wait.

        Raises:
            TimeoutError: it is not over.
        """
        ...


class Wire(Protocol):
    def start(self, tensor: Tensor) -> Sending:
        """Begins to send a buffer, after what the current stream has been given so far."""
        ...
