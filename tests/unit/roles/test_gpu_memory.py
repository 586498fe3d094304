"""GPU memory: what is told of it before a job, and what an error of it says."""

import pytest
import torch
from media_shapes import model_folder
from role_fakes import Events, config
from torch.distributed import DistBackendError

from relax_hpc.errors import GpuMemoryError
from relax_hpc.roles import table
from relax_hpc.roles import task as tasks
from relax_hpc.roles.training import gpu_memory
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.trainer.models.registry import read_architecture

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
LEAN = {"actor__optimizer__moments": "bfloat16", "actor__transformer": FULL}
NCCL = """NCCL error in: NCCLUtils.cpp:93, unhandled cuda error, NCCL version 2.28.9
ncclUnhandledCudaError: Call to CUDA function failed.
Last error:
Failed to CUDA calloc 536870912 bytes"""


def told(settings, shape):
    lines = []
    gpu_memory.tell(settings, shape, lines.append)
    return lines


def test_what_a_rank_keeps_is_said_in_gib(tmp_path):
    shape = read_architecture(model_folder("qwen3-vl-4b", tmp_path))
    lean = {
        "model__dtype": "bfloat16",
        "actor__resources__gpus_per_node": 1,
        "actor__optimizer__moments": "bfloat16",
        "actor__optimizer__ddp": {"grad_reduce_in_fp32": False},
    }
    # 4,437,815,808 parameters: 2 + 2 + 4 + 2 x 2 bytes of each.
    assert told(config(**lean), shape) == [
        "GPU memory: a rank of the actor keeps 49.6 GiB (weights 8.3, gradients 8.3, optimizer "
        "33.1), beside what a micro-batch of 16,384 tokens needs"
    ]
    [shared] = told(config(**lean, actor__layout__data_parallel=4), shape)
    assert "keeps 24.8 GiB (weights 8.3, gradients 8.3, optimizer 8.3)" in shared
    [frozen] = told(config(**lean, actor__frozen=["language", "vision"]), shape)
    assert "(weights 8.3, gradients 0.2, optimizer 0.8)" in frozen
    in_turn = {
        "engines": {"rollout": {"kind": "embedded", "placement": "actor"}},
        "schedule__max_staleness": 0,
    }
    [beside] = told(config(**lean, **in_turn), shape)
    assert beside.endswith("16,384 tokens needs; 41.3 GiB while engines sample there")
    assert told(config(**lean | {"actor__resources__gpus_per_node": 0}), shape) == []


@pytest.mark.parametrize(
    ("component", "settings", "asked"),
    [
        ("actor", {}, [
            'actor.optimizer.moments = "bfloat16"', "actor.tokens_per_micro_batch below 16384",
            'actor.transformer.recompute_granularity = "full" (with recompute_method = "uniform" '
            "and recompute_num_layers = 1)",
            "actor.optimizer.offload = 1.0", "more ranks of data_parallel",
        ]),
        ("critic", LEAN | {"actor__optimizer__offload": 1.0}, [
            "actor.tokens_per_micro_batch below 16384", "more ranks of data_parallel",
        ]),
        ("reference", {}, [
            "actor.tokens_per_micro_batch below 16384", "more ranks of tensor_parallel",
        ]),
    ],
)  # fmt: skip
def test_a_full_gpu_is_told_with_what_takes_less(component, settings, asked):
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.07 GiB.\nSee docs.")
    found = gpu_memory.explain(error, config(**settings), component)
    assert str(found) == (
        f"a GPU of {component} is full; use {', or '.join(asked)} (docs/explanation/trainer.md, "
        "Memory of a GPU): CUDA out of memory. Tried to allocate 1.07 GiB."
    )


@pytest.mark.parametrize(
    ("error", "ends"),
    [
        (DistBackendError(NCCL), ": NCCL: Failed to CUDA calloc 536870912 bytes"),
        (DistBackendError("x: Cuda failure 2 'out of memory'"), ": NCCL: out of memory'"),
        (DistBackendError("NCCL error: remote process exited"), None),
        (RuntimeError("CUDA out of memory, says somebody"), None),
    ],
)
def test_what_nccl_finds_no_room_for_is_told_alike(error, ends):
    found = gpu_memory.explain(error, config(), "actor")
    assert found is None if ends is None else str(found).endswith(ends)


def test_a_task_ends_with_the_explanation_and_keeps_the_cause(tmp_path, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    settings = config()
    monkeypatch.setattr("relax_hpc.roles.actor.build.main", full)
    monkeypatch.setattr("relax_hpc.roles.rollout.build.main", full)
    monkeypatch.setattr(tasks, "_join", lambda *_: type("World", (), {"size": 1})())
    for name, kind in (("actor", GpuMemoryError), ("rollout", torch.OutOfMemoryError)):
        role = table.role_of(settings, name)
        context = tasks.TaskContext(name, 0, 1, 0, attempt="1.0", start=1, node="n")
        with pytest.raises(kind) as caught:
            tasks.start(role, settings, RunPaths(tmp_path), context, "files", Events())
        if kind is GpuMemoryError:
            assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
