"""How long ranks wait for one that is slow to start, or stands still, in a collective of torch."""

import subprocess
import sys

import pytest

from relax_hpc.config.model import Layout
from relax_hpc.runtime.files.run_secret import RunSecret
from relax_hpc.trainer.megatron import grid

RANK = """
import sys, time
from pathlib import Path
import torch, torch.distributed as dist
from relax_hpc.runtime.comm.torch_group import init_torch
from relax_hpc.runtime.comm.world import connect
from relax_hpc.runtime.files.run_secret import RunSecret
rank, folder, timeout_s, late_s = int(sys.argv[1]), Path(sys.argv[2]), *map(float, sys.argv[3:])
world = connect("files", rank=rank, size=2, rendezvous=folder / "met",
                secret=RunSecret.read(folder / "secret"), timeout_s=120)
world.timeout_s = timeout_s
init_torch(world, device="cpu")
dist.barrier()
if rank == 1:
    time.sleep(late_s)
dist.all_reduce(torch.ones(1))
print("all there")
"""


@pytest.mark.parametrize(("timeout_s", "late_s", "is_there"), [(5, 100, False), (60, 7, True)])
def test_a_collective_waits_for_a_late_rank_as_long_as_its_component_does(
    tmp_path, timeout_s, late_s, is_there
):
    RunSecret.create(tmp_path / "secret")
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), tmp_path, str(timeout_s), str(late_s)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        said, errors = ranks[0].communicate(timeout=120)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert ("all there" in said) == is_there, errors
    assert is_there or "5000ms" in errors


def test_so_does_one_of_megatrons_groups(monkeypatch):
    asked = {}
    monkeypatch.setattr(grid.mpu, "model_parallel_is_initialized", lambda: False)
    monkeypatch.setattr(
        grid.mpu, "initialize_model_parallel", lambda *_, **said: asked.update(said)
    )
    grid.initialize(Layout(), timeout_s=7230)
    assert asked["distributed_timeout_minutes"] == 121
