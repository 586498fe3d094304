"""One incarnation of a role as a forked process, which runs only when it is told to."""

import os
import select
import signal
import sys
import traceback
from typing import NamedTuple

from crash_points import Points
from crash_roles import Incarnation, role_of

import relax_hpc.bus.log
import relax_hpc.bus.sequencer
from relax_hpc.errors import BusError

NAMED = 3
SILENCE_S = 60
SNAPSHOT_RECORDS = 3
OUTCOMES = {0: "done", NAMED: "ended with a named error", -signal.SIGKILL: "killed"}


class Fate(NamedTuple):
    """The end of an incarnation; nothing if it makes fewer calls."""

    name: str
    number: int
    """Number of the incarnation, 0-based."""
    call: int
    """1-based; 0 is never."""
    mode: str
    """`before` or `half` way through the call it is killed; or there it `halt`s."""

    def __str__(self):
        return f"{self.name}#{self.number}@{self.call}:{self.mode}"


class Process:
    """Between turns it waits to be told to go on."""

    def __init__(self, world, fate, seed):
        self.fate, self.name = fate, fate.name
        self.points = []
        """Names of the calls it made."""
        self.outcome = "waits"
        self.stderr = world.root / f"{fate.name}#{fate.number}.stderr"
        go, self._go = os.pipe()
        self._report, report = os.pipe()
        self._rest = b""
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._go)
            os.close(self._report)
            live(world, fate, seed, self.stderr, *_in_step(go, report))
        os.close(go)
        os.close(report)

    @property
    def alive(self):
        return self.outcome in ("", "waits", "halts")

    def turn(self):
        """Lets it run until it gives way, halts, ends or is dead."""
        os.write(self._go, b"g")
        self.outcome = ""
        while not self.outcome:
            reads = select.poll()  # there may be more than 1,024 files
            reads.register(self._report, select.POLLIN)
            assert reads.poll(SILENCE_S * 1000), f"{self} has said nothing for {SILENCE_S} s"
            data = os.read(self._report, 1 << 16)
            if not data:
                self._end()
                return
            *lines, self._rest = (self._rest + data).split(b"\n")
            for word in (line.decode() for line in lines):
                if word in ("waits", "halts"):
                    self.outcome = word
                else:
                    self.points.append(word)

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)
        self._end()

    def _end(self):
        _, status = os.waitpid(self.pid, 0)
        os.close(self._go)
        os.close(self._report)
        self.outcome = OUTCOMES.get(os.waitstatus_to_exitcode(status), "failed")

    def __str__(self):
        return f"{self.name}#{self.fate.number}"


def _in_step(go, report):
    """The work of a process between turns, at each call, and the place where it halts."""
    write, read = os.write, os.read

    def say(word):
        write(report, f"{word}\n".encode())

    def turn():
        say("waits")
        if not read(go, 1):
            os._exit(1)

    def halt():
        say("halts")
        read(go, 1)

    read(go, 1)
    return turn, say, halt


def live(world, fate, seed, stderr, turn, tell, halt):
    """The life of a forked process; does not return."""
    code = 1
    try:
        os.dup2(os.open(stderr, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), 2)
        relax_hpc.bus.log.BALLAST_BYTES = 16
        relax_hpc.bus.sequencer.SNAPSHOT_RECORDS = SNAPSHOT_RECORDS
        relax_hpc.bus.sequencer.POLL_S = 0
        points = Points(world.root, tell, halt)
        points.install((fate.call, fate.mode))
        role_of(fate.name)(world, Incarnation(fate.name, fate.number, seed, points, turn))
        code = 0
    except BusError:
        code = NAMED
        traceback.print_exc()
    except BaseException:  # noqa: BLE001  whatever it is, it must not come back to the caller
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)
