"""What a broadcast between GPUs makes when nothing else is to be done: the limit of an update."""

import multiprocessing
import time
from collections.abc import Sequence

from relax_hpc.comm.broadcast import BroadcastGroup, open_store

_BYTES = 1 << 30
_ROUNDS = 8
_TIMEOUT_S = 120


def measure(*, first: int, others: Sequence[int]) -> float:
    """GB/s of the best of some broadcasts of 1 GiB from GPU `first`; 0 if they failed."""
    context = multiprocessing.get_context("spawn")
    size = 1 + len(others)
    store = open_store("127.0.0.1", size, timeout_s=_TIMEOUT_S)
    speeds = context.Queue()
    ranks = [
        context.Process(target=_rank, args=(rank, size, gpu, store.port, speeds), daemon=True)
        for rank, gpu in enumerate([first, *others])
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(_TIMEOUT_S)
    return float(speeds.get()) if all(process.exitcode == 0 for process in ranks) else 0.0


def _rank(
    rank: int, size: int, gpu: int, port: int, speeds: "multiprocessing.Queue[float]"
) -> None:
    import torch

    from relax_hpc.comm.torch_group import settle_nccl

    settle_nccl()
    torch.cuda.set_device(gpu)
    group = BroadcastGroup("127.0.0.1", port, rank, size, "wire", "nccl", timeout_s=_TIMEOUT_S)
    data = torch.zeros(_BYTES, dtype=torch.uint8, device="cuda")
    best = 0.0
    for _ in range(_ROUNDS):
        group.broadcast(data[:8])  # all begin together
        start = time.perf_counter()
        group.broadcast(data)
        best = max(best, _BYTES / 1e9 / (time.perf_counter() - start))
    if rank == 0:
        speeds.put(best)
    group.close()
