"""Rewards that somebody might write, good and bad: plugins of the tests."""

import asyncio
import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Literal

from relax_hpc.environments.rewards.contract import Score


def by_order(response):
    """Does what the response says; else it is worth its length."""
    do = ORDERS.get(response)
    return do() if do else float(len(response))


async def awaited(response):
    if response == "hang":
        await asyncio.sleep(1000)
    await asyncio.sleep(0.01)
    return by_order(response)


async def slowly_awaited(response):
    await asyncio.sleep(0.5)
    return float(len(response))


def ranks(group):
    """1 for the longest, 0 for the others."""
    longest = max(len(sample.response) for sample in group)
    for sample in group:
        by_order(sample.response)
    return [float(len(sample.response) == longest) for sample in group]


def parts(sample):
    return Score(3.0, {"right": 1.0, "short": 2.0})


def with_settings(
    response,
    *,
    tolerance: float = 0.5,
    strict: bool = False,
    count: int = 3,
    labels: list[str] = ["a"],  # noqa: B006
    scheme: Literal["plain", "signed"] = "plain",
    odd: "Unheard" = None,  # noqa: F821
    finish="",
):
    return Score(tolerance + count, {"tolerance": tolerance, "count": count})


def typed(response, *, tolerance: float = 0.5, strict: bool = False, labels: list[str] = [],  # noqa: B006
          scheme: Literal["plain", "signed"] = "plain"):  # fmt: skip
    return tolerance


def with_fields(answer, response, metadata):
    return float(response == answer + metadata["suffix"])


def metadata(metadata):
    return Score(0.0, error=json.dumps(metadata))


def has_torch(response):
    return float("torch" in sys.modules)


def odd(response, reference_text):
    return 1.0


def text(response):
    return "1.0"


def started():
    """Notes a process that a reward has started, for the test to look whether it is gone."""
    if "HOSTILE_PIDS" in os.environ:
        with Path(os.environ["HOSTILE_PIDS"]).open("a", encoding="utf-8") as file:
            file.write(f"{os.getpid()}\n")


def hang(*_):
    time.sleep(1000)


def sleeps_with_signals_blocked():
    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
    hang()


def forks_and_returns():
    os.fork()
    return 3.0


def forks_and_dies():
    if os.fork() == 0:
        started()
        os.setsid()
    hang()


def dies_before_its_child():
    if os.fork() == 0:
        started()
        hang()
    os._exit(0)


def leaves_a_daemon():
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        started()
        hang()
    time.sleep(0.05)
    os._exit(7)


def forks_many():
    for _ in range(20):
        if os.fork() == 0:
            started()
            os.setsid()
            break
    hang()


def leaves_a_program():
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    with Path(os.environ.get("HOSTILE_PIDS", os.devnull)).open("a", encoding="utf-8") as file:
        file.write(f"{child.pid}\n")
    raise ValueError("left a program")


def garbage():
    print("{}\n" * 1000)
    sys.stdout.flush()
    os.write(1, b"[1, 2\n" * 1000)
    sys.stdin.read()
    return 7.0


def descriptors():
    return [int(each.name) for each in Path("/proc/self/fd").iterdir()]


def breaks_the_socket():
    for number in descriptors():
        with contextlib.suppress(OSError):
            os.write(number, b"nonsense\n")
    return 1.0


def floods():
    for number in descriptors():
        for _ in range(1 << 10):
            with contextlib.suppress(OSError):
                os.set_blocking(number, True)
                os.write(number, bytes(1 << 20))
    return 1.0


def grows():
    return len(b"x" * (8 << 30))


def recurses():
    sys.setrecursionlimit(1 << 30)
    return recurses()


def waits_for_a_thread():
    thread = threading.Thread(target=hang, daemon=True)
    thread.start()
    thread.join()


def starts_threads():
    while True:
        threading.Thread(target=hang, daemon=True).start()


def patches():
    json.dumps = lambda *_, **__: "nonsense"
    return 1.0


def says_much():
    raise ValueError("x" * (100 << 20))


ORDERS = {
    "hang": hang,
    "power": lambda: 9**9**9**9,
    "regex": lambda: re.match(r"(a+)+$", "a" * 60 + "b"),
    "exit": lambda: os._exit(3),
    "raise": lambda: 1 / 0,
    "much": says_much,
    "segfault": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "kill parent": lambda: os.kill(os.getppid(), signal.SIGKILL) or hang(),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "memory": grows,
    "no limit": recurses,
    "blocked": sleeps_with_signals_blocked,
    "fork": forks_and_dies,
    "forks": forks_many,
    "orphan": dies_before_its_child,
    "daemon": leaves_a_daemon,
    "left program": leaves_a_program,
    "thread": waits_for_a_thread,
    "threads": starts_threads,
    "socket": breaks_the_socket,
    "flood": floods,
    "print": lambda: print("x" * (1 << 30)),
    "patch": patches,
    "nan": lambda: math.nan,
}
HARMLESS = {
    "twice": forks_and_returns,
    "garbage": garbage,
    "needs memory": lambda: float(len(bytes(64 << 20))),
}
HOSTILE = sorted(ORDERS)
ORDERS |= HARMLESS


async def asks_a_judge(response, engines):
    return float(await engines["judge"].generate(response) == "yes")


asks_a_judge.pools = ("judge",)


async def asks_somebody(response, engines):
    return 0.0


def asks_without_waiting(response, engines):
    return 0.0


def by_source(source):
    return len(source)
