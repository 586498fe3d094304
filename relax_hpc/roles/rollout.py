"""The rollout role: samples prompt groups, scores them, and stays within the staleness bound."""

import asyncio
import hashlib
import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from relax_hpc.bus.credits import CreditTail
from relax_hpc.bus.durable import BusFullError
from relax_hpc.bus.producer import Producer
from relax_hpc.bus.staleness import may_start_batch
from relax_hpc.config import RunConfig
from relax_hpc.prompts.source import Prompt, PromptSource
from relax_hpc.schema import FinishReason, PromptGroup, Trajectory
from relax_hpc.telemetry.events import EventWriter

log = logging.getLogger(__name__)

POLL_S = 0.05
FULL_RETRY_S = 5.0
"""Between attempts to write to a full file system."""
EVAL_BATCH = 64
"""Held-out prompts per request."""


class Sampled(Protocol):
    """What an engine made of one prompt."""

    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def logprobs(self) -> Sequence[float]: ...
    @property
    def version_runs(self) -> Sequence[tuple[int, int]]: ...
    @property
    def finish(self) -> FinishReason: ...


class Sampler(Protocol):
    """What this role needs of an inference engine."""

    def version(self) -> int: ...

    async def sample(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], *, temperature: float
    ) -> Sequence[Sampled]:
        """One response per prompt and seed; temperature 0 is greedy."""
        ...


class Score(Protocol):
    """The reward of a response to a prompt."""

    def __call__(self, response: Sequence[int], prompt: Prompt) -> float: ...


class Task(NamedTuple):
    """One rollout task's share of the work: prompt ordinals and held-out lines, by rank."""

    rank: int
    size: int


async def run(
    config: RunConfig,
    task: Task,
    prompts: PromptSource,
    heldout: Sequence[Prompt],
    sampler: Sampler,
    score: Score,
    producer: Producer,
    credits: CreditTail,
    events: EventWriter,
) -> None:
    """Samples every prompt ordinal this task owns, once, until the trainer says it is finished.

    Nothing is remembered outside the bus: what is committed is done, everything else is owed. So a
    task that is killed anywhere goes on where its log ends, with no prompt skipped or doubled.
    """
    group = Grouper(config, prompts, sampler, score)
    evaluator = Evaluator(config, task, heldout, sampler, score, events)
    outbox = Outbox(producer, events, groups_per_shard=config.rollout.groups_per_shard)
    retired = credit.retired_guid_below if (credit := credits.latest()) else 0
    owed = deque(owned_guids(config, task, producer.committed, start=retired))
    running = set[asyncio.Task[PromptGroup]]()
    while not ((credit := credits.latest()) and credit.finished):
        version = await asyncio.to_thread(sampler.version)
        await evaluator.maybe(version, trained=credit.step if credit else 0)
        owed.extendleft(reversed(producer.owe_again(credit.refill if credit else ())))
        while owed and not outbox.full and _may_start(config, owed[0], version):
            running.add(asyncio.create_task(group(owed.popleft())))
        done, running = await _some(running)
        outbox.add([task.result() for task in done])
        producer.collect(credit.retired_guid_below if credit else 0)
        outbox.send(rest=not running)
    version = await asyncio.to_thread(sampler.version)
    if version == config.algorithm.num_steps:  # else this engine started after the last update
        await evaluator.finish(version)


def owned_guids(config: RunConfig, task: Task, committed: set[int], *, start: int) -> Iterator[int]:
    """Prompt ordinals of this task that are not committed yet, in order."""
    end = config.algorithm.num_steps * config.algorithm.prompts_per_step
    first = start + (task.rank - start) % task.size
    return (guid for guid in range(first, end, task.size) if guid not in committed)


def seed_of(run_seed: int, guid: int, sibling: int) -> int:
    """The sampling seed of one trajectory: the same after every restart, below 2**31."""
    content = f"{run_seed}/{guid}/{sibling}".encode()
    return int.from_bytes(hashlib.sha256(content).digest()[:4], "big") >> 1


class Outbox:
    """Finished groups on their way to the bus. A full file system holds them up; it loses none."""

    def __init__(self, producer: Producer, events: EventWriter, *, groups_per_shard: int) -> None:
        self._producer, self._events = producer, events
        self._groups_per_shard = groups_per_shard
        self._ready: list[PromptGroup] = []
        self._retry_at = 0.0

    @property
    def full(self) -> bool:
        """Whether to start nothing new, because what is finished finds no space."""
        return self._retry_at > 0

    def add(self, groups: Sequence[PromptGroup]) -> None:
        self._ready += groups

    def send(self, *, rest: bool) -> None:
        """Publishes what is enough for a shard, or with `rest`, whatever there is."""
        enough = len(self._ready) >= self._groups_per_shard or (rest and self._ready)
        if not enough or time.monotonic() < self._retry_at:
            return
        try:
            publish(self._producer, self._ready, self._events)
        except BusFullError as error:
            log.warning("%s; trying again every %g s", error, FULL_RETRY_S)
            self._retry_at = time.monotonic() + FULL_RETRY_S
            return
        self._ready, self._retry_at = [], 0.0


def publish(producer: Producer, groups: Sequence[PromptGroup], events: EventWriter) -> None:
    """Commits finished groups as one shard and says so."""
    producer.put(groups)
    rows = [row for group in groups for row in group.trajectories]
    events.emit(
        "shard",
        first_guid=min(group.guid for group in groups),
        num_groups=len(groups),
        num_trajectories=len(rows),
        num_tokens=sum(len(row.token_ids) for row in rows),
        policy_version_min=min(row.policy_version_min for row in rows),
        policy_version_max=max(row.policy_version_max for row in rows),
        **{"reward/mean": float(np.mean([row.reward for row in rows]))},
    )


class Grouper:
    """Turns a prompt ordinal into a finished prompt group."""

    def __init__(
        self, config: RunConfig, prompts: PromptSource, sampler: Sampler, score: Score
    ) -> None:
        self._config, self._prompts = config, prompts
        self._sampler, self._score = sampler, score

    async def __call__(self, guid: int) -> PromptGroup:
        prompt = self._prompts[guid]
        siblings = range(self._config.rollout.samples_per_prompt)
        seeds = [seed_of(self._config.seed, guid, sibling) for sibling in siblings]
        sampled = await self._sampler.sample(
            [prompt.token_ids] * len(seeds), seeds, temperature=self._config.rollout.temperature
        )
        rows = [
            self._trajectory(guid, sibling, prompt, seed, response)
            for sibling, seed, response in zip(siblings, seeds, sampled, strict=True)
        ]
        return PromptGroup(guid, rows)

    def _trajectory(
        self, guid: int, sibling: int, prompt: Prompt, seed: int, response: Sampled
    ) -> Trajectory:
        given, sampled = len(prompt.token_ids), len(response.token_ids)
        zeros = np.zeros(given)
        runs = [(given + first, version) for first, version in response.version_runs]
        return Trajectory(
            guid=guid,
            sibling=sibling,
            prompt_index=prompt.index,
            seed=seed,
            token_ids=np.array([*prompt.token_ids, *response.token_ids], dtype=np.int32),
            prompt_len=given,
            loss_mask=np.concatenate([zeros, np.ones(sampled)]).astype(np.uint8),
            rollout_logprobs=np.concatenate([zeros, response.logprobs]).astype(np.float32),
            version_runs=np.array(runs, dtype=np.int32).reshape(-1, 2),
            finish=response.finish,
            reward=self._score(response.token_ids, prompt),
        )


class Evaluator:
    """Scores this task's share of the held-out prompts: before, now and then, and after."""

    def __init__(
        self,
        config: RunConfig,
        task: Task,
        heldout: Sequence[Prompt],
        sampler: Sampler,
        score: Score,
        events: EventWriter,
    ) -> None:
        self._every = config.eval.every
        self._share = heldout[task.rank :: task.size]
        self._sampler, self._score, self._events = sampler, score, events
        self._last: int | None = None

    async def maybe(self, version: int, *, trained: int) -> None:
        """Evaluates the first policy seen, and then one every `eval.every` versions.

        An engine that starts when steps have been `trained` holds the first policy only until it
        is brought up to date.
        """
        if self._last is None:
            if trained == 0:
                await self._evaluate("before", version)
            self._last = version
        elif self._every and version // self._every > self._last // self._every:
            self._last = version
            await self._evaluate("during", version)

    async def finish(self, version: int) -> None:
        await self._evaluate("after", version)

    async def _evaluate(self, when: str, version: int) -> None:
        async def correct(prompts: Sequence[Prompt]) -> list[float]:
            tokens = [prompt.token_ids for prompt in prompts]
            responses = await self._sampler.sample(tokens, [0] * len(tokens), temperature=0.0)
            return [
                self._score(response.token_ids, prompt)
                for response, prompt in zip(responses, prompts, strict=True)
            ]

        batches = [self._share[i : i + EVAL_BATCH] for i in range(0, len(self._share), EVAL_BATCH)]
        scores = sum(await asyncio.gather(*map(correct, batches)), start=list[float]())
        self._events.emit(
            "eval", when=when, version=version, step=version, correct=sum(scores), count=len(scores)
        )
        log.info("held-out %s, policy %d: %.3f", when, version, float(np.mean(scores or [0])))


def _may_start(config: RunConfig, guid: int, version: int) -> bool:
    batch = guid // config.algorithm.prompts_per_step + 1
    return may_start_batch(
        batch, policy_version=version, max_staleness=config.algorithm.max_staleness
    )


async def _some(
    running: set["asyncio.Task[PromptGroup]"],
) -> tuple[set["asyncio.Task[PromptGroup]"], set["asyncio.Task[PromptGroup]"]]:
    """Waits briefly for groups to finish: (finished, still running)."""
    if not running:
        await asyncio.sleep(POLL_S)
        return set(), running
    return await asyncio.wait(running, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
