"""Rank 0's end of a star: lets the other ranks in, each by a channel, and nobody else.

Whoever connects gets a thread and a few seconds to prove that it knows the key, so strangers, even
silent ones, hold up nobody. Once all ranks are in, nothing listens any more.
"""

import socket
import threading
import time
from contextlib import suppress

from relax_hpc.comm.address import node_address
from relax_hpc.comm.channel import Channel, answer

_HANDSHAKE_S = 10.0
_MOST_STRANGERS = 256
"""Connections that have proved nothing yet; of more, the oldest go."""
_WELCOME = b"welcome"


class Hub:
    """The channels to ranks 1 to size - 1."""

    def __init__(self, size: int, key: bytes) -> None:
        """Listens on this node's address, on a port that the kernel picks."""
        self._size, self._key = size, key
        self._listener = socket.create_server((node_address(), 0), backlog=socket.SOMAXCONN)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._channels: dict[int, Channel] = {}
        self._joined = threading.Condition()
        self._strangers: dict[socket.socket, None] = {}
        threading.Thread(target=self._listen, name="ranks that join", daemon=True).start()

    def channels(self, timeout_s: float) -> dict[int, Channel]:
        """Waits for all ranks; after `timeout_s`, those that came."""
        with self._joined:
            self._joined.wait_for(lambda: len(self._channels) == self._size - 1, timeout_s)
            return dict(self._channels)

    def close(self) -> None:
        """Lets nobody in any more."""
        with suppress(OSError):  # closed before
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes who accepts
        self._listener.close()

    def _listen(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._listener.fileno() < 0:
                    return
                time.sleep(0.1)  # no descriptors left, for now
                continue
            with self._joined:
                self._strangers[connection] = None
                while len(self._strangers) > _MOST_STRANGERS:
                    oldest = next(iter(self._strangers))
                    del self._strangers[oldest]
                    with suppress(OSError):
                        oldest.shutdown(socket.SHUT_RDWR)  # its thread closes it
            threading.Thread(target=self._meet, args=(connection,), daemon=True).start()

    def _meet(self, connection: socket.socket) -> None:
        try:
            rank, channel = answer(connection, self._key, timeout_s=_HANDSHAKE_S)
            self._admit(rank, channel)
        except OSError:
            connection.close()
        finally:
            with self._joined:
                self._strangers.pop(connection, None)

    def _admit(self, rank: int, channel: Channel) -> None:
        """A rank that comes again did not hear that it was let in; its newest connection counts."""
        if not 0 < rank < self._size:
            channel.close()
            return
        with self._joined:
            if len(self._channels) == self._size - 1:
                channel.close()
                return
            channel.send(_WELCOME, timeout_s=_HANDSHAKE_S)
            if before := self._channels.get(rank):
                before.close()
            self._channels[rank] = channel
            if len(self._channels) == self._size - 1:
                self.close()
                self._joined.notify_all()
