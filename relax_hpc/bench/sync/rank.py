"""One rank of the trainer of `bench.sync`."""

import asyncio
import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from relax_hpc.bench.ranks import joined
from relax_hpc.bench.sync.figures import Gap, Update, progress
from relax_hpc.bench.sync.task import ATTEMPT, LOGPROB_VERSIONS, Task
from relax_hpc.comm.world import World
from relax_hpc.engines.client import EngineClient
from relax_hpc.engines.generation import GenerationClient
from relax_hpc.engines.megatron.scorer import MegatronScorer
from relax_hpc.engines.response import Generation, Sampling
from relax_hpc.fleet import members
from relax_hpc.fleet.members import Member
from relax_hpc.fleet.register import Register
from relax_hpc.records import write_json
from relax_hpc.roles.actor.publishing import Publishing
from relax_hpc.run_secret import RunSecret
from relax_hpc.schema import Trajectory
from relax_hpc.weights.publish import Published, Publisher
from relax_hpc.weights.ranks import TrainerRanks
from relax_hpc.weights.sleep import Sleep
from relax_hpc.weights.transport import call_timeout_s

_SAMPLES, _PROMPT, _RESPONSE = 32, 64, 192
_STEP = 1 + 2.0**-6
"""Each version's weights are the last one's times it or its inverse: enough for 16 bits to move."""


def run(rank: int, task: Task) -> None:
    """Publishes all versions; rank 0 writes what it found."""
    logging.basicConfig(level=logging.WARNING)
    rendezvous = task.paths.rendezvous("trainer")
    world, device = joined(rank, task.num_ranks, rendezvous, task.paths.secret)
    has_weights = any(task.config.model.path.glob("*.safetensors"))
    scorer = MegatronScorer(
        task.config.model, task.config.actor, world, device,
        seed=task.config.seed, temperature=task.config.temperature, random_weights=not has_weights,
    )  # fmt: skip
    ranks, publisher, sleep = _parts(task, world, scorer, device)
    updates, gaps, equal = list[Update](), list[Gap](), True
    for version in range(task.updates + 1):
        check = version in (0, task.updates)
        nap, began = _put_to_sleep(sleep, device) if sleep and version else _Nap(), time.time()
        if done := _publish(scorer, ranks, publisher, version, check=check):
            updates.append(_update_of(done, began, nap))
            equal = equal and (done.verified is None or done.verified.equal)
            _say(updates[-1])
        if task.compare_logprobs and version in LOGPROB_VERSIONS:
            gaps.append(_compare(task, world, scorer, version))
            if publisher:
                _say(gaps[-1])
        _change(scorer, _STEP if version % 2 else 1 / _STEP)
        time.sleep(task.every_s)  # so that engines are at work again
    if publisher:
        write_json(task.results, {
            "updates": [asdict(update) for update in updates],
            "gaps": [asdict(gap) for gap in gaps],
            "equal": equal,
        })  # fmt: skip
        publisher.close()
    dist.barrier()
    dist.destroy_process_group()


def _parts(
    task: Task, world: World, scorer: MegatronScorer, device: torch.device
) -> tuple[TrainerRanks, Publisher | None, Sleep | None]:
    """Builds this rank's parts of a publication; collective."""
    weights = task.config.weights
    publishing = Publishing(
        weights, world, scorer, device, folder=task.paths.weights,
        source=task.config.model.path, shares_gpus=task.is_colocated,
    )  # fmt: skip
    if world.rank:
        return publishing.ranks, None, None
    register = Register(
        task.paths,
        lambda: task.config.producers,
        lambda member: EngineClient(
            member.url, _token(task, member), timeout_s=call_timeout_s(weights.timeout_s)
        ),
    )
    publisher = publishing.publisher(register, waits_for_loads=True)
    if not task.is_colocated:
        return publishing.ranks, publisher, None
    return publishing.ranks, publisher, Sleep(register, ATTEMPT, timeout_s=60, start_timeout_s=60)


class _Nap(NamedTuple):
    """One falling asleep of the engines."""

    seconds: float = 0.0
    free_gib: tuple[float, float] | None = None
    """Free memory of the first GPU before and after."""


def _put_to_sleep(sleep: Sleep, device: torch.device) -> _Nap:
    start, before = time.perf_counter(), _free_gib(device)
    sleep.fall_asleep()
    seconds = time.perf_counter() - start
    nap = _Nap(seconds, (before, _free_gib(device)))
    sleep.wake()
    return nap


def _free_gib(device: torch.device) -> float:
    return torch.cuda.mem_get_info(device)[0] / 2**30 if device.type == "cuda" else 0.0


def _publish(
    scorer: MegatronScorer,
    ranks: TrainerRanks,
    publisher: Publisher | None,
    version: int,
    *,
    check: bool,
) -> Published | None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()
    tensors = scorer.named_weights()
    if publisher:
        return publisher.publish(version, tensors, check=check)
    ranks.publish(version, tensors)
    return None


@torch.no_grad()
def _change(scorer: MegatronScorer, factor: float) -> None:
    for parameter in scorer.parameters():
        parameter.mul_(factor)


def _say(found: Update | Gap) -> None:
    """Tells it at once: the rest may be cut off."""
    sys.stderr.write(progress(found) + "\n")


def _update_of(published: Published, began: float, nap: _Nap) -> Update:
    parts = dict(published.seconds)
    total = parts.pop("total")
    return Update(
        published.version, published.num_bytes, published.pause_seconds, total, parts, began, *nap
    )


def _compare(task: Task, world: World, scorer: MegatronScorer, version: int) -> Gap:
    """Samples from the first engine, scores with the trainer; collective."""
    found = None
    if world.rank == 0:
        [member] = members.follow(task.paths).get(*task.config.producers[:1])
        assert member
        found = asyncio.run(_sample(task, member))
    rows = [_trajectory(*pair) for pair in world.bcast(found)]
    budget = task.config.actor.tokens_per_micro_batch // (_PROMPT + _RESPONSE)
    batches = [
        list(range(first, min(first + budget, len(rows)))) for first in range(0, len(rows), budget)
    ]
    scored = scorer.forward_logprobs(rows, batches)
    pairs = [
        (
            logprobs[row.prompt_len :],
            row.columns["rollout_logprobs"][row.prompt_len :].astype(np.float32),
        )
        for logprobs, row in zip(scored, rows, strict=True)
    ]
    gap = np.concatenate([ours.astype(np.float64) - theirs for ours, theirs in pairs])
    k3 = float(np.mean(np.expm1(gap) - gap))
    size = np.abs(gap)
    return Gap(version, len(gap), float(size.mean()), float(size.max()), k3)


def _token(task: Task, member: Member) -> str:
    return RunSecret.read(task.paths.secret).engine_token(member.id, member.start)


async def _sample(task: Task, member: Member) -> list[tuple[list[int], Generation]]:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 300, _PROMPT).tolist() for _ in range(_SAMPLES)]
    async with GenerationClient(member.url, _token(task, member)) as client:
        sampled = await asyncio.gather(
            *(
                client.sample(prompt, seed, Sampling(1.0, _RESPONSE, ignore_eos=True))
                for seed, prompt in enumerate(prompts)
            )
        )
    return list(zip(prompts, sampled, strict=True))


def _trajectory(prompt: Sequence[int], sampled: Generation) -> Trajectory:
    zeros = np.zeros(len(prompt))
    return Trajectory(
        guid=0,
        sibling=0,
        prompt_index=0,
        seed=0,
        token_ids=np.array([*prompt, *sampled.token_ids], np.int32),
        prompt_len=len(prompt),
        loss_mask=np.concatenate([zeros, np.ones(len(sampled.token_ids))]).astype(np.uint8),
        columns={"rollout_logprobs": np.concatenate([zeros, sampled.logprobs]).astype(np.float32)},
        version_runs=np.array(sampled.version_runs, np.int32).reshape(-1, 2),
        finish=sampled.finish,
        reward=0.0,
    )
