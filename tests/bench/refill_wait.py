"""The trainer's wait for batches, with groups that are refilled and without.

PYTHONPATH=.:tests/unit:tests/unit/roles python tests/bench/refill_wait.py

Rollout's loop, bus, sequencer and lookout are the real ones; engines and training are sleeps, so
that what is measured is the protocol. Two groups of five have no spread.
"""

import asyncio
import heapq
import tempfile
import threading
import time

from episode_fakes import Board, answer, episodes
from role_fakes import Events, config

from relax_hpc.bus import layout
from relax_hpc.bus.credits import CreditTail
from relax_hpc.bus.plan import read_chain
from relax_hpc.bus.sequencer import Sequencer
from relax_hpc.paths import RunPaths
from relax_hpc.prompts.source import Prompt
from relax_hpc.roles.actor.lookout import Lookout
from relax_hpc.roles.dealing.judging import judge_of
from relax_hpc.roles.rollout import loop as rollout
from relax_hpc.roles.rollout.build import credits_every_s
from relax_hpc.roles.rollout.episodes import Grouper, seed_of
from relax_hpc.roles.rollout.evaluation import Evaluator
from relax_hpc.roles.rollout.folders import Folders

P, STEPS, SIBLINGS = 16, 10, 2
TRAIN_S, SAMPLE_S, PLACES = 4.0, 1.0, 20
"""A step; a response; responses at a time: 10 groups a second where 4 or 6.7 are needed."""


class Prompts:
    async def asked(self, guid):
        return Prompt(guid, [7], str(int(guid % 5 < 2)))


class Engines:
    def __init__(self):
        self.now, self.places = 0, asyncio.Semaphore(PLACES)

    async def version(self):
        return self.now

    async def sample(self, given, draft, how, *, seed, homes):
        async with self.places:
            await asyncio.sleep(SAMPLE_S)
        first = seed == seed_of(0, homes[1], 0)
        return answer(draft, [int(first)], [-0.5], [(0, self.now)])


def score(response, sample):
    return 1.0 if sample.answer == "1" else float(response[0])


def train(made, paths, engines, waits):
    judge = judge_of(made)
    lag = made.schedule.max_staleness
    with Sequencer(
        paths.bus, prompts_per_step=P, position=None, max_staleness=lag, judge=judge
    ) as sequencer:
        lookout = Lookout(sequencer) if judge else None
        for step in range(1, STEPS + 1):
            begun = time.perf_counter()
            sequencer.next_portion(step, timeout_s=60)
            waits.append(time.perf_counter() - begun)
            time.sleep(TRAIN_S)
            engines.now = step
            sequencer.advance(step=step, policy_version=step)
        if lookout:
            lookout.close()
        sequencer.finish()


async def run(folder, groups, lag):
    made = config(
        run_root=folder, algorithm__groups__name=groups, schedule__num_steps=STEPS,
        schedule__prompts_per_step=P, schedule__max_staleness=lag,
        rollout__samples_per_prompt=SIBLINGS, rollout__groups_per_shard=4,
    )  # fmt: skip
    paths, engines, waits = RunPaths(made.run_dir), Engines(), []
    layout.create(paths.bus, ["rollout-0"], {})
    trainer = threading.Thread(target=train, args=(made, paths, engines, waits), daemon=True)
    trainer.start()
    judged = episodes(made, engines, score)
    evaluator = Evaluator(made, {"heldout": []}, judged, Events(), Board())
    with Folders.open(paths.bus, 0, 1, {}) as folders:
        credits = CreditTail(paths.bus, every_s=credits_every_s(made))
        await rollout.run(
            made, engines, Grouper(made, Prompts(), judged), evaluator, folders, credits, Events(),
        )  # fmt: skip
    trainer.join()
    chain = read_chain(paths.bus)
    assert [len(step.guids) for step in chain.steps] == [P] * STEPS
    return waits, len(chain.skipped)


def least_wait(lag):
    """[STEPS] wait where nothing but sampling takes time: looks, logs and credits are instant.

    A batch starts when the policy that may sample it is there; whether a group has a successor is
    known when it is sampled.
    """
    there, trained, guid, waits = [0.0], 0.0, 0, []
    free = [0.0] * (PLACES // SIBLINGS)
    for step in range(1, STEPS + 1):
        may_start, teach = [there[max(step - 1 - lag, 0)]] * P, []
        while may_start:
            done = max(heapq.heappop(may_start), heapq.heappop(free)) + SAMPLE_S
            heapq.heappush(free, done)
            if guid % 5 < 2:
                heapq.heappush(may_start, done)
            else:
                teach.append(done)
            guid += 1
        waits.append(max(max(teach) - trained, 0.0))
        trained += waits[-1] + TRAIN_S
        there.append(trained)
    return waits


def main():
    for lag in (0, 1, 2):
        for groups in ("as_sampled", "refill"):
            with tempfile.TemporaryDirectory() as folder:
                waits, skipped = asyncio.run(run(folder, groups, lag))
            later = sorted(waits[1:])
            print(
                f"lag {lag} {groups:10}: {P} groups in each of {STEPS} steps, {skipped} skipped; "
                f"wait of step 1 {waits[0]:.2f} s, of the others {sum(later) / len(later):.2f} s "
                f"on average, {later[-1]:.2f} s at most"
                + (
                    f"; without latency {sum(least_wait(lag)[1:]) / len(later):.2f} s"
                    * bool(skipped)
                )
            )


if __name__ == "__main__":
    main()
