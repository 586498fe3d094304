"""Processes of test_snapshot, which are killed or kept from writing."""

import multiprocessing
import os
import signal
from contextlib import nullcontext
from unittest import mock

import torch

from relax_hpc.runtime.comm.bucket import Spec
from relax_hpc.runtime.comm.world import SoloWorld
from relax_hpc.weights.snapshot import SnapshotWriter
from relax_hpc.weights.transport import TrainerRanks

_CONTEXT = multiprocessing.get_context("forkserver")


def in_a_process(call, *args):
    """Runs it in a process of its own, which may be killed; returns how that ended."""
    # Forked from one that has imported this once, or more before: seconds for each of them.
    _CONTEXT.set_forkserver_preload(["relax_hpc.weights.transport"])
    process = _CONTEXT.Process(target=call, args=args)
    process.start()
    process.join(60)
    return process.exitcode


def specs_of(tensors):
    return [Spec(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()]


def model(scale=1.0):
    """14 tensors of three element sizes."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for number in range(7):
        values = scale * torch.randn(5 + number, 3, generator=generator)
        tensors[f"{number}.weight"] = values.to(
            torch.float8_e4m3fn if number % 2 else torch.bfloat16
        )
        tensors[f"{number}.scale"] = values.amax(0)
    return tensors


def write(world, source, version, tensors, root, **options):
    """As the trainer does it; on rank 0 returns the snapshot."""
    writer = SnapshotWriter(root, specs_of(tensors), world, source, **options)
    ranks = TrainerRanks(world, writer, {})
    if world.rank == 0:
        return ranks.write_snapshot(version, iter(tensors.items()), in_use=())
    return ranks.publish(iter(tensors.items()))


KILLED_AT = {
    "tensor 0": None,
    "tensor 9": None,
    "index": "relax_hpc.trainer.models.hf_folder.write_index",
    "manifest": "relax_hpc.trainer.models.weight_files.Manifest.write",
    "rename": "pathlib.Path.rename",
    "end": None,
}


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def write_and_die(source, root, point):
    def stream():
        for number, item in enumerate(model(2.0).items()):
            if point == f"tensor {number}":
                die()
            yield item

    writer = SnapshotWriter(root, specs_of(model()), SoloWorld(), source)
    ranks = TrainerRanks(SoloWorld(), writer, {})
    with mock.patch(KILLED_AT[point], die) if KILLED_AT[point] else nullcontext():
        ranks.write_snapshot(2, stream(), in_use=())
    die()
