"""Builds a rollout task: one engine, its producer on the bus, and the loop between them."""

import asyncio
import secrets
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from relax_hpc.bus.credits import CreditTail
from relax_hpc.bus.producer import Producer
from relax_hpc.comm.context import TaskContext
from relax_hpc.comm.world import node_address
from relax_hpc.config import RolloutConfig, RunConfig
from relax_hpc.engines.client import EngineClient
from relax_hpc.engines.generation import Generation, GenerationClient
from relax_hpc.engines.process import EngineProcess, start_engine
from relax_hpc.paths import RunPaths
from relax_hpc.prompts import tokenizer as tokenizers
from relax_hpc.prompts.source import Prompt, PromptSource
from relax_hpc.rewards.registry import REWARDS
from relax_hpc.roles import rollout
from relax_hpc.telemetry.events import EventWriter
from relax_hpc.weights import members
from relax_hpc.weights.members import Member

SPARES = 2
"""Shards that nobody needs any more, kept to be written over."""
CREDITS_EVERY_S = 1.0
"""They tell what to delete, what to sample again, and the end; pacing goes by the engine."""


def main(config: RunConfig, paths: RunPaths, context: TaskContext, events: EventWriter) -> None:
    """Starts an engine, announces it, samples until the trainer has finished, stops the engine."""
    with start_engine(
        config.rollout.engine,
        config.model.path,
        host=node_address(),
        token=secrets.token_hex(16),
        rollout_config=_on_own_gpus(config.rollout, context),
        dtype=config.model.dtype,
        log_path=paths.log("engine", str(context.rank)),
        seed=config.seed + context.rank,
        python=None,
    ) as engine:
        member = _member(config, context, engine)
        members.announce(paths, member)
        events.emit("engine", url=engine.url, engine_pid=engine.pid, kind=config.rollout.engine)
        with Producer(
            paths.bus,
            context.name,
            _provenance(config, context),
            compress=config.bus.compress,
            spares=SPARES,
        ) as producer:
            asyncio.run(_loop(config, paths, context, engine, producer, events))
        members.announce(paths, member._replace(state="GONE"))
    events.emit("end")


async def _loop(
    config: RunConfig,
    paths: RunPaths,
    context: TaskContext,
    engine: EngineProcess,
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
    async with engine.generation_client() as client:
        await rollout.run(
            config,
            rollout.Task(context.rank, context.size),
            prompts,
            [heldout[index] for index in range(count)],
            EngineSampler(config, engine.client(), client, tokenizer.eos_token_id),
            score,
            producer,
            CreditTail(paths.bus, every_s=CREDITS_EVERY_S),
            events,
        )


class EngineSampler:
    """An engine's clients with the run's sampling settings filled in."""

    def __init__(
        self, config: RunConfig, control: EngineClient, client: GenerationClient, stop_token: int
    ) -> None:
        self._max_new_tokens = config.rollout.max_new_tokens
        self._control, self._client, self._stop_token = control, client, stop_token

    def version(self) -> int:
        return self._control.version()

    async def sample(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], *, temperature: float
    ) -> Sequence[Generation]:
        return await self._client.generate_batch(
            prompts,
            seeds,
            temperature=temperature,
            max_new_tokens=self._max_new_tokens,
            stop_token_ids=[self._stop_token],
        )


def _tp_size(rollout: RolloutConfig) -> int:
    return int(str(rollout.engine_args.get("tp_size", 1)))


def _on_own_gpus(rollout: RolloutConfig, context: TaskContext) -> RolloutConfig:
    """Engines of one node take its GPUs one after the other; Slurm shows each of them all."""
    if rollout.engine != "sglang" or not rollout.resources.gpus_per_node:
        return rollout
    first = {"base_gpu_id": context.local_rank * _tp_size(rollout)}
    return rollout.model_copy(update={"engine_args": first | rollout.engine_args})


def _member(config: RunConfig, context: TaskContext, engine: EngineProcess) -> Member:
    return Member(
        id=context.name,
        epoch=f"{context.attempt}-{context.start}",
        url=engine.url,
        token=engine.token,
        num_ranks=_tp_size(config.rollout),
        engine=config.rollout.engine,
        state="HEALTHY",
    )


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
