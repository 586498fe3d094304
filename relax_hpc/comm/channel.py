"""A connection whose ends prove to each other that they know a key, and whose messages carry a MAC.

Nothing of a message is looked at before its MAC has been checked. A session's keys come from fresh
numbers of both ends, and each message is counted: what was said in one session, or once before in
this one, is worth nothing in another place. Nothing is encrypted.
"""

import hashlib
import hmac
import secrets
import socket
import struct
import time

from relax_hpc.run_secret import derive

_NONCE, _MAC = 32, 32
_HELLO = struct.Struct(f">Q{_NONCE}s")
"""Rank of who connects, and its fresh number."""
_HEAD = struct.Struct(f">Q{_MAC}s")
"""Bytes of a message, and the MAC of that number: a length is believed only then."""
_PIECE = 1 << 20


class StrangerError(ConnectionError):
    """The other end does not know the key, or somebody changed what it said."""


class Channel:
    """One end of a connection after the handshake."""

    def __init__(self, connection: socket.socket, session: bytes, *, is_server: bool) -> None:
        self._connection = connection
        ways = (derive(session, "up"), derive(session, "down"))
        self._in, self._out = ways if is_server else ways[::-1]
        self._received = self._sent = 0

    def send(self, message: bytes, *, timeout_s: float) -> None:
        """Blocks until the kernel has all of it.

        Raises:
            OSError: the other end is gone, or took too little for too long.
        """
        head = _mac(self._out, self._sent, struct.pack(">Q", len(message)))
        body = _mac(self._out, self._sent, hashlib.sha256(message).digest())
        self._sent += 1
        self._connection.settimeout(timeout_s)
        self._connection.sendall(_HEAD.pack(len(message), head))
        self._connection.sendall(message)
        self._connection.sendall(body)

    def receive(self, *, timeout_s: float) -> bytearray:
        """The next message.

        Args:
            timeout_s: of silence.

        Raises:
            TimeoutError: nothing came for so long.
            StrangerError: it is not from the other end, or not its next one.
            OSError: the other end is gone.
        """
        size, head = _HEAD.unpack(_read(self._connection, _HEAD.size, silence_s=timeout_s))
        _check(head, _mac(self._in, self._received, struct.pack(">Q", size)))
        message = _read(self._connection, size, silence_s=timeout_s)
        mac = _read(self._connection, _MAC, silence_s=timeout_s)
        _check(bytes(mac), _mac(self._in, self._received, hashlib.sha256(message).digest()))
        self._received += 1
        return message

    def has_spoken(self) -> bool:
        """Whether something lies here that was not received yet."""
        self._connection.settimeout(0)
        try:
            return bool(self._connection.recv(1, socket.MSG_PEEK))
        except OSError:
            return False

    def close(self) -> None:
        self._connection.close()


def call(host: str, port: int, rank: int, key: bytes, *, timeout_s: float) -> Channel:
    """Connects to who `answer`s.

    Raises:
        OSError: nobody answers in time, or a stranger does.
    """
    deadline = time.monotonic() + timeout_s
    connection = socket.create_connection((host, port), timeout=timeout_s)
    try:
        _no_delay(connection)
        hello = _HELLO.pack(rank, secrets.token_bytes(_NONCE))
        connection.sendall(hello)
        nonce = bytes(_read(connection, _NONCE, deadline=deadline))
        proof = bytes(_read(connection, _MAC, deadline=deadline))
        _check(proof, _proof(key, "server", hello, nonce))
        connection.sendall(_proof(key, "client", hello, nonce))
        channel = Channel(connection, _proof(key, "session", hello, nonce), is_server=False)
        channel.receive(timeout_s=max(deadline - time.monotonic(), 0.1))  # it was let in
    except BaseException:
        connection.close()
        raise
    return channel


def answer(connection: socket.socket, key: bytes, *, timeout_s: float) -> tuple[int, Channel]:
    """Makes sure that who connected knows the key. Returns its rank, too.

    Raises:
        OSError: it says nothing, is gone, or is a stranger.
    """
    deadline = time.monotonic() + timeout_s
    connection.settimeout(timeout_s)
    _no_delay(connection)
    hello = bytes(_read(connection, _HELLO.size, deadline=deadline))
    nonce = secrets.token_bytes(_NONCE)
    connection.sendall(nonce + _proof(key, "server", hello, nonce))
    proof = bytes(_read(connection, _MAC, deadline=deadline))
    _check(proof, _proof(key, "client", hello, nonce))
    rank, _ = _HELLO.unpack(hello)
    return rank, Channel(connection, _proof(key, "session", hello, nonce), is_server=True)


def _proof(key: bytes, who: str, hello: bytes, nonce: bytes) -> bytes:
    return hmac.digest(key, who.encode() + hello + nonce, "sha256")


def _mac(key: bytes, count: int, content: bytes) -> bytes:
    """Signs a length (8 bytes) or a digest (32 bytes), so neither passes for the other."""
    return hmac.digest(key, struct.pack(">Q", count) + content, "sha256")


def _check(given: bytes, expected: bytes) -> None:
    if not hmac.compare_digest(given, expected):
        raise StrangerError("what came does not have the right MAC")


def _read(
    connection: socket.socket,
    size: int,
    *,
    silence_s: float | None = None,
    deadline: float = 0.0,
) -> bytearray:
    """Exactly `size` bytes; either the silence between two pieces is limited, or the whole."""
    content, at = bytearray(size), 0
    view = memoryview(content)
    while at < size:
        wait_s = silence_s if silence_s is not None else deadline - time.monotonic()
        if wait_s <= 0:
            raise TimeoutError("it says too little")
        connection.settimeout(wait_s)
        count = connection.recv_into(view[at : at + _PIECE])
        if not count:
            raise ConnectionResetError("it has closed the connection")
        at += count
    return content


def _no_delay(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
