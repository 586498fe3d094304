"""Broken requests by a stranger, at an even pace, from a process of its own:

python flood.py HOST PORT[,PORT...] REQUESTS_PER_S SECONDS [KIND ...]
"""

import itertools
import socket
import subprocess
import sys
import time
from collections import deque
from contextlib import contextmanager, suppress

_HUGE = b"Content-Length: 99999999999\r\n\r\n" + b"{" * (1 << 14)
KINDS = {
    "body that breaks off": b"POST /health HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{",
    "huge body": b"POST /generate HTTP/1.1\r\nHost: x\r\n" + _HUGE,
    "huge body for health": b"GET /health HTTP/1.1\r\nHost: x\r\n" + _HUGE,
    "chunks": b"POST /health HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    "no HTTP": b"\x16\x03\x01\x02\x00\x01" * 700,
    "endless head": b"GET /health HTTP/1.1\r\nX: " + b"x" * (1 << 14),
    "half a head": b"GET /health HT",
    "silence": b"",
    "no token": b"GET /model_info HTTP/1.1\r\nHost: x\r\n\r\n",
    "wrong token": b"POST /generate HTTP/1.1\r\nAuthorization: Bearer x\r\nHost: x\r\n\r\n{}",
    "health": b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n",
}
STAYS = frozenset({"half a head", "silence"})
"""Kinds that say nothing more, and stay."""
_STAY_S = 3.0


def shoot(host: str, ports, kinds, per_s: float, seconds: float) -> int:
    """Returns how many connections could be opened, one a request; most are closed at once."""
    begin, opened, silent = time.monotonic(), 0, deque()
    turns = zip(range(int(per_s * seconds)), itertools.cycle(itertools.product(kinds, ports)))
    for number, (kind, port) in turns:
        wait = begin + number / per_s - time.monotonic()
        if wait > 0.002:
            time.sleep(wait)
        with suppress(OSError):
            connection = socket.create_connection((host, port), timeout=1)
            opened += 1
            connection.setblocking(False)
            if kind in STAYS:
                silent.append((time.monotonic(), connection))
            with suppress(OSError):
                connection.send(KINDS[kind])
            if kind not in STAYS:
                connection.close()
        while silent and time.monotonic() - silent[0][0] > _STAY_S:
            silent.popleft()[1].close()
    return opened


@contextmanager
def flood(host: str, ports, per_s: float, seconds: float = 600.0, kinds=tuple(KINDS)):
    """Shoots during the block."""
    command = [
        sys.executable, __file__, host, ",".join(map(str, ports)), str(per_s), str(seconds), *kinds,
    ]  # fmt: skip
    with subprocess.Popen(command) as shooter:
        try:
            yield shooter
        finally:
            shooter.kill()


SINK = """
import socket, sys
server = socket.create_server(("127.0.0.1", 0), backlog=4096)
print(server.getsockname()[1], flush=True)
while True:
    connection, _ = server.accept()
    connection.setblocking(False)
    try:
        connection.recv(1 << 18)
    except OSError:
        pass
    connection.close()
"""


@contextmanager
def sink():
    """A port of a process that takes everything and does nothing."""
    command = [sys.executable, "-c", SINK]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, encoding="utf-8") as process:
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()


if __name__ == "__main__":
    host, ports, per_s, seconds, *kinds = sys.argv[1:]
    made = shoot(
        host,
        [int(port) for port in ports.split(",")],
        kinds or tuple(KINDS),
        float(per_s),
        float(seconds),
    )
    print(f"{made} connections were opened")
