"""Shapes of models and grids that can be measured without weights, data or Slurm."""

import json
import multiprocessing
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from relax_hpc.config.job_file import with_overrides
from relax_hpc.config.model import Layout
from relax_hpc.config.run import RunConfig
from relax_hpc.errors import ConfigError, none_of
from relax_hpc.runtime.files.run_secret import RunSecret
from relax_hpc.schema import FinishReason, Trajectory

if TYPE_CHECKING:
    import torch

    from relax_hpc.runtime.comm.world import World

_JOIN_S = 120

_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu",
    "vocab_size": 151936, "head_dim": 128,
    "num_key_value_heads": 8, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-4b": _QWEN3 | {"hidden_size": 2560, "intermediate_size": 9728,
                          "num_hidden_layers": 36, "num_attention_heads": 32},
    "qwen3-1.7b": _QWEN3 | {"hidden_size": 2048, "intermediate_size": 6144,
                            "num_hidden_layers": 28, "num_attention_heads": 16},
    "qwen3-0.6b": _QWEN3 | {"hidden_size": 1024, "intermediate_size": 3072,
                            "num_hidden_layers": 28, "num_attention_heads": 16},
    "qwen3-30b-a3b": _QWEN3 | {"architectures": ["Qwen3MoeForCausalLM"],
                               "model_type": "qwen3_moe", "hidden_size": 2048,
                               "intermediate_size": 6144, "moe_intermediate_size": 768,
                               "num_experts": 128, "num_experts_per_tok": 8,
                               "norm_topk_prob": True, "decoder_sparse_step": 1,
                               "mlp_only_layers": [], "router_aux_loss_coef": 1e-3,
                               "num_hidden_layers": 48, "num_attention_heads": 32,
                               "num_key_value_heads": 4, "tie_word_embeddings": False},
    "tiny": _QWEN3 | {"vocab_size": 512, "head_dim": 16, "num_key_value_heads": 2,
                      "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
                      "num_attention_heads": 4},
}  # fmt: skip
"""config.json of each shape; the tiny ones are for machines without a GPU."""

_EXPERTS = ("architectures", "model_type", "num_experts_per_tok", "norm_topk_prob",
            "decoder_sparse_step", "mlp_only_layers", "router_aux_loss_coef")  # fmt: skip
SHAPES["tiny-moe"] = SHAPES["tiny"] | {
    **{key: SHAPES["qwen3-30b-a3b"][key] for key in _EXPERTS},
    "moe_intermediate_size": 64, "num_experts": 16, "tie_word_embeddings": False,
}  # fmt: skip


def users_folder(shape: str, shapes: Collection[str]) -> Path | None:
    """Returns the folder of the user's model; None if `shape` is one of `shapes`.

    Raises:
        ConfigError: it is neither.
    """
    if (Path(shape) / "config.json").is_file():
        return Path(shape)
    if shape not in shapes:
        raise ConfigError(
            f"--shape {shape}: is no folder with a config.json, and {none_of(shape, shapes)}"
        )
    return None


def model_folder(shape: str, folder: Path) -> Path:
    """Returns the folder of the model's config.json: the user's, or one written to `folder`."""
    if found := users_folder(shape, SHAPES):
        return found
    (folder / "config.json").write_text(json.dumps(SHAPES[shape]), encoding="utf-8")
    return folder


def job_of(
    shape: str, folder: Path, tables: Mapping[str, Any], overrides: Sequence[str], command: str
) -> RunConfig:
    """Makes a job without prompts.

    Args:
        shape: a name of `SHAPES`, or a folder with a config.json; its weights are used, if any.
        folder: for the config.json of a name.
        tables: of the job, beside those that every one has.
        overrides: `section.key=value` of the job.
        command: for messages.

    Raises:
        ConfigError: no such shape; the job cannot be.
    """
    import torch

    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    tree: dict[str, Any] = {
        "name": "bench",
        "model": {"path": str(model_folder(shape, folder)), "dtype": dtype},
        "prompts": {"train": "unused"},
        **tables,
    }
    config = with_overrides(tree, overrides, source=command)
    assert isinstance(config, RunConfig)
    return config


def row_of(
    token_ids: npt.NDArray[np.int32],
    prompt_len: int,
    logprobs: npt.NDArray[np.float32],
    *,
    guid: int = 0,
    sibling: int = 0,
    version_runs: Sequence[tuple[int, int]] | None = None,
    finish: FinishReason = FinishReason.STOP,
) -> Trajectory:
    """Makes a row in which all tokens behind the prompt are sampled, by policy 0 by default."""
    runs = [(prompt_len, 0)] if version_runs is None else version_runs
    return Trajectory(
        guid=guid,
        sibling=sibling,
        prompt_index=guid,
        seed=sibling,
        token_ids=token_ids,
        prompt_len=prompt_len,
        loss_mask=(np.arange(len(token_ids)) >= prompt_len).astype(np.uint8),
        columns={"rollout_logprobs": logprobs},
        version_runs=np.array(runs, np.int32).reshape(-1, 2),
        finish=finish,
        reward=1.0,
    )


_SHORT = {
    "dp": "data_parallel", "tp": "tensor_parallel", "pp": "pipeline_parallel",
    "vpp": "virtual_pipeline", "cp": "context_parallel", "ep": "expert_parallel",
    "etp": "expert_tensor_parallel",
}  # fmt: skip


def grid_of(**sizes: int) -> dict[str, int]:
    """Keys of `Layout`, by their short names."""
    return {_SHORT[short]: size for short, size in sizes.items()}


def grid_name(layout: Layout) -> str:
    """Formats data and tensor parallelism, and others in use: "dp1 tp2 cp2"."""
    return " ".join(
        f"{short}{size}"
        for short, name in _SHORT.items()
        if (size := getattr(layout, name)) > 1 or short in ("dp", "tp")
    )


def join(rank: int, size: int, rendezvous: Path, secret: Path) -> "tuple[World, torch.device]":
    """Makes this process a rank, on the GPU of its number or on one core. Collective."""
    import torch

    from relax_hpc.runtime.comm.torch_group import init_torch
    from relax_hpc.runtime.comm.world import connect

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


def run_ranks(function: Callable[[int, Any], None], task: Any, size: int) -> Any:  # noqa: ANN401
    """Calls `function(rank, task)` in a process per rank; returns the JSON in `task.results`.

    Raises:
        ConfigError: a rank failed.
    """
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    context = multiprocessing.get_context("spawn")
    run_to_end(
        [context.Process(target=function, args=(rank, task), daemon=False) for rank in range(size)]
    )
    if not task.results.exists():
        raise ConfigError("a rank failed; its error is above")
    return json.loads(task.results.read_text(encoding="utf-8"))


def run_to_end(ranks: Sequence[SpawnProcess]) -> None:
    """Starts processes and waits for them; if one fails, ends the others."""
    for process in ranks:
        process.start()
    while any(process.is_alive() for process in ranks):
        time.sleep(0.2)
        if any(process.exitcode for process in ranks):
            break
    for process in ranks:
        if process.is_alive():
            process.join(0 if any(p.exitcode for p in ranks) else _JOIN_S)
            process.kill()
