"""Ranks of a trainer that is measured."""

from pathlib import Path

import torch

from relax_hpc.comm.torch_group import init_torch
from relax_hpc.comm.world import World, connect
from relax_hpc.run_secret import RunSecret


def joined(rank: int, size: int, rendezvous: Path, secret: Path) -> tuple[World, torch.device]:
    """Makes this process a rank, on the GPU of its number or on one core. Collective."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    world = connect(
        "files", rank=rank, size=size, rendezvous=rendezvous, secret=RunSecret.read(secret),
        timeout_s=600,
    )  # fmt: skip
    init_torch(world, device="cuda" if on_gpu else "cpu")
    return world, device
