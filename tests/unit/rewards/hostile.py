"""Rewards that somebody might write, good and bad: plugins of the tests."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from pathlib import Path

from relax_hpc.rewards.contract import Score


def by_order(response):
    """Does what the response says; else it is worth its length."""
    do = ORDERS.get(response)
    return do() if do else float(len(response))


async def awaited(response):
    if response == "hang":
        await asyncio.sleep(1000)
    await asyncio.sleep(0.01)
    return by_order(response)


def ranks(group):
    """1 for the longest, 0 for the others."""
    longest = max(len(sample.response) for sample in group)
    for sample in group:
        by_order(sample.response)
    return [float(len(sample.response) == longest) for sample in group]


def too_few(group):
    return [1.0]


def parts(sample):
    return Score(3.0, {"right": 1.0, "short": 2.0})


def with_fields(answer, response, metadata):
    return float(response == answer + metadata["suffix"])


def has_torch(response):
    return float("torch" in sys.modules)


def odd(response, reference_text):
    return 1.0


def text(response):
    return "1.0"


def nan(response):
    return float("nan")


def sleeps_with_signals_blocked():
    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
    time.sleep(1000)


def forks_and_returns():
    os.fork()
    return 3.0


def forks_and_dies():
    if os.fork() == 0:
        os.setsid()
        time.sleep(1000)
    time.sleep(1000)


def dies_before_its_child():
    if os.fork() == 0:
        time.sleep(1000)
    os._exit(0)


def garbage():
    print("{}\n" * 1000)
    sys.stdout.flush()
    os.write(1, b"[1, 2\n" * 1000)
    sys.stdin.read()
    return 7.0


def breaks_the_socket():
    for number in (int(each.name) for each in Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(OSError):
            os.write(number, b"nonsense\n")
    return 1.0


def grows():
    return len(b"x" * (8 << 30))


ORDERS = {
    "hang": lambda: time.sleep(1000),
    "power": lambda: 9**9**9**9,
    "exit": lambda: os._exit(3),
    "sys.exit": lambda: sys.exit(3),
    "raise": lambda: 1 / 0,
    "segfault": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "memory": grows,
    "blocked": sleeps_with_signals_blocked,
    "fork": forks_and_dies,
    "orphan": dies_before_its_child,
    "socket": breaks_the_socket,
}
HARMLESS = {"twice": forks_and_returns, "garbage": garbage}
ORDERS |= HARMLESS


async def asks_a_judge(response, engines):
    return float(await engines["judge"].generate(response) == "yes")


asks_a_judge.pools = ("judge",)


async def asks_somebody(response, engines):
    return 0.0


def asks_without_waiting(response, engines):
    return 0.0
