"""The rate of a broadcast between GPUs when nothing else is to be done: the limit of an update."""

import multiprocessing
import queue
import time
from collections.abc import Sequence
from multiprocessing.queues import Queue

from relax_hpc.comm.broadcast import BroadcastGroup
from relax_hpc.comm.torch_store import open_store

_ROUNDS = 8
_TIMEOUT_S = 60


def measure(gpus: Sequence[int], *, num_bytes: int = 1 << 30) -> float:
    """GB/s of the best of some broadcasts from the first of `gpus`; 0 if they failed.

    Without a GPU, of as many processes.
    """
    context = multiprocessing.get_context("spawn")
    store = open_store("127.0.0.1", len(gpus), timeout_s=_TIMEOUT_S)
    speeds = context.Queue()
    ranks = [
        context.Process(target=_rank, args=(rank, gpus, num_bytes, store.port, speeds), daemon=True)
        for rank in range(len(gpus))
    ]
    for process in ranks:
        process.start()
    try:
        return float(speeds.get(timeout=_TIMEOUT_S))
    except queue.Empty:
        return 0.0
    finally:
        for process in ranks:
            process.join(5)
            process.kill()


def _rank(
    rank: int, gpus: Sequence[int], num_bytes: int, port: int, speeds: "Queue[float]"
) -> None:
    import torch
    import torch.distributed as dist

    from relax_hpc.comm.torch_group import settle_nccl

    settle_nccl()
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(gpus[rank])
    group = BroadcastGroup(
        "127.0.0.1", port, rank, len(gpus), "wire", "nccl" if on_gpu else "gloo",
        store=dist.TCPStore("127.0.0.1", port, len(gpus), False), timeout_s=_TIMEOUT_S,
    )  # fmt: skip
    data = torch.zeros(num_bytes, dtype=torch.uint8, device="cuda" if on_gpu else "cpu")
    best = 0.0
    for _ in range(_ROUNDS):
        group.broadcast(data[:8])  # all begin together
        start = time.perf_counter()
        group.broadcast(data)
        best = max(best, num_bytes / 1e9 / (time.perf_counter() - start))
    if rank == 0:
        speeds.put(best)
    group.close()
