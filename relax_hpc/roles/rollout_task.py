"""Builds a rollout task: one engine, its producer on the bus, and the loop between them."""

import asyncio
import time
from collections.abc import Coroutine, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Self

from relax_hpc.bus.credits import CreditTail
from relax_hpc.bus.producer import Producer
from relax_hpc.comm.context import TaskContext
from relax_hpc.config import RunConfig
from relax_hpc.engines.client import EngineClient
from relax_hpc.engines.generation import Generation, GenerationClient, Sampling
from relax_hpc.errors import EngineError, PeerTimeoutError
from relax_hpc.paths import RunPaths
from relax_hpc.prompts import tokenizer as tokenizers
from relax_hpc.prompts.source import Prompt, PromptSource
from relax_hpc.rewards.registry import REWARDS
from relax_hpc.roles import engine_parts, rollout
from relax_hpc.roles.engine_host import EngineHost
from relax_hpc.roles.engine_parts import Seat, seat_of
from relax_hpc.telemetry.events import EventWriter
from relax_hpc.weights import members
from relax_hpc.weights.members import Member
from relax_hpc.weights.roster import Roster

SPARES = 2
"""Shards that nobody needs any more, kept to be written over."""
SERVING_POLL_S = 0.5
NOTICE_S = 5.0
"""Within it the engine's host has seen that it died."""
CREDITS_EVERY_S = 1.0
"""They tell what to delete, what to sample again, and the end; pacing goes by the engine."""


def main(config: RunConfig, paths: RunPaths, context: TaskContext, events: EventWriter) -> None:
    """Keeps an engine, and samples with it until the trainer has finished."""
    seat = seat_of(config.rollout, context)
    if seat.part:
        engine_parts.serve(config, paths, context, seat, events)
    else:
        _host(config, paths, context, seat, events)
    events.emit("end")


def _host(
    config: RunConfig, paths: RunPaths, context: TaskContext, seat: Seat, events: EventWriter
) -> None:
    with EngineHost(config, paths, context, seat, events) as host:
        host.wait_until_healthy()
        with Producer(
            paths.bus,
            seat.id,
            _provenance(config, context),
            compress=config.bus.compress,
            spares=SPARES,
        ) as producer:
            asyncio.run(_while_hosted(host, _loop(config, paths, seat, producer, events)))


async def _while_hosted(host: EngineHost, loop: Coroutine[Any, Any, None]) -> None:
    """Runs the loop to its end; ends it if its engine does not come back."""
    running, failure = asyncio.ensure_future(loop), asyncio.ensure_future(host.failure())
    await asyncio.wait({running, failure}, return_when=asyncio.FIRST_COMPLETED)
    for task in (running, failure):
        if not task.done():
            task.cancel()
    # The loop may have failed because the engine did, so what the host says comes first.
    for outcome in await asyncio.gather(failure, running, return_exceptions=True):
        if isinstance(outcome, BaseException) and not isinstance(outcome, asyncio.CancelledError):
            raise outcome


async def _loop(
    config: RunConfig,
    paths: RunPaths,
    seat: Seat,
    producer: Producer,
    events: EventWriter,
) -> None:
    tokenizer = tokenizers.load(config.model.path)
    settings = config.prompts
    prompts, heldout = (
        PromptSource(
            path,
            tokenizer,
            shuffle_seed=seed,
            chat_template=settings.chat_template,
            max_prompt_tokens=settings.max_prompt_tokens,
        )
        for path, seed in ((settings.train, settings.shuffle_seed), (settings.heldout, None))
    )
    reward = REWARDS[config.reward.name]

    def score(response: Sequence[int], prompt: Prompt) -> float:
        return reward(tokenizer.decode(response, skip_special_tokens=True), prompt.answer)

    count = min(config.eval.num_prompts, len(heldout))
    async with EngineSampler(config, paths, seat.id, tokenizer.eos_token_id) as sampler:
        await rollout.run(
            config,
            rollout.Task(seat.number, config.rollout.num_engines),
            prompts,
            [heldout[index] for index in range(count)],
            sampler,
            score,
            producer,
            CreditTail(paths.bus, every_s=CREDITS_EVERY_S),
            events,
        )


class EngineSampler:
    """The clients of one engine, whichever start of it serves now."""

    def __init__(self, config: RunConfig, paths: RunPaths, member: str, stop_token: int) -> None:
        self._config, self._paths, self._id = config, paths, member
        self._stop_token = stop_token
        self._member: Member | None = None
        self._control: EngineClient | None = None
        self._client: GenerationClient | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._control:
            self._control.close()
        if self._client:
            self._client.close()

    def version(self) -> int:
        while True:
            member = self._serving()
            try:
                if self._control is None or self._member != member:
                    self._member = member
                    self._control = EngineClient(member.url, member.token)
                return self._control.version()
            except EngineError:
                if self._still_serves(member):
                    raise

    async def sample(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], *, temperature: float
    ) -> Sequence[Generation]:
        limit = self._config.rollout.max_new_tokens
        sampling = Sampling(temperature, limit, (self._stop_token,))
        while True:
            member = await asyncio.to_thread(self._serving)
            if self._client is None or self._client.url != member.url:
                self._client = GenerationClient(member.url, member.token)
            try:
                client = self._client
                return await asyncio.gather(
                    *(client.sample(p, s, sampling) for p, s in zip(prompts, seeds, strict=True))
                )
            except EngineError:
                if await asyncio.to_thread(self._still_serves, member):
                    raise

    def _serving(self) -> Member:
        """The member record, once it is of an engine with the newest weights.

        Raises:
            EngineError: the engine does not come back.
            PeerTimeoutError: the trainer gave it no weights.
        """
        deadline = time.monotonic() + self._config.launch.peer_timeout_s
        while True:
            member, roster = members.find(self._paths, self._id), Roster.read(self._paths)
            if member and member.state in ("FAILED", "GONE"):
                raise EngineError(f"engine {self._id} is {member.state}: {member.reason}")
            if member and member.state == "HEALTHY":
                if roster is None or roster.serves(member.id, member.epoch):
                    return member
                if time.monotonic() > deadline:
                    raise PeerTimeoutError(f"actor gave {self._id} no weights to sample with")
            else:
                deadline = time.monotonic() + self._config.launch.peer_timeout_s
            time.sleep(SERVING_POLL_S)

    def _still_serves(self, member: Member) -> bool:
        """Whether a request failed although its engine lives: the watcher needs a moment to see."""
        deadline = time.monotonic() + NOTICE_S
        while time.monotonic() < deadline:
            now = members.find(self._paths, self._id)
            if now is None or now.epoch != member.epoch or now.state != "HEALTHY":
                return False
            time.sleep(SERVING_POLL_S)
        return True


def _provenance(config: RunConfig, context: TaskContext) -> dict[str, str | int]:
    try:
        build = version(config.rollout.engine)
    except PackageNotFoundError:
        build = version("relax-hpc")
    return {
        "run": config.name,
        "job": context.attempt,
        "component": context.role,
        "rank": context.rank,
        "start": context.start,
        "node": context.node,
        "engine": f"{config.rollout.engine} {build}",
    }
