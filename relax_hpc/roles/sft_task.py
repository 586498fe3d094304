"""Builds an actor rank of supervised fine-tuning: trainer, checkpoints, on rank 0 the lead."""

import torch

from relax_hpc.comm.torch_group import init_torch, own_device
from relax_hpc.comm.world import World
from relax_hpc.config.sft import SftRunConfig
from relax_hpc.engines.megatron.trainer import MegatronTrainer
from relax_hpc.paths import RunPaths
from relax_hpc.prompts import tokenizer as tokenizers
from relax_hpc.prompts.documents import Document, Documents
from relax_hpc.roles import saving, sft
from relax_hpc.roles.checkpoints import Checkpoint
from relax_hpc.roles.sft_lead import DataPosition, SftLead
from relax_hpc.telemetry.events import EventWriter


def main(
    config: SftRunConfig, paths: RunPaths, world: World, local_rank: int, events: EventWriter
) -> None:
    """Resumes from the newest checkpoint, if there is one, and trains to the end."""
    device = own_device(local_rank)
    init_torch(world, device="cuda" if device.type == "cuda" else "cpu")
    trainer = MegatronTrainer(config, world, device)
    checkpoints = saving.checkpoints_of(config, paths, world, DataPosition)
    resumed = saving.resume(checkpoints, trainer, events)
    lead = _lead(config, paths, resumed, events) if world.rank == 0 else None

    duties = saving.Lead(lambda: lead.position) if lead else None
    save = saving.Saving(config, paths, world, trainer, checkpoints, duties, events)
    sft.run(config, world, trainer, lead, save)
    if lead:
        events.emit("end")
    world.barrier()
    torch.distributed.destroy_process_group()


def _lead(
    config: SftRunConfig,
    paths: RunPaths,
    resumed: Checkpoint[DataPosition] | None,
    events: EventWriter,
) -> SftLead:
    tokenizer = tokenizers.load(config.model.path)
    documents = Documents(config.sft.train, tokenizer, config.sft)
    heldout: list[Document] = []
    if config.sft.heldout is not None:
        source = Documents(config.sft.heldout, tokenizer, config.sft)
        count = min(config.sft.heldout_documents, len(source))
        heldout = [source.document(line) for line in range(count)]
    position = resumed.position if resumed else None
    return SftLead(config, paths, documents, heldout, events, position)
