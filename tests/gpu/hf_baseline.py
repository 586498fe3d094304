"""`hf_baseline.py`: what a user has without us, the shape of Qwen3-4B on plain Hugging Face, torch.

One document of 16,384 tokens a step, random weights, bf16 parameters and bf16 Adam moments.
MFU by the formula of `relax-hpc bench train`.
"""

import gc
import tempfile
import time
from pathlib import Path

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import Qwen3Config, Qwen3ForCausalLM

from relax_hpc.cli.bench.shapes import SHAPES, model_folder
from relax_hpc.trainer.megatron.costs import PEAK, training_flops
from relax_hpc.trainer.models.registry import read_architecture

TOKENS, CHUNK, STEPS = 16384, 2048, 6


def architecture():
    with tempfile.TemporaryDirectory() as folder:
        return read_architecture(model_folder("qwen3-4b", Path(folder)))


def run(name, backend, *, checkpointing, compiled):
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    shape = {k: v for k, v in SHAPES["qwen3-4b"].items() if k not in ("model_type", "hidden_act")}
    with torch.device("cuda"):
        model = Qwen3ForCausalLM._from_config(
            Qwen3Config(**shape), dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    model.train()
    model.config.use_cache = False
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if compiled:
        for layer in model.model.layers:
            layer.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    ids = torch.randint(0, 150000, (1, TOKENS), device="cuda")
    labels = ids[0].roll(-1)

    def loss_of(hidden, targets):
        logits = functional.linear(hidden, model.lm_head.weight).float()
        return functional.cross_entropy(logits, targets, reduction="sum")

    loss_of = torch.compile(loss_of) if compiled else loss_of
    seconds = []
    for _ in range(STEPS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        with sdpa_kernel([backend]):
            hidden = model.model(input_ids=ids).last_hidden_state[0]
            leaf = hidden.detach().requires_grad_()
            for start in range(0, TOKENS, CHUNK):
                part = slice(start, start + CHUNK)
                (loss_of(leaf[part], labels[part]) / TOKENS).backward()
            hidden.backward(leaf.grad)
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    step = sorted(seconds[2:])[len(seconds[2:]) // 2]
    mfu = training_flops(architecture(), [TOKENS]) / step / PEAK
    peak = torch.cuda.max_memory_allocated() / 2**30
    print(
        f"{name}: {TOKENS / step:.0f} tokens/s, {1e3 * step:.0f} ms, MFU {mfu:.1%}, {peak:.0f} GiB"
    )


torch._dynamo.config.cache_size_limit = 64
torch.backends.cuda.matmul.allow_tf32 = True
CUDNN, FLASH = SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION
run("Hugging Face compiled, cuDNN", CUDNN, checkpointing=False, compiled=True)
run("Hugging Face eager, flash, checkpointing", FLASH, checkpointing=True, compiled=False)
