"""The rollout role: samples prompt groups, scores them, and stays within the staleness bound."""

import asyncio
import hashlib
import logging
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from relax_hpc.bus.credits import CreditTail
from relax_hpc.bus.durable import BusFullError
from relax_hpc.bus.producer import Producer
from relax_hpc.bus.staleness import may_start_batch
from relax_hpc.config.run import RunConfig
from relax_hpc.prompts.source import Prompt, PromptSource
from relax_hpc.roles.rollout.heldout import Board, Share
from relax_hpc.schema import FinishReason, PromptGroup, Trajectory
from relax_hpc.telemetry.events import EventWriter

log = logging.getLogger(__name__)

POLL_S = 0.05
READY_S = 1.0
"""A finished group waits no longer for others to fill its shard."""
FINAL_VERSION_S = 5.0
"""After the run's end, for the records to say that the engines hold the last policy."""
FULL_RETRY_S = 5.0
"""Between attempts to write to a full file system."""


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
    @property
    def routed_experts(self) -> npt.NDArray[np.int16] | None:
        """[prompt and response tokens, layers x experts per token], if asked for."""
        ...


class Sampler(Protocol):
    """What this role needs of an inference engine."""

    async def version(self) -> int | None:
        """The oldest policy that would sample now; None while there is no engine for it."""
        ...

    async def sample(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        *,
        temperature: float,
        min_version: int = 0,
        routed_experts: bool = False,
    ) -> Sequence[Sampled]:
        """One response per prompt and seed; temperature 0 is greedy.

        No policy older than `min_version` samples any of their tokens.
        """
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
    board: Board | None = None,
) -> None:
    """Samples every prompt ordinal this task owns, once, until the trainer says it is finished.

    Nothing is remembered outside the bus: what is committed is done, everything else is owed. So a
    task that is killed anywhere goes on where its log ends, with no prompt skipped or doubled.

    Args:
        board: where tasks add up what they score on the held-out prompts.
    """
    group = Grouper(config, prompts, sampler, score)
    evaluator = Evaluator(config, task, heldout, sampler, score, events, board)
    outbox = Outbox(producer, events, groups_per_shard=config.rollout.groups_per_shard)
    retired = credit.retired_guid_below if (credit := credits.latest()) else 0
    owed = deque(owned_guids(config, task, producer.committed, start=retired))
    pace = Pace(config)
    running = dict[asyncio.Task[PromptGroup], int]()
    while not ((credit := credits.latest()) and credit.finished):
        version = await sampler.version()
        await evaluator.maybe(version, trained=credit.step if credit else 0)
        owed.extendleft(reversed(producer.owe_again(credit.refill if credit else ())))
        while owed and not outbox.full and pace.may_start(owed[0], version):
            guid = owed.popleft()
            running[asyncio.create_task(group(guid, pace.min_version(guid, version)))] = guid
        done = await _some(running)
        outbox.add([task.result() for task in done])
        running = {started: guid for started, guid in running.items() if started not in done}
        producer.collect(credit.retired_guid_below if credit else 0)
        outbox.send(rest=pace.is_done(outbox.guids, running.values()))
    for unneeded in running:
        unneeded.cancel()
    await evaluator.finish(await _final_version(config, sampler))


async def _final_version(config: RunConfig, sampler: Sampler) -> int | None:
    """The last policy, once the records say that the engines hold it."""
    deadline = time.monotonic() + FINAL_VERSION_S
    while (version := await sampler.version()) is None and time.monotonic() < deadline:
        await asyncio.sleep(POLL_S)
    return version if version == config.schedule.num_steps else None  # started after the update


class Pace:
    """How far sampling may run ahead of training."""

    def __init__(self, config: RunConfig) -> None:
        self._max_staleness = config.schedule.max_staleness
        self._prompts_per_step = config.schedule.prompts_per_step
        self._spare = int(config.rollout.over_sampling * self._prompts_per_step)

    def may_start(self, guid: int, version: int | None) -> bool:
        """Whether a prompt group may be started with engines that hold `version`.

        Groups beyond the staleness bound are over-sampled: if one is ready before a straggler of
        the batch before, it takes its place there.
        """
        return version is not None and may_start_batch(
            max(guid - self._spare, 0) // self._prompts_per_step + 1,
            policy_version=version,
            max_staleness=self._max_staleness,
        )

    def min_version(self, guid: int, version: int | None) -> int:
        """The oldest policy that may sample a token of a group which starts with `version`."""
        bound = guid // self._prompts_per_step - self._max_staleness
        return max(min(bound, version or 0), 0)

    def is_done(self, ready: Iterable[int], running: Iterable[int]) -> bool:
        """Whether none of the running groups belongs to a batch of those that are ready."""
        last = max((guid // self._prompts_per_step for guid in ready), default=-1)
        return all(guid // self._prompts_per_step > last for guid in running)


def owned_guids(config: RunConfig, task: Task, committed: set[int], *, start: int) -> Iterator[int]:
    """Prompt ordinals of this task that are not committed yet, in order."""
    end = config.schedule.num_steps * config.schedule.prompts_per_step
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
        self._ready_since = self._retry_at = 0.0

    @property
    def full(self) -> bool:
        """Whether to start nothing new, because what is finished finds no space."""
        return self._retry_at > 0

    @property
    def guids(self) -> list[int]:
        """What is finished and not published yet."""
        return [group.guid for group in self._ready]

    def add(self, groups: Sequence[PromptGroup]) -> None:
        if groups and not self._ready:
            self._ready_since = time.monotonic()
        self._ready += groups

    def send(self, *, rest: bool) -> None:
        """Publishes what is enough for a shard, or has waited; with `rest`, whatever there is."""
        now = time.monotonic()
        waited = now - self._ready_since > READY_S
        enough = len(self._ready) >= self._groups_per_shard or rest or waited
        if not self._ready or not enough or now < self._retry_at:
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

    async def __call__(self, guid: int, min_version: int) -> PromptGroup:
        prompt = self._prompts[guid]
        siblings = range(self._config.rollout.samples_per_prompt)
        seeds = [seed_of(self._config.seed, guid, sibling) for sibling in siblings]
        sampled = await self._sampler.sample(
            [prompt.token_ids] * len(seeds),
            seeds,
            temperature=self._config.rollout.temperature,
            min_version=min_version,
            routed_experts=self._config.rollout.routed_experts,
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
            routed_experts=response.routed_experts,
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
        board: Board | None = None,
    ) -> None:
        self._every, self._board = config.eval.every, board
        self._share = heldout[task.rank :: task.size]
        self._sampler, self._score, self._events = sampler, score, events
        self._last: int | None = None

    async def maybe(self, version: int | None, *, trained: int) -> None:
        """Evaluates the first policy seen, and then one every `eval.every` versions.

        An engine that starts when steps have been `trained` holds the first policy only until it
        is brought up to date.
        """
        if version is None:
            return
        if self._last is None:
            if trained == 0:
                await self._evaluate("before", version)
            self._last = version
        elif self._every and version // self._every > self._last // self._every:
            self._last = version
            await self._evaluate("during", version)

    async def finish(self, version: int | None) -> None:
        if version is not None:
            await self._evaluate("after", version)

    async def _evaluate(self, when: str, version: int) -> None:
        tokens = [prompt.token_ids for prompt in self._share]
        responses = await self._sampler.sample(tokens, [0] * len(tokens), temperature=0.0)
        scores = [
            self._score(response.token_ids, prompt)
            for response, prompt in zip(responses, self._share, strict=True)
        ]
        self._events.emit(
            "eval", when=when, version=version, step=version, correct=sum(scores), count=len(scores)
        )
        if self._board:
            number = version // self._every if when == "during" else 0
            self._board.add(when, number, Share(version, sum(scores), len(scores)))


async def _some(
    running: Collection["asyncio.Task[PromptGroup]"],
) -> set["asyncio.Task[PromptGroup]"]:
    """Waits briefly for groups to finish; returns those that have."""
    if not running:
        await asyncio.sleep(POLL_S)
        return set()
    done, _ = await asyncio.wait(running, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
    return done
