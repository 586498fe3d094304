"""Builds a rank of the reference component: a model that only scores, and a column it writes."""

import torch

from relax_hpc.bus.credits import CreditTail
from relax_hpc.bus.reader import Reader
from relax_hpc.bus.sidecar import SidecarWriter
from relax_hpc.comm.torch_group import init_torch, own_device
from relax_hpc.comm.world import World
from relax_hpc.config.run import RunConfig
from relax_hpc.engines.megatron.scorer import MegatronScorer
from relax_hpc.paths import RunPaths
from relax_hpc.roles.context import TaskContext
from relax_hpc.roles.scorer import loop
from relax_hpc.roles.scorer.rank0 import Rank0
from relax_hpc.telemetry.events import EventWriter

CREDITS_EVERY_S = 1.0
"""Time between looks at the credits: what to delete, and the end."""
COLUMN = "ragged/ref_logprobs"


def main(
    config: RunConfig, paths: RunPaths, world: World, context: TaskContext, events: EventWriter
) -> None:
    """Scores what rollout commits until the trainer has finished."""
    device = own_device(context.local_rank)
    init_torch(world, device="cuda" if device.type == "cuda" else "cpu")
    scorer = MegatronScorer(
        config.reference_model, config.reference_megatron, world, device,
        seed=config.seed, temperature=config.temperature,
    )  # fmt: skip
    reader = Reader(paths.bus)
    rank0 = _rank0(config, paths, context, reader, events) if world.rank == 0 else None
    duties = rank0 or loop.OtherRank()
    loop.run(world, scorer, reader, duties)
    duties.close()
    reader.close()
    world.barrier()
    torch.distributed.destroy_process_group()


def _rank0(
    config: RunConfig, paths: RunPaths, context: TaskContext, reader: Reader, events: EventWriter
) -> Rank0:
    provenance: dict[str, str | int] = {
        "run": config.name,
        "job": context.attempt,
        "component": context.component,
        "start": context.start,
        "node": context.node,
        "model": str(config.reference_model.path),
    }
    writer = SidecarWriter(paths.bus, context.name, provenance, compress=config.bus.compress)
    credits = CreditTail(paths.bus, every_s=CREDITS_EVERY_S)
    return Rank0(config.reference_megatron, COLUMN, writer, reader, credits, events)
