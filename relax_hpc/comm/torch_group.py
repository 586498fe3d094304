"""torch.distributed for one component, bootstrapped by its World."""

import os
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

from relax_hpc.comm import gpus
from relax_hpc.comm.torch_store import shared_store
from relax_hpc.comm.world import World


def init_torch(world: World, *, device: Literal["cpu", "cuda"]) -> None:
    """Initialises the default process group with the ranks of `world`, and its patience.

    GPU ranks get NCCL for CUDA tensors and gloo for CPU tensors.
    """
    if device == "cuda":
        settle_nccl()
    timeout = timedelta(seconds=world.timeout_s)
    store = shared_store(world, timeout_s=world.timeout_s)
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(
        backend, store=store, rank=world.rank, world_size=world.size, timeout=timeout
    )


def settle_nccl() -> None:
    """Makes the settings that trainer and engines must agree on before either uses NCCL.

    SGLang sets the same for itself. Without the first, a broadcast between a trainer and an engine
    fails in the engine ("invalid argument") and hangs in the trainer.
    """
    os.environ["NCCL_CUMEM_ENABLE"] = "0"
    os.environ["NCCL_NVLS_ENABLE"] = "0"


def own_device(local_rank: int, *, asked: int) -> torch.device:
    """Selects this rank's GPU; Slurm shows every task all GPUs of the component on its node.

    Args:
        local_rank: among the ranks of the node.
        asked: the GPUs of a node that the component asked for.

    Raises:
        ConfigError: the component asked for GPUs, and some are missing.
    """
    gpus.check(asked, torch.cuda.device_count(), f"torch {torch.__version__}")
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
