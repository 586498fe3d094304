"""GPU memory: what is told of it before a job, and what an error of it says."""

import pytest
from media_shapes import model_folder
from role_fakes import config
from torch.distributed import DistBackendError

from relax_hpc.roles.training import gpu_memory
from relax_hpc.trainer.models.registry import read_architecture

NCCL = """NCCL error in: NCCLUtils.cpp:93, unhandled cuda error, NCCL version 2.28.9
ncclUnhandledCudaError: Call to CUDA function failed.
Last error:
Failed to CUDA calloc 536870912 bytes"""


def test_what_a_rank_keeps_is_said_in_gib(tmp_path):
    shape = read_architecture(model_folder("qwen3-vl-4b", tmp_path))
    lean = {
        "model__dtype": "bfloat16", "actor__resources__gpus_per_node": 1,
        "actor__optimizer": {"moments": "bfloat16", "ddp": {"grad_reduce_in_fp32": False}},
    }  # fmt: skip

    def told(**settings):
        lines = []
        gpu_memory.tell(config(**lean | settings), shape, lines.append)
        return lines

    # 4,437,815,808 parameters: 2 + 2 + 4 + 2 x 2 bytes of each.
    [alone] = told()
    assert "keeps 49.6 GiB (weights 8.3, gradients 8.3, optimizer 33.1)" in alone
    [shared] = told(actor__layout__data_parallel=4)
    assert "keeps 24.8 GiB (weights 8.3, gradients 8.3, optimizer 8.3)" in shared
    [frozen] = told(actor__frozen=["language", "vision"])
    assert "(weights 8.3, gradients 0.2, optimizer 0.8)" in frozen
    assert told(actor__resources__gpus_per_node=0) == []


@pytest.mark.parametrize(
    ("error", "ends"),
    [
        (DistBackendError(NCCL), ": NCCL: Failed to CUDA calloc 536870912 bytes"),
        (DistBackendError("NCCL error: remote process exited"), None),
        (RuntimeError("CUDA out of memory, says somebody"), None),
    ],
)
def test_what_nccl_finds_no_room_for_is_told_alike(error, ends):
    found = gpu_memory.explain(error, config(), "actor")
    assert found is None if ends is None else str(found).endswith(ends)
