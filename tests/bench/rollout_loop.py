"""CPU time of the rollout loop per sample, without engines, of several trees in turns.

    git worktree add /tmp/before 3adf100
    python tests/bench/rollout_loop.py --trees /tmp/before . [--repeats 9]

Everything between a prompt's ordinal and the row that a producer is given is the program's own;
engines answer at once, a response's text and reward are constants, and shards are thrown away.
Every tree has a process of its own, which is asked for a round when it is its turn.
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
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

SIBLINGS, PROMPTS_PER_STEP, STEPS = 8, 64, 6
"""1,024 samples in flight at most."""
LENGTHS = {"16 + 16": (16, 16), "128 + 256": (128, 256), "512 + 2,048": (512, 2048)}
"""Tokens of prompts and responses."""


class Engine:
    """In place of a GenerationClient: every request has its response at the next turn."""

    num_tokens, heard_version, heard_at = 0, -1, 0.0

    def __init__(self, producer: "Producer", num_tokens: int) -> None:
        self.producer = producer
        self.answer = [7] * num_tokens, [-0.5] * num_tokens

    async def version(self) -> int:
        return self.producer.steps

    async def sample(self, prompt: Any, seed: int, sampling: Any, **rest: Any) -> Any:  # noqa: ANN401
        from relax_hpc.schema import FinishReason

        draft = rest["draft"]
        await asyncio.sleep(0)
        draft.take(*self.answer)
        self.heard_version, self.heard_at = self.producer.steps, time.monotonic()
        draft.mark(0, self.heard_version)
        return draft.finished(FinishReason.STOP)

    def close(self) -> None:
        pass

    async def aclose(self) -> None:
        pass


class Producer:
    """Throws groups away; training takes no time."""

    committed = frozenset[int]()
    num_groups = 0

    @property
    def steps(self) -> int:
        return self.num_groups // PROMPTS_PER_STEP

    def owe_again(self, _refill: object) -> list[int]:
        return []

    def collect(self, _retired: int) -> None:
        pass

    def put(self, groups: Sequence[object]) -> None:
        self.num_groups += len(groups)

    def latest(self) -> Any:  # noqa: ANN401
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


def _sampler(config: Any, producer: Producer, lengths: tuple[int, int], routing: Any, new: bool) -> Any:  # noqa: ANN401
    from relax_hpc.engines.pool import Endpoint, Pool
    from relax_hpc.paths import RunPaths

    def connect(_: Endpoint) -> Any:  # noqa: ANN401
        return Engine(producer, lengths[1])

    with patch.object(routing.RunSecret, "read"):
        sampler = routing.EngineSampler(config, RunPaths(Path()), [], 0, Silent())
    sampler._pool = Pool(connect, max_in_flight=512, patience_s=60)
    ends = [Endpoint(name, "0", "http://nowhere", "t") for name in "ab"]
    sampler._pool.enlist(dict.fromkeys(ends, "serving"))
    return sampler


def _prompts(count: int, num_tokens: int) -> list[Any]:
    from relax_hpc.prompts.source import Prompt

    return [Prompt(n, [3, 4, 5, n, *[6] * (num_tokens - 4)], "7") for n in range(count)]


async def _before_episodes(lengths: tuple[int, int]) -> None:
    """Up to 3adf100, where the loop itself knew what a response is."""
    from relax_hpc import job_file
    from relax_hpc.roles import rollout, routing

    tree = {
        "name": "bench", "model": {"path": "m"}, "prompts": {"train": "t", "heldout": "h"},
        "rollout": {"samples_per_prompt": SIBLINGS},
        "algorithm": {"num_steps": STEPS, "prompts_per_step": PROMPTS_PER_STEP},
    }  # fmt: skip
    config, producer, tokenizer = job_file.validate(tree, source="bench"), Producer(), Constant()
    sampler = _sampler(config, producer, lengths, routing, False)

    def score(response: Sequence[int], _prompt: object) -> float:
        return float(tokenizer.decode(response, skip_special_tokens=True) == "7")

    prompts = _prompts(STEPS * PROMPTS_PER_STEP, lengths[0])
    await rollout.run(
        config, rollout.Task(0, 1), prompts, [], sampler, score, producer, producer, Silent()
    )  # type: ignore[call-arg]


async def _episodes(lengths: tuple[int, int]) -> None:
    from relax_hpc import job_file
    from relax_hpc.environments.single_turn import SingleTurn
    from relax_hpc.rewards.contract import Score
    from relax_hpc.roles.rollout import loop, routing
    from relax_hpc.roles.rollout.episodes import Episodes, Grouper
    from relax_hpc.roles.rollout.evaluation import Evaluator

    tree = {
        "name": "bench", "model": {"path": "m"}, "prompts": {"train": "t"},
        "rollout": {"samples_per_prompt": SIBLINGS},
        "schedule": {"num_steps": STEPS, "prompts_per_step": PROMPTS_PER_STEP},
    }  # fmt: skip
    config, producer = job_file.validate(tree, source="bench"), Producer()
    sampler = _sampler(config, producer, lengths, routing, True)

    right, wrong = Score(1.0), Score(0.0)

    async def score(group: Sequence[Any]) -> list[Score]:
        return [right if sample.response == "7" else wrong for sample in group]

    episodes = Episodes(
        config, SingleTurn(), sampler, Constant(), score, max_tokens=1 << 20
    )
    prompts = _prompts(STEPS * PROMPTS_PER_STEP, lengths[0])
    evaluator = Evaluator(config, {}, episodes, Silent(), None)
    await loop.run(
        config, loop.Task(0, 1), sampler, Grouper(config, prompts, episodes), evaluator,
        producer, producer, Silent(),
    )  # fmt: skip


def _serve() -> None:
    """Says CPU seconds per sample for every line that names lengths."""
    import relax_hpc

    # Not by importing it: an editable install of another tree would be found.
    has_episodes = (Path(relax_hpc.__path__[0]) / "environments").exists()
    run = _episodes if has_episodes else _before_episodes
    for line in sys.stdin:
        lengths = LENGTHS[line.strip()]
        gc.collect()
        begun = time.process_time()
        asyncio.run(run(lengths))
        used = time.process_time() - begun
        print(used / (STEPS * PROMPTS_PER_STEP * SIBLINGS), flush=True)


def _start(tree: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, __file__, "--serve"],
        env=os.environ | {"PYTHONPATH": str(tree.absolute()), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trees", type=Path, nargs="+")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--serve", action="store_true")
    options = parser.parse_args()
    if options.serve:
        return _serve()
    workers = {tree: _start(tree) for tree in options.trees}

    def ask(tree: Path, name: str) -> float:
        worker = workers[tree]
        print(name, file=worker.stdin, flush=True)
        return float(worker.stdout.readline())

    for name in LENGTHS:
        found = {tree: list[float]() for tree in workers}
        for repeat in range(options.repeats + 1):
            for tree in list(workers)[:: 1 if repeat % 2 else -1]:
                found[tree].append(ask(tree, name))
        first = found[options.trees[0]][1:]
        for tree, (_, *values) in found.items():
            ratios = sorted(old / new for old, new in zip(first, values, strict=True))
            print(f"{name:12} {tree!s:20} {statistics.median(values) * 1e6:7.1f} us (min {min(values)*1e6:.1f}), first / it "
                  f"{statistics.median(ratios):.3f} ({ratios[0]:.2f} to {ratios[-1]:.2f}), of minima {min(first)/min(values):.3f}", flush=True)
    for worker in workers.values():
        worker.stdin.close()
        worker.wait()


if __name__ == "__main__":
    main()
