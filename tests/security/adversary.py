"""Attacks by somebody who is on the node, or on its network, and does not know the secret."""

import os
import pickle
import shutil
import socket
import struct
import subprocess
import sys
import traceback
from contextlib import suppress
from pathlib import Path

import pytest


class Bomb:
    """Leaves a mark where it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


def bomb(mark):
    return pickle.dumps(Bomb(mark))


def as_nobody(script, *, group=None, text=""):
    """Returns what a shell script of user nobody prints; of another group if one is named."""
    command = ["su", "-s", "/bin/sh", "nobody", "-c", script]
    if group is not None:
        command[1:1] = ["-g", group]
    return subprocess.run(
        command, input=text, capture_output=True, text=True, check=True, timeout=60
    ).stdout


def open_to_nobody(paths, *, group=None):
    """Which of `paths` user nobody may read, or write."""
    script = 'while read -r p; do [ -r "$p" ] && echo "r $p"; [ -w "$p" ] && echo "w $p"; done; :'
    found = as_nobody(script, group=group, text="".join(f"{path}\n" for path in paths))
    return {(line[0], Path(line[2:])) for line in found.splitlines()}


def needs_another_user():
    if subprocess.run(["id", "-u"], capture_output=True, text=True).stdout.strip() != "0":
        pytest.skip("only root can become another user")
    if shutil.which("su") is None:
        pytest.skip("su is not installed")


def talk(host, port, mark):
    """Returns connections that stay open and silent, one for everything that is rude."""
    openings = [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        bomb(mark),
        struct.pack(">Q", len(bomb(mark))) + bomb(mark),
        struct.pack(">Q", 1 << 62) + b"\0" * 40,
        struct.pack(">Q32s", 1, b"\0" * 32) + b"\0" * 32 + bomb(mark),
        b"\xff" * 4096,
    ]
    connections = []
    for opening in openings:
        with suppress(OSError):  # refused, or cut off
            connection = socket.create_connection((host, port), timeout=5)
            connections.append(connection)
            connection.sendall(opening)
    return connections


def as_user(user, function, *, groups=(), umask=0o077, before=lambda: None):
    """Runs a function as another user, in a child of this process; what it prints is returned.

    Args:
        user: number of the user, and of its own group.
        function: takes nothing.
        groups: numbers of the groups that it is in besides.
        umask: of the child.
        before: is called as root in the child, e.g. by who knows its id.
    """
    read, write = os.pipe()
    child = os.fork()
    if not child:
        code = 70
        try:
            os.close(read)
            before()
            os.setgroups([user, *groups])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
            os.umask(umask)
            with os.fdopen(write, "w", errors="replace") as said:
                sys.stdout = sys.stderr = said
                function()
                code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else bool(end.code)
        except Exception:  # noqa: BLE001
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(code)
    os.close(write)
    with os.fdopen(read, errors="replace") as told:
        said = told.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said
