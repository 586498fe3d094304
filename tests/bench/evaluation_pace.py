"""What an evaluation in the background adds to the steps of training, in one run with and without.

PYTHONPATH=.:tests/unit:tests/unit/roles python tests/bench/evaluation_pace.py

Rollout's loop and evaluation, bus and sequencer are the real ones. Training is a sleep. The engine
is one whose whole speed is shared out evenly among the requests that run, so that every held-out
token is at the cost of another: a GPU that samples many at a time comes near to it, one that
samples few loses less. A held-out set begins every six policies and lasts about three steps, so
the run has steps of both kinds in turn; those with a part of an evaluation count as neither.
"""

import asyncio
import itertools
import statistics
import tempfile
import threading
import time
from collections import deque
from typing import NamedTuple

from episode_fakes import Board, answer, episodes
from role_fakes import Events, config

from relax_hpc.bus import layout
from relax_hpc.bus.credits import CreditTail
from relax_hpc.bus.sequencer import Sequencer
from relax_hpc.paths import RunPaths
from relax_hpc.prompts.source import Prompt
from relax_hpc.roles.rollout import loop as rollout
from relax_hpc.roles.rollout.build import CREDITS_EVERY_S
from relax_hpc.roles.rollout.episodes import Grouper
from relax_hpc.roles.rollout.evaluation import Evaluator
from relax_hpc.roles.rollout.folders import Folders

P, SIBLINGS, STEPS, EVERY = 16, 4, 27, 6
TICK_S = 0.01


class Prompts:
    async def asked(self, guid):
        return Prompt(guid, [7], "1")


class Case(NamedTuple):
    """A balance of engine and trainer."""

    name: str
    train_s: float
    places: int
    lag: int
    heldout: int
    """Prompts of the set."""
    share: float
    """Part of the requests in flight that evaluation may be, where the engine makes the pace."""
    sample_s: float = 1.6
    """Time in which the engine makes a batch, when it makes nothing else."""


CASES = (  # held-out prompts are as many as take about three steps
    Case("trainer-bound", 2.4, 32, 1, 60, share=0.0),
    Case("engine-bound", 0.4, 32, 1, 12, share=8 / (128 + 8)),
    Case("engine-bound, few in flight", 0.4, 256, 0, 50, share=16 / (64 + 16)),
)


class Engine:
    """Works at all requests that run evenly; the others wait in line."""

    def __init__(self, places, sample_s):
        self.now, self.places, self.total = 0, places, P * SIBLINGS / sample_s
        self.line, self.running = deque(), {}
        self.under_way, self.held = [], 0
        """Whether held-out requests were there, by tick; how many are."""
        self.made = {False: 0, True: 0}

    async def version(self):
        return self.now

    async def work(self):
        last = time.monotonic()
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            self.under_way.append((last, now, self.held > 0))
            while self.line and len(self.running) < self.places:
                self.running[self.line.popleft()] = 1.0
            part = (now - last) * self.total / max(len(self.running), 1)
            last = now
            for done in list(self.running):
                self.running[done] -= part
                if self.running[done] <= 0:
                    del self.running[done]
                    done.set_result(None)

    async def sample(self, given, draft, how, *, seed, homes):
        done = asyncio.get_running_loop().create_future()
        is_heldout = not isinstance(homes[1], int)
        self.held += is_heldout
        self.line.append(done)
        await done
        self.held -= is_heldout
        self.made[is_heldout] += 1
        return answer(draft, [seed % 2], [-0.5], [(0, self.now)])


def train(made, paths, engine, train_s, ends):
    lag = made.schedule.max_staleness
    with Sequencer(paths.bus, prompts_per_step=P, position=None, max_staleness=lag) as sequencer:
        for step in range(1, STEPS + 1):
            sequencer.next_portion(step, timeout_s=120)
            time.sleep(train_s)
            engine.now = step
            sequencer.advance(step=step, policy_version=step)
            ends.append(time.monotonic())
        sequencer.finish()


def kinds(ends, under_way):
    """Seconds of the steps without an evaluation, and of those with one throughout."""
    found = {False: [], True: []}
    for begin, end in itertools.pairwise(ends[3:]):
        beside = sum(
            max(0.0, min(b, end) - max(a, begin)) for a, b, is_there in under_way if is_there
        )
        if not 0.05 < (part := beside / (end - begin)) < 0.95:
            found[part > 0.5].append(end - begin)
    return found[False], found[True]


async def run(folder, case):
    made = config(
        run_root=folder, schedule__num_steps=STEPS, schedule__prompts_per_step=P,
        schedule__max_staleness=case.lag, rollout__samples_per_prompt=SIBLINGS,
        rollout__groups_per_shard=4, eval__heldout__every=EVERY,
        engines={"rollout": {"max_running_requests": case.places}},
    )  # fmt: skip
    paths, engine, ends = RunPaths(made.run_dir), Engine(case.places, case.sample_s), []
    layout.create(paths.bus, ["rollout-0"], {})
    trainer = threading.Thread(target=train, args=(made, paths, engine, case.train_s, ends))
    trainer.daemon = True
    trainer.start()
    judged = episodes(made, engine, lambda response, sample: float(response[0]))
    heldout = [Prompt(n, [7], "1") for n in range(case.heldout)]
    evaluator = Evaluator(made, {"heldout": heldout}, judged, Events(), Board())
    work = asyncio.create_task(engine.work())
    with Folders.open(paths.bus, 0, 1, {}) as folders:
        credits = CreditTail(paths.bus, every_s=CREDITS_EVERY_S)
        await rollout.run(
            made, engine, Grouper(made, Prompts(), judged), evaluator, folders, credits, Events(),
        )  # fmt: skip
    work.cancel()
    trainer.join()
    return kinds(ends, engine.under_way)


def main():
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            without, beside = asyncio.run(run(folder, case))
        ratio = statistics.median(beside) / statistics.median(without)
        beyond = ratio * (1 - case.share)
        print(
            f"{case.name}: {len(without)} steps without {statistics.median(without):.3f} s "
            f"({min(without):.3f} to {max(without):.3f}), {len(beside)} beside "
            f"{statistics.median(beside):.3f} s ({min(beside):.3f} to {max(beside):.3f}): "
            f"{ratio:.3f}, beyond its share {beyond:.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
