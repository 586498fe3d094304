"""Runs roles of bus_roles.py in processes of their own, on storage that fails as it is told to.

The library that does it is compiled from faults.c and preloaded. One process has everything
imported and forks the others, so that each takes milliseconds.
"""

import ctypes
import json
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
SHORT, NO_DIRECT = -1, -2


class Fault(NamedTuple):
    """The calls `after < n <= after + times` of `call` on a path that contains `path` fail."""

    call: str
    code: int
    path: str
    after: int = 0
    times: int = 1


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


class Role:
    """A running process."""

    def __init__(self, pid, folder, wait):
        self.pid, self._folder, self._wait = pid, folder, wait

    def signal(self, number):
        os.kill(self.pid, number)

    def end(self):
        """Waits for it."""
        code = self._wait(self.pid)
        return Outcome(code, *((self._folder / name).read_text() for name in ("out", "err")))


class Stage:
    """Starts roles."""

    def __init__(self, process, folder):
        self._process, self._folder, self._number = process, folder, 0

    def start(self, *words, fault=None):
        self._number += 1
        folder = self._folder / str(self._number)
        folder.mkdir()
        return Role(self._ask([str(folder), fault, *map(str, words)]), folder, self._wait)

    def run(self, *words, fault=None):
        return self.start(*words, fault=fault).end()

    def _wait(self, pid):
        return self._ask(pid)

    def _ask(self, question):
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


def missing(folder):
    """Compiles the library to `folder`; why that cannot be, or None."""
    try:
        command = ["gcc", "-shared", "-fPIC", "-O1", "-o", folder / "faults.so", HERE / "faults.c"]
        subprocess.run([*command, "-ldl"], check=True, capture_output=True, text=True)
    except FileNotFoundError:
        return "gcc is not installed"
    except subprocess.CalledProcessError as error:
        return f"faults.c does not compile here: {error.stderr}"
    return None


@contextmanager
def stage(folder):
    library = folder / "faults.so"
    process = subprocess.Popen(
        [sys.executable, __file__, library],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "LD_PRELOAD": str(library)},
    )  # fmt: skip
    try:
        yield Stage(process, folder)
    finally:
        process.stdin.close()
        process.wait(60)


def _serve(library):
    import bus_roles

    def begin(folder, fault, words):
        pid = os.fork()
        if pid == 0:
            for number, name in ((1, "out"), (2, "err")):
                os.dup2(os.open(Path(folder) / name, os.O_WRONLY | os.O_CREAT, 0o644), number)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            if fault:
                call, code, path, after, times = fault
                library.fault_arm(call.encode(), code, path.encode(), after, times)
            bus_roles.run(*words)
        return pid

    for line in sys.stdin:
        question = json.loads(line)
        if isinstance(question, int):
            answer = os.waitstatus_to_exitcode(os.waitpid(question, 0)[1])
        else:
            folder, fault, *words = question
            answer = begin(folder, fault, words)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _serve(ctypes.CDLL(sys.argv[1]))
