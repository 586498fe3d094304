"""Builds an actor rank of supervised fine-tuning: trainer, checkpoints, its duties."""

from collections.abc import Sequence

import torch

from relax_hpc.checkpoints import saving
from relax_hpc.checkpoints.store import Checkpoint
from relax_hpc.comm.torch_group import init_torch, own_device
from relax_hpc.comm.world import World
from relax_hpc.config.sft import SftRunConfig
from relax_hpc.paths import RunPaths
from relax_hpc.prompts import tokenizer as tokenizers
from relax_hpc.prompts.documents import Documents
from relax_hpc.roles.context import TaskContext
from relax_hpc.roles.ending import Ending
from relax_hpc.roles.sft import document_check, loop
from relax_hpc.roles.sft.rank0 import DataPosition, Rank0
from relax_hpc.roles.training.build import tell_parameters, trainer_of
from relax_hpc.roles.training.last_save import LastSave
from relax_hpc.telemetry.events import EventWriter
from relax_hpc.telemetry.timers import Timers


def main(
    config: SftRunConfig, paths: RunPaths, world: World, context: TaskContext, events: EventWriter
) -> None:
    """Resumes from the newest checkpoint, if there is one, and trains to the end."""
    files, tokenizer = document_check.open_files(config), tokenizers.load(config.model.path)
    # A rank looks at what no other does, so together they see all.
    document_check.check_share(config, files, tokenizer, world.rank, world.size)
    device = own_device(context.local_rank, asked=context.gpus)
    starting = Timers()
    with starting("model"):
        init_torch(world, device="cuda" if device.type == "cuda" else "cpu")
        trainer = trainer_of(config, world, device)
    checkpoints = saving.checkpoints_of(
        config.actor, paths, world, DataPosition, timeout_s=config.launch.peer_timeout_s
    )
    with starting("load"):
        resumed = saving.resume(checkpoints, trainer, events)
    rank0 = None
    if world.rank == 0:
        events.emit("phases", step=0, phases=starting.phases)
        tell_parameters(config, events)
        train, *heldout = (Documents(each.path, tokenizer, config.sft, each.rows) for each in files)
        rank0 = _rank0(config, paths, train, heldout, resumed, events)
    save = saving.Saving(
        config.actor, paths, world, trainer, checkpoints, rank0, events,
        num_steps=config.num_steps, source=config.model.path,
    )  # fmt: skip
    save.make_up()
    ending = Ending(paths, context.attempt) if rank0 else None
    stop = LastSave(world, trainer, save, ending, context.end)
    loop.run(config, world, trainer, rank0 or loop.OtherRank(), save, stop)
    stop.close()
    if rank0:
        events.emit("end")
    world.barrier()
    torch.distributed.destroy_process_group()


def _rank0(
    config: SftRunConfig,
    paths: RunPaths,
    documents: Documents,
    heldout: Sequence[Documents],
    resumed: Checkpoint[DataPosition] | None,
    events: EventWriter,
) -> Rank0:
    measured = [
        source.document(line)
        for source in heldout
        for line in range(min(config.sft.heldout_documents, len(source)))
    ]
    position = resumed.position if resumed else None
    return Rank0(config, paths, documents, measured, events, position)
