"""Runs of the bus whose processes are killed with SIGKILL, or stopped and woken again as zombies.

python crash_run.py sweep INJECTIONS SEED      prints what died where
python crash_run.py one SETUP SEED [FATE ...]  one run; a fate is NAME#INCARNATION@CALL:MODE
python crash_run.py one SETUP SEED random      the fates are drawn, too
python crash_run.py free SETUP SEED            all at once, killed from outside at random times

Each role is a process of its own, forked from this one, which has everything imported. In all but
`free` one of them runs at a time, and the dice say which: so a run can be repeated exactly.
"""

import itertools
import logging
import os
import random
import re
import shlex
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple

from crash_check import missing_files, problems
from crash_free import run_free
from crash_process import Fate, Process
from crash_roles import SETUPS, World, role_of, tidy

MODES = ("before", "half", "halt", "outside")
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""Where the runs are; what is killed from outside is on the disk."""
MAX_TURNS = 5000
MAX_DEATHS = 8
"""Deaths of one role in one run."""


class CrashTestError(AssertionError):
    """A run went wrong; the message says how to see it again."""


class Death(NamedTuple):
    """A process that was killed, or stopped for a while."""

    role: str
    point: str
    mode: str


class Run:
    """One run from start to end.

    Args:
        root: an empty folder.
        setup: name of one of `SETUPS`.
        seed: of the dice.
        fates: by (name, incarnation); None draws them.
    """

    def __init__(self, root, setup, seed, fates):
        self.world = World(Path(os.path.realpath(root)), SETUPS[setup])
        self.deaths = []
        self.points = {}
        """Calls of the first incarnation of each role."""
        self._setup, self._seed, self._fates = setup, seed, fates
        self._dice = random.Random(repr((seed, setup)))
        self._numbers = Counter()
        self._processes = {}
        self._zombies = []
        self._halted = set()
        self._ended = set()
        self._turns = 0

    @property
    def command(self):
        fates = ["random"] if self._fates is None else map(str, self._fates.values())
        return shlex.join(
            ["python", "tests/bus/crash_run.py", "one", self._setup, str(self._seed), *fates]
        )

    def go(self):
        """Raises:
        CrashTestError: something is not as it must be.
        """
        self.world.make()
        try:
            while len(self._ended) < len(self.world.roles) or self._zombies:
                self._turn()
            tidy(self.world)
            wrong = problems(self.world)
        except CrashTestError:
            raise
        except Exception as error:  # noqa: BLE001  shown with how to repeat it
            wrong = [f"{type(error).__name__}: {error}"]
        finally:
            for process in [*self._processes.values(), *self._zombies]:
                if process.alive:
                    process.kill()
        if wrong:
            self._fail(*wrong)
        return self

    def _turn(self):
        self._turns += 1
        if self._turns > MAX_TURNS:
            ended = sorted(self._ended)
            self._fail(f"no end after {MAX_TURNS} turns; only {ended} have ended")
        zombies = self._zombies if len(self._ended) == len(self.world.roles) else self._zombies[1:]
        names = [name for name in self.world.roles if name not in self._ended]
        # A zombie sleeps on for a while: until another role halts, or the run is over.
        process = self._dice.choice([*names, *zombies])
        if isinstance(process, str):
            process = self._processes.get(process) or self._start(process)
        process.turn()
        if process in self._zombies:
            self._look_at_zombie(process)
        else:
            self._look_at(process)

    def _start(self, name):
        number = self._numbers[name]
        self._numbers[name] += 1
        fate = (self._fates or {}).get((name, number)) or Fate(name, number, 0, "")
        if self._fates is None:
            fate = drawn_fate(self._seed, name, number)
        process = self._processes[name] = Process(self.world, fate, self._seed)
        return process

    def _look_at(self, process):
        self.points.setdefault(process.name, process.points)
        if process.outcome in ("killed", "halts"):
            role = role_of(process.name).__name__
            self.deaths.append(Death(role, process.points[-1], process.fate.mode))
            if gone := missing_files(self.world):
                self._fail(f"the oldest checkpoint needs {gone}")
        if process.outcome == "halts":
            self._zombies.append(process)
            self._halted.add(process.name)  # it may take over once more when it wakes
        if process.outcome == "done":
            self._ended.add(process.name)
        fenced = process.outcome == "ended with a named error"
        if process.outcome == "failed" or (fenced and process.name not in self._halted):
            self._fail(f"{process}: {process.stderr.read_text()}")
        if process.outcome != "waits":
            del self._processes[process.name]

    def _look_at_zombie(self, process):
        if process.outcome == "failed":
            self._fail(f"zombie {process}: {process.stderr.read_text()}")
        if not process.alive:
            self._zombies.remove(process)

    def _fail(self, *wrong):
        raise CrashTestError("\n".join([*wrong, f"again: {self.command}"]))


def drawn_fate(seed, name, number):
    """Often while it opens, else anywhere; one in five comes back as a zombie."""
    dice = random.Random(repr((seed, name, number, "fate")))
    call = dice.choice([dice.randint(1, 16), dice.randint(1, 150)])
    mode = dice.choice(["before", "before", "half", "half", "halt"])
    return Fate(name, number, call if number < MAX_DEATHS else 0, mode)


def sweep(injections, seed, progress=lambda text: None):
    """(deaths, runs), some of them chosen so that every point is among them, the others drawn."""
    deaths, runs = [], 0
    for found in deaths_of_runs(injections, seed):
        deaths += found
        runs += 1
        progress(f"{len(deaths)} of {injections} injections, {runs} runs")
        if len(deaths) >= injections:
            break
    return deaths, runs


def deaths_of_runs(injections, seed):
    """Yields the deaths of one run after another, without end."""
    for setup, fates in chosen(injections // 3, seed):
        yield run(setup, seed, fates).deaths
    for number in itertools.count():
        setup = list(SETUPS)[number % len(SETUPS)]
        yield run(setup, seed + number, None).deaths
        if number % 2:
            yield run_and_kill(setup, seed + number)


def run(setup, seed, fates):
    with tempfile.TemporaryDirectory(prefix="crash", dir=MEMORY) as folder:
        return Run(folder, setup, seed, fates).go()


def run_and_kill(setup, seed):
    with tempfile.TemporaryDirectory(prefix="crash") as folder:
        try:
            killed = run_free(Path(folder), setup, seed, MAX_DEATHS)
        except AssertionError as error:
            command = shlex.join(["python", "tests/bus/crash_run.py", "free", setup, str(seed)])
            raise CrashTestError(f"{error}\nmay happen again: {command}") from error
    return [Death(role, point, "outside") for role, point in killed]


def chosen(number, seed):
    """(setup, fates) of about `number` runs that between them die at every point in every way.

    A role's successor dies, too, in the second half of them: while it takes over.
    """
    dice = random.Random(seed)
    places = defaultdict(list)
    for setup in SETUPS:
        for name, points in run(setup, seed, {}).points.items():
            for call, point in enumerate(points, 1):
                for mode in MODES[:3]:
                    key = (role_of(name).__name__, point, mode)
                    places[key].append((setup, Fate(name, 0, call, mode)))
    order = [dice.sample(found, len(found)) for found in places.values()]
    dice.shuffle(order)
    depth = 0
    while number > 0:
        for found in order:
            if number > 0 and depth < len(found):
                setup, fate = found[depth]
                fates = {(fate.name, 0): fate}
                if number % 2:
                    successor = Fate(fate.name, 1, dice.randint(1, 20), "half")
                    fates[fate.name, 1] = successor
                yield setup, fates
                number -= 1
        depth += 1


def table(deaths):
    """Role x point x count."""
    counts = Counter(deaths)
    points = sorted({(death.role, death.point) for death in deaths})
    lines = [f"{'role':8} {'point':36}" + "".join(f"{mode:>8}" for mode in MODES)]
    for role, point in points:
        row = [counts[Death(role, point, mode)] for mode in MODES]
        lines.append(f"{role:8} {point:36}" + "".join(f"{count:8}" for count in row))
    lines += [
        f"{role:8} {sum(row.role == role for row in deaths)} injections"
        for role in sorted({death.role for death in deaths})
    ]
    return "\n".join(lines)


def parse_fates(words):
    fates = {}
    for word in words:
        name, number, call, mode = re.fullmatch(r"(.+)#(\d+)@(\d+):(\w+)", word).groups()
        fates[name, int(number)] = Fate(name, int(number), int(call), mode)
    return fates


def main(command, *words):
    start = time.monotonic()
    logging.disable(logging.WARNING)
    if command == "one":
        setup, seed, *fates = words
        root = tempfile.mkdtemp(prefix="crash")
        print(f"in {root}")
        one = Run(root, setup, int(seed), None if fates == ["random"] else parse_fates(fates)).go()
        deaths, runs = one.deaths, 1
    elif command == "free":
        deaths, runs = run_and_kill(words[0], int(words[1])), 1
    else:
        injections, seed = map(int, words)
        deaths, runs = sweep(injections, seed, lambda text: print(f"\r{text}", end="", flush=True))
        print()
    print(table(deaths))
    print(f"{len(deaths)} injections in {runs} runs survived, {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except CrashTestError as error:
        sys.exit(f"\n{error}")
