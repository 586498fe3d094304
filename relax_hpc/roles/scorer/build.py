"""Builds a rank of a component that scores: its model, and the column that it writes."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from relax_hpc.bus.credits import CreditTail
from relax_hpc.bus.reader import Reader
from relax_hpc.bus.sidecar import SidecarWriter
from relax_hpc.comm.torch_group import init_torch, own_device
from relax_hpc.comm.world import World
from relax_hpc.config.layout import MegatronConfig
from relax_hpc.config.model import ModelConfig
from relax_hpc.config.run import RunConfig
from relax_hpc.engines.megatron.scorer import MegatronScorer
from relax_hpc.models.registry import read_architecture
from relax_hpc.paths import RunPaths
from relax_hpc.roles.context import TaskContext
from relax_hpc.roles.dealing.sight import sight_of
from relax_hpc.roles.scorer import loop
from relax_hpc.roles.scorer.rank0 import Rank0, View
from relax_hpc.schema import ROUTED_EXPERTS
from relax_hpc.telemetry.events import EventWriter
from relax_hpc.telemetry.timers import Timers

CREDITS_EVERY_S = 1.0
"""Time between looks at the credits: what to delete, and the end."""
COLUMN = "ragged/ref_logprobs"
"""Column of the reference."""


class Scoring(NamedTuple):
    """A model that scores, and the column that it writes."""

    model: ModelConfig
    megatron: MegatronConfig
    column: str
    view: View | None = None


def of_reference(config: RunConfig) -> Scoring:
    """The reference of a job."""
    return Scoring(config.reference_model, config.reference_megatron, COLUMN)


def main(
    config: RunConfig,
    scoring: Scoring,
    paths: RunPaths,
    world: World,
    context: TaskContext,
    events: EventWriter,
) -> None:
    """Scores what rollout commits until the trainer has finished."""
    device = own_device(context.local_rank, asked=context.gpus)
    starting = Timers()
    with starting("model"):
        init_torch(world, device="cuda" if device.type == "cuda" else "cpu")
        scorer = MegatronScorer(
            scoring.model, scoring.megatron, world, device,
            seed=config.seed, temperature=config.temperature,
        )  # fmt: skip
    reader = Reader(paths.bus)
    rank0 = None
    if world.rank == 0:
        events.emit("phases", step=0, phases=starting.phases)
        rank0 = _rank0(config, scoring, paths, context, reader, events)
    duties = rank0 or loop.OtherRank()
    loop.run(world, scorer, reader, duties, sight_of(config, reader), _columns(config, scoring))
    duties.close()
    reader.close()
    world.barrier()
    torch.distributed.destroy_process_group()


def _columns(config: RunConfig, scoring: Scoring) -> Sequence[str]:
    """Columns read besides tokens: the policy's experts, where the reference has as many.

    Else the policy and a reference that is its very copy would be apart.
    """
    if not config.replays_routing or scoring.column != COLUMN:
        return []
    policy, scorer = (read_architecture(model.path) for model in (config.model, scoring.model))
    alike = (policy.experts, policy.num_layers) == (scorer.experts, scorer.num_layers)
    return [ROUTED_EXPERTS] if alike else []


def _rank0(
    config: RunConfig,
    scoring: Scoring,
    paths: RunPaths,
    context: TaskContext,
    reader: Reader,
    events: EventWriter,
) -> Rank0:
    provenance: dict[str, str | int] = {
        "run": config.name,
        "job": context.attempt,
        "component": context.component,
        "start": context.start,
        "node": context.node,
        "model": str(scoring.model.path),
    }
    writer = SidecarWriter(paths.bus, context.name, provenance, compress=config.bus.compress)
    credits = CreditTail(paths.bus, num_steps=config.num_steps, every_s=CREDITS_EVERY_S)
    return Rank0(
        scoring.megatron, scoring.column, writer, reader, credits, events, view=scoring.view
    )
