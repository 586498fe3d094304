"""Runs inside SGLang's environment: its models with FP8 weights, on CPU, as far as loading goes.

No layer is computed, which SGLang's FP8 needs a GPU for. Prints, as JSON, what our receiver
notes of the model's loader, and whether the copies put everything where the loader does.

    python fp8_loader.py FOLDER
"""

import inspect
import json
import os
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.parallel_state import (
    init_distributed_environment,
    initialize_model_parallel,
)
from sglang.srt.environ import envs
from sglang.srt.layers.dp_attention import initialize_dp_attention
from sglang.srt.model_loader import loader
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from relax_hpc.config.rollout import WeightsConfig
from relax_hpc.inference.sglang.copies import find_uncovered, load, record
from relax_hpc.runtime.comm.bucket import BucketPlan, Spec, views
from relax_hpc.weights.quantize import Quantizer


def build(folder, config):
    override = json.dumps({"quantization_config": config.quantization_config})
    args = ServerArgs(
        model_path=str(folder), device="cpu", dtype="bfloat16", json_model_override_args=override
    )
    set_global_server_args_for_scheduler(args)
    init_distributed_environment(
        world_size=1, rank=0, local_rank=0, backend="gloo",
        distributed_init_method=f"file://{folder}/store-{os.getpid()}",
    )  # fmt: skip
    initialize_model_parallel()
    model_config = ModelConfig.from_server_args(args)
    if len(inspect.signature(initialize_dp_attention).parameters) == 1:  # newer
        get_parallel().override_permanently(
            tp_rank=0, pp_rank=0, moe_ep_rank=0, moe_tp_rank=0, moe_dp_rank=0, attn_tp_rank=0
        )
        initialize_dp_attention(args)
    else:
        initialize_dp_attention(args, model_config)
    torch.set_default_dtype(torch.bfloat16)
    quantization = loader._get_quantization_config(model_config, LoadConfig())
    return loader._initialize_model(model_config, LoadConfig(), quantization)


def buckets(folder, quantizer):
    """Yields what the trainer would send, in a few buckets: flat bytes and their specs."""
    [file] = folder.glob("*.safetensors")
    tensors = dict(as_sent(load_file(file)))
    source = BucketPlan.of(
        [Spec(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()], 150_000
    )
    plan = quantizer.plan(source)
    for index, bucket in enumerate(source.buckets):
        plain = torch.empty(source.sizes[index], dtype=torch.uint8)
        for spec, place in zip(bucket, views(plain, bucket), strict=True):
            place.copy_(tensors[spec.name])
        flat = torch.empty(plan.sizes[index], dtype=torch.uint8)
        quantizer.fill(flat, plan.buckets[index], plain, bucket)
        yield flat, plan.buckets[index]


def as_sent(tensors):
    """Names and shapes that the trainer has: every expert by itself, and no talker."""
    for name, tensor in tensors.items():
        place, _, kind = name.rpartition(".experts.")
        if name.startswith(("talker.", "code2wav.")):
            continue
        if kind not in ("gate_up_proj", "down_proj"):
            yield name, tensor
            continue
        parts = kind.removesuffix("_proj").split("_")
        for expert, matrix in enumerate(tensor):  # [columns, rows of all parts]
            for part, rows in zip(parts, matrix.T.chunk(len(parts)), strict=True):
                yield f"{place}.experts.{expert}.{part}_proj.weight", rows.contiguous()


def main(folder):
    config = WeightsConfig(quantize="fp8", advanced={"modules_to_not_convert": ["layers.1"]})
    model = build(folder, config)
    noted, wrong = [], []
    for flat, bucket in buckets(folder, Quantizer(config)):
        copies = record(model.load_weights, flat, bucket)
        copies.make()
        made = [target.clone() for target in copies.targets]
        for target in copies.targets:
            target.zero_()
        load(model.load_weights, flat, bucket)  # SGLang's own way
        same = [torch.equal(bits(a), bits(b)) for a, b in zip(made, copies.targets, strict=True)]
        wrong += [spec.name for spec in bucket] if not all(same) or copies.differing() else []
        noted += copies.targets
    types = {name: str(parameter.dtype) for name, parameter in model.named_parameters()}
    compiles_first = envs.SGLANG_JIT_DEEPGEMM_PRECOMPILE.get()
    print(
        json.dumps(
            {
                "types": types,
                "wrong": wrong,
                "uncovered": find_uncovered(model, noted),
                "compiles_first": compiles_first,
            }
        )
    )


def bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


main(Path(sys.argv[1]))
