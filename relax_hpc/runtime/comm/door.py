"""Turns strangers away before the HTTP server sees them.

A thread accepts connections and peeks at the first request. A connection that names the key goes
to the server's event loop. Any other costs some microseconds, keeps no memory, and is logged once
per kind of fault and minute.
"""

import asyncio
import logging
import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from http import HTTPStatus

_MOST_HEAD_BYTES = 8192
_MOST_BODY_BYTES = 1 << 20
"""Most bytes of a stranger's body that are read and dropped, so that it receives the reply."""
_PIECE_BYTES = 1 << 16
_MOST_STRANGERS = 256
"""Most connections that have not named the key; beyond, the oldest are closed."""
_MOST_AT_ONCE = 64
_PATIENCE_S = 10.0
"""Seconds in which a connection must name the key."""
_REST_S = 0.01
"""Pause after strangers: a flood is handled in batches instead of one wake-up per request."""
_LOG_EVERY_S = 60.0
_STARTS = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ")
_LOG = logging.getLogger(__name__)


def reply(status: HTTPStatus, json: str) -> bytes:
    """Formats a whole response, after which the connection ends."""
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(json.encode())}\r\nConnection: close\r\n\r\n"
    )
    return (head + json).encode()


class Door:
    def __init__(
        self,
        name: str,
        listener: socket.socket,
        admits: Callable[[bytes], bool],
        refusal: bytes,
        answers: Mapping[bytes, bytes] | None = None,
    ) -> None:
        """Args:
        name: of the server, in the log.
        listener: a listening socket; closed with the door.
        admits: whether the value of an Authorization header names the key; called in the
            thread.
        refusal: response to everybody else.
        answers: public responses, by the first words of a request: b"GET /health".
        """
        self._name, self._listener = name, listener
        self.address: tuple[str, int] = listener.getsockname()[:2]
        self._admits, self._refusal, self._answers = admits, refusal, answers or {}
        self._strangers: dict[int, _Stranger] = {}
        self._refused, self._logged = Counter[str](), dict[str, float]()
        self._num_admitted = 0
        self._tasks = set[asyncio.Task[object]]()

    def open(self, make: Callable[[], asyncio.Protocol]) -> None:
        """Begins to accept. A connection that names the key gets a protocol in the running event
        loop."""
        self._loop, self._make = asyncio.get_running_loop(), make
        self._listener.setblocking(False)
        self._poll = select.epoll()
        self._poll.register(self._listener, select.EPOLLIN)
        threading.Thread(target=self._run, name=f"door of {self._name}", daemon=True).start()

    def close(self) -> None:
        with suppress(OSError):  # closed before
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._listener.close()

    def _run(self) -> None:
        while self._listener.fileno() >= 0:
            try:
                self._turn()
            except Exception:  # noqa: BLE001 - or else nobody would ever be let in again
                _LOG.exception("the door of %s goes on", self._name)
                time.sleep(1.0)
        for stranger in [*self._strangers.values()]:
            self._end(stranger)
        self._poll.close()

    def _turn(self) -> None:
        events = self._poll.poll(1.0 if self._strangers else None)
        for number, event in events:
            if stranger := self._strangers.get(number):
                self._look(stranger, has_left=event != select.EPOLLIN)
        num_admitted = self._num_admitted
        self._accept()
        self._drop_late()
        if self._strangers or self._num_admitted == num_admitted:
            time.sleep(_REST_S)

    def _accept(self) -> None:
        for _ in range(_MOST_AT_ONCE):
            try:
                connection, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:
                time.sleep(0.1)  # it is closed, or no descriptors are left, for now
                return
            connection.setblocking(False)
            self._strangers[connection.fileno()] = stranger = _Stranger(connection, address[0])
            self._look(stranger)
            if self._strangers.get(connection.fileno()) is stranger:
                # An edge, since what was looked at stays readable.
                self._poll.register(connection, select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLET)
                stranger.is_watched = True

    def _look(self, stranger: "_Stranger", *, has_left: bool = False) -> None:
        """Continues with a connection that may have something to read."""
        try:
            if stranger.is_answered:
                self._pour_away(stranger)
                return
            head = stranger.connection.recv(_MOST_HEAD_BYTES, socket.MSG_PEEK)
        except BlockingIOError:
            return
        except OSError:
            head = b""
        end = head.find(b"\r\n\r\n")
        if end >= 0:
            self._judge(stranger, head[:end])
        elif not head or has_left:
            self._refuse(stranger, "that broke off")
        elif head[0] not in _STARTS or len(head) == _MOST_HEAD_BYTES:
            self._refuse(stranger, "that spoke no HTTP")

    def _judge(self, stranger: "_Stranger", head: bytes) -> None:
        asked, *lines = head.split(b"\r\n")
        for line in lines:
            name, _, value = line.partition(b":")
            if name.lower() == b"authorization" and self._admits(value.strip()):
                self._forget(stranger)
                self._num_admitted += 1
                with suppress(RuntimeError):  # the loop has ended
                    self._loop.call_soon_threadsafe(self._let_in, stranger.connection)
                return
        said = self._answers.get(asked.rsplit(b" ", 1)[0])
        if said is None:
            self._count("without the token", stranger)
        stranger.is_answered = True
        try:
            stranger.connection.send(said or self._refusal)
            stranger.connection.shutdown(socket.SHUT_WR)
            self._pour_away(stranger)
        except BlockingIOError:
            pass  # it has not left yet
        except OSError:
            self._end(stranger)

    def _pour_away(self, stranger: "_Stranger") -> None:
        while piece := stranger.connection.recv(_PIECE_BYTES):
            stranger.num_poured += len(piece)
            if stranger.num_poured > _MOST_BODY_BYTES:
                break
        self._end(stranger)

    def _let_in(self, connection: socket.socket) -> None:
        task = self._loop.create_task(self._join(connection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _join(self, connection: socket.socket) -> None:
        with suppress(OSError):  # it has left
            await self._loop.connect_accepted_socket(self._make, connection)

    def _drop_late(self) -> None:
        late, excess = time.monotonic() - _PATIENCE_S, len(self._strangers) - _MOST_STRANGERS
        for number, stranger in enumerate([*self._strangers.values()]):
            if number >= excess and stranger.since > late:
                return
            self._refuse(stranger, "that named no token in time")

    def _refuse(self, stranger: "_Stranger", kind: str) -> None:
        if not stranger.is_answered:
            self._count(kind, stranger)
        self._end(stranger)

    def _end(self, stranger: "_Stranger") -> None:
        self._forget(stranger)
        stranger.connection.close()

    def _forget(self, stranger: "_Stranger") -> None:
        del self._strangers[stranger.connection.fileno()]
        if stranger.is_watched:
            self._poll.unregister(stranger.connection)

    def _count(self, kind: str, stranger: "_Stranger") -> None:
        """Counts a refusal, and logs the first of a kind and minute."""
        self._refused[kind] += 1
        now = time.monotonic()
        if now - self._logged.get(kind, -_LOG_EVERY_S) >= _LOG_EVERY_S:
            self._logged[kind] = now
            _LOG.warning(
                "%s: refused %d connections %s, the last from %s; more are counted, and told once "
                "a minute", self._name, self._refused.pop(kind), kind, stranger.address,
            )  # fmt: skip


class _Stranger:
    """A connection that has not named the key."""

    def __init__(self, connection: socket.socket, address: str) -> None:
        self.connection, self.address, self.since = connection, address, time.monotonic()
        self.is_answered = self.is_watched = False
        self.num_poured = 0
