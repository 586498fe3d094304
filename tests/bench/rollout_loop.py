"""The cost of the rollout loop itself: its CPU time per sample against another tree's, and scoring.

    git worktree add /tmp/before 3adf100
    python tests/bench/rollout_loop.py --before /tmp/before [--repeats 25]

Everything between a prompt's ordinal and the row that a producer is given is the program's own;
engines answer at once, a response's text and reward are constants, and shards are thrown away.
Either tree has a process of its own, which is asked for a round when it is its turn. The tree
before is 3adf100 or one of before, or one whose loop is given folders.

Scoring in worker processes is measured apart: see `_scoring`.
"""

import argparse
import asyncio
import gc
import itertools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import psutil

import relax_hpc

SIBLINGS, PROMPTS_PER_STEP, STEPS = 8, 64, 6
"""1,024 samples in flight at most."""
LENGTHS = {"16 + 16": (16, 16), "128 + 256": (128, 256), "512 + 2,048": (512, 2048)}
"""Tokens of prompts and responses."""
GROUPS, GROUPS_AT_ONCE = 512, 64
TREE = Path(relax_hpc.__path__[0])


class Engine:
    """In place of a GenerationClient: every request has its response at the next turn."""

    num_tokens, heard_version, heard_at = 0, -1, 0.0

    def __init__(self, producer: "Producer", num_tokens: int) -> None:
        self.producer, self.answer = producer, ([7] * num_tokens, [-0.5] * num_tokens)

    async def version(self) -> int:
        return self.producer.steps

    async def sample(self, *_: object, draft: Any, **__: object) -> Any:
        from relax_hpc.schema import FinishReason

        await asyncio.sleep(0)
        draft.take(*self.answer)
        self.heard_version, self.heard_at = self.producer.steps, time.monotonic()
        draft.mark(0, self.heard_version)
        return draft.finished(FinishReason.STOP)


class Producer:
    """Throws groups away; training takes no time."""

    committed = frozenset[int]()
    num_groups = 0

    @property
    def steps(self) -> int:
        return self.num_groups // PROMPTS_PER_STEP

    def owed(self, *, start: int) -> Iterator[int]:
        return itertools.count(start)

    def owe_again(self, _again: object) -> list[int]:
        return []

    def collect(self, _retired: int) -> None:
        pass

    def lots(self, groups: Sequence[object]) -> list[Sequence[object]]:
        return [groups]

    def put(self, groups: Sequence[object]) -> None:
        self.num_groups += len(groups)

    def latest(self) -> Any:
        """As a CreditTail."""
        from relax_hpc.bus.credits import Credit

        step = self.steps
        return Credit(step=step, policy_version=step, finished=step >= STEPS)


class Silent:
    """In place of an EventWriter."""

    def emit(self, *_: object, **__: object) -> None:
        pass


class Constant:
    """In place of a tokenizer."""

    def decode(self, _token_ids: Sequence[int], **_: object) -> str:
        return "7"


class Prompts(list[Any]):
    """Prompts as the loops of both trees take them."""

    async def asked(self, ordinal: int) -> Any:
        return self[ordinal]


class Parts(NamedTuple):
    """The parts of the loops of both trees."""

    config: Any
    producer: Producer
    prompts: Prompts
    pool: Any


def _parts(num_given: int, num_sampled: int, steps: str, **further: Any) -> Parts:
    from relax_hpc import job_file
    from relax_hpc.engines.pool import Pool
    from relax_hpc.engines.pool_engine import Endpoint
    from relax_hpc.prompts.source import Prompt

    tree = {
        "name": "bench",
        "model": {"path": "m"},
        "prompts": {"train": "t", **further},
        "rollout": {"samples_per_prompt": SIBLINGS},
        steps: {"num_steps": STEPS, "prompts_per_step": PROMPTS_PER_STEP},
    }
    prompts = Prompts(
        Prompt(number, [3, 4, number, *[6] * (num_given - 3)], "7")
        for number in range(STEPS * PROMPTS_PER_STEP)
    )
    producer = Producer()
    most = SIBLINGS * PROMPTS_PER_STEP
    pool = Pool(lambda _: Engine(producer, num_sampled), max_in_flight=most, patience_s=60)
    ends = [Endpoint(name, "0", "http://nowhere", "t") for name in "ab"]
    pool.enlist(dict.fromkeys(ends, "serving"))
    return Parts(job_file.validate(tree, source="bench"), producer, prompts, pool)


async def _before_episodes(num_given: int, num_sampled: int) -> None:
    """At 3adf100, where the loop itself knew what a response is."""
    from relax_hpc.paths import RunPaths
    from relax_hpc.roles import rollout, routing

    parts = _parts(num_given, num_sampled, "algorithm", heldout="h")
    with patch.object(routing.RunSecret, "read"):
        sampler = routing.EngineSampler(parts.config, RunPaths(Path()), [], 0, Silent())
    sampler._pool, tokenizer = parts.pool, Constant()

    def score(response: Sequence[int], _prompt: object) -> float:
        return float(tokenizer.decode(response, skip_special_tokens=True) == "7")

    task, producer = rollout.Task(0, 1), parts.producer
    await rollout.run(
        parts.config, task, parts.prompts, [], sampler, score, producer, producer, Silent()
    )


async def _episodes(num_given: int, num_sampled: int) -> None:
    from relax_hpc.environments.single_turn import SingleTurn
    from relax_hpc.paths import RunPaths
    from relax_hpc.rewards.contract import Score
    from relax_hpc.roles.rollout import loop
    from relax_hpc.roles.rollout.episodes import Episodes, Grouper
    from relax_hpc.roles.rollout.evaluation import Evaluator
    from relax_hpc.sampling import client

    config, producer, prompts, pool = _parts(num_given, num_sampled, "schedule")
    with patch.object(client.RunSecret, "read"):
        sampler = client.client_of(config, RunPaths(Path()), stop_token=0, own=[])
    sampler._pool, right, wrong = pool, Score(1.0), Score(0.0)

    async def score(group: Sequence[Any]) -> list[Score]:
        return [right if sample.response == "7" else wrong for sample in group]

    episodes = Episodes(config, SingleTurn(), sampler, Constant(), score, max_tokens=1 << 20)
    evaluator = Evaluator(config, {}, episodes, Silent(), None)
    grouper = Grouper(config, prompts, episodes)
    await loop.run(config, sampler, grouper, evaluator, producer, producer, Silent())


def _serve() -> None:
    """Says CPU seconds per sample for every line that names lengths."""
    # Not by importing it: an editable install of another tree would be found.
    run = _episodes if (TREE / "environments").exists() else _before_episodes
    for line in sys.stdin:
        gc.collect()
        begun = time.process_time()
        asyncio.run(run(*LENGTHS[line.strip()]))
        used = time.process_time() - begun
        print(used / (STEPS * PROMPTS_PER_STEP * SIBLINGS), flush=True)


def _start(tree: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, __file__, "--serve"],
        env=os.environ | {"PYTHONPATH": str(tree.absolute()), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _compare(before: Path, repeats: int) -> None:
    print("| tokens | before [µs] | now [µs] | before / now |\n|---|---|---|---|")
    workers = _start(before), _start(TREE.parent)

    def ask(worker: "subprocess.Popen[str]", lengths: str) -> float:
        print(lengths, file=worker.stdin, flush=True)
        return float(worker.stdout.readline()) * 1e6

    for lengths in LENGTHS:
        rounds = []
        for repeat in range(repeats + 1):
            turn = 1 if repeat % 2 else -1
            rounds.append([ask(worker, lengths) for worker in workers[::turn]][::turn])
        ratios = sorted(before / now for before, now in rounds[1:])
        middle = [statistics.median(of) for of in zip(*rounds[1:], strict=True)]
        print(
            f"| {lengths} | {middle[0]:.1f} | {middle[1]:.1f} | **{statistics.median(ratios):.3f}**"
            f" ({ratios[0]:.2f} to {ratios[-1]:.2f}) |",
            flush=True,
        )
    for worker in workers:
        worker.stdin.close()
        worker.wait()


async def _scoring(repeats: int) -> None:
    """Scores groups in worker processes, so many at once, with the reward of the demo.

    *Loop* is how long callbacks run per group, so how long nothing else gets on in the process;
    *longest* the longest of them; CPU is of all threads of it, and of the workers.
    """
    from relax_hpc.config.reward import RewardConfig
    from relax_hpc.rewards.contract import Sample
    from relax_hpc.rewards.functions.boxed_number import score
    from relax_hpc.rewards.scorer import Scorer

    group = [Sample(f"that is \\boxed{{{n}}} " + "so " * 250, "1+2=", "3") for n in range(SIBLINGS)]
    begun = time.perf_counter()
    for sample in group * 100:
        score(sample.response, sample.answer)
    print(f"in the loop instead: {(time.perf_counter() - begun) * 1e4:.0f} µs per group")
    print("| loop | longest | CPU | CPU of workers | (µs per group)\n|---|---|---|---|")
    async with Scorer(RewardConfig(name="boxed_number", workers=1)) as scorer:
        for _ in range(repeats):
            left = iter(range(GROUPS))

            async def ask(left: Any = left) -> None:
                for _ in left:
                    await scorer.score(group)

            before, begun = _cpu_of(scorer.pids), time.process_time()
            spans = await _timed(lambda: asyncio.gather(*(ask() for _ in range(GROUPS_AT_ONCE))))
            own, theirs = time.process_time() - begun, _cpu_of(scorer.pids) - before
            parts = sum(spans) / GROUPS, max(spans), own / GROUPS, theirs / GROUPS
            print("| " + " | ".join(f"{part * 1e6:.0f}" for part in parts) + " |", flush=True)


def _cpu_of(pids: Sequence[int]) -> float:
    tops = [psutil.Process(pid) for pid in pids]
    below = [child for top in tops for child in top.children()]  # that is who runs the reward
    return sum(sum(each.cpu_times()[:2]) for each in (*tops, *below))


async def _timed(work: Callable[[], Any]) -> list[float]:
    """How long every callback of the event loop ran meanwhile."""
    spans, plain = list[float](), asyncio.Handle._run

    def run(handle: asyncio.Handle) -> None:
        begun = time.perf_counter()
        plain(handle)
        spans.append(time.perf_counter() - begun)

    with patch.object(asyncio.Handle, "_run", run):
        await work()
    return spans


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--serve", action="store_true")
    options = parser.parse_args()
    if options.serve:
        _serve()
        return
    if options.before:
        _compare(options.before, options.repeats)
    asyncio.run(_scoring(min(options.repeats, 5)))


if __name__ == "__main__":
    main()
