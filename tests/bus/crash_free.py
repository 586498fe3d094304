"""All roles at once, as fast as they can, killed from outside at random times.

What is killed when follows from the seed; how far it has come by then does not.
"""

import mmap
import os
import random
import signal
import time

from crash_check import missing_files, problems
from crash_process import OUTCOMES, Fate, live
from crash_roles import SETUPS, World, role_of, tidy

LIFETIME_S = 0.25
"""About what a role needs for a whole run; deaths are spread over it."""
DEADLINE_S = 120


class FreeProcess:
    """Runs on until it ends or is killed."""

    def __init__(self, world, name, number, seed):
        self.name, self.dies_at = name, None
        self._where = mmap.mmap(-1, 256)
        self.stderr = world.root / f"{name}#{number}.stderr"
        self.pid = os.fork()
        if self.pid == 0:
            fate = Fate(name, number, 0, "")
            live(world, fate, seed, self.stderr, lambda: time.sleep(0.001), self._tell, None)

    @property
    def where(self):
        """The last call it began."""
        return self._where[:].split(b"\0")[0].decode() or "open: nothing yet"

    def _tell(self, label):
        self._where[: len(label) + 1] = label.encode() + b"\0"

    def kill(self):
        """Returns whether it was still there to be killed."""
        os.kill(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(status) == -signal.SIGKILL

    def poll(self):
        """The outcome; None while it runs."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        return OUTCOMES.get(os.waitstatus_to_exitcode(status), "failed") if pid else None


def run_free(root, setup, seed, kills):
    """Returns what was killed, as (role, point); raises AssertionError if something is wrong."""
    world = World(root.resolve(), SETUPS[setup])
    world.make()
    dice, numbers, killed = random.Random(seed), dict.fromkeys(world.roles, 0), []
    running, ended = {}, set()
    deadline = time.monotonic() + DEADLINE_S
    try:
        while len(ended) < len(world.roles):
            assert time.monotonic() < deadline, f"no end after {DEADLINE_S} s; {ended} have ended"
            for name in set(world.roles) - ended - running.keys():
                process = running[name] = FreeProcess(world, name, numbers[name], seed)
                numbers[name] += 1
                process.dies_at = time.monotonic() + dice.uniform(0, LIFETIME_S)
            time.sleep(0.002)
            for name, process in list(running.items()):
                if outcome := process.poll():
                    assert outcome == "done", process.stderr.read_text()
                    ended.add(name)
                    del running[name]
                elif len(killed) < kills and time.monotonic() > process.dies_at:
                    del running[name]
                    if process.kill():
                        killed.append((role_of(name).__name__, process.where))
                    gone = missing_files(world)
                    assert not gone, f"the oldest checkpoint needs {gone}"
    finally:
        for process in running.values():
            process.kill()
    tidy(world)
    wrong = problems(world)
    assert not wrong, "\n".join(wrong)
    return killed
