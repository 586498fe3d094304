"""Parts that the engine tests share: tiny checkpoints, the reference forward, a weight sender."""

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
from sglang_under_test import SGLANG_PYTHON
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from relax_hpc.inference.capabilities import Capabilities
from relax_hpc.inference.client import EngineClient
from relax_hpc.inference.generation import Generation, GenerationClient, Sampling
from relax_hpc.inference.process import EngineProcess, start_engine
from relax_hpc.inference.spec import EngineSpec
from relax_hpc.runtime.comm.torch_group import BroadcastGroup, open_store

VOCAB, EOS = 128, 2


class Served(NamedTuple):
    kind: str
    process: EngineProcess
    checkpoints: list[Path]
    able: Capabilities

    def client(self) -> EngineClient:
        return self.process.client()


def save_checkpoint(folder: Path, seed: int, *, tied: bool = False) -> Path:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # heads x head_dim differs from hidden_size, as in the real models
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 50000.0},
        tie_word_embeddings=tied,
        initializer_range=0.2,  # sharp enough that positions and norms matter
        eos_token_id=EOS,
        bos_token_id=None,
        pad_token_id=0,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():  # all ones would hide a norm that is left out
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    return folder


def named_weights(folder: Path) -> list[tuple[str, torch.Tensor]]:
    from safetensors.torch import load_file

    return list(load_file(folder / "model.safetensors").items())


def reference_logprobs(folder: Path, prompt, response, *, temperature=1.0) -> torch.Tensor:
    """Hugging Face's log-probabilities of `response` after `prompt`, in float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0] / temperature
    rows = logits[len(prompt) - 1 : -1].log_softmax(-1)
    return rows.gather(1, torch.tensor(response)[:, None])[:, 0]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(3, VOCAB, (length,), generator=generator).tolist()


def started(kind: str, folder: Path, log: Path, *, token="right", how=(), **spec) -> EngineProcess:
    """An engine on this machine; `spec` says what it is, `how` how it is started."""
    spec = {"start_timeout_s": 300} | spec
    return start_engine(
        EngineSpec(kind, folder, **spec), host="127.0.0.1", token=token, log_path=log,
        python=SGLANG_PYTHON if kind == "sglang" else None, **dict(how),
    )  # fmt: skip


def generate(served: Served, prompt, seeds, **kwargs) -> list[Generation]:
    return sampled(served.process, prompt, seeds, **kwargs)


def sampled(process: EngineProcess, prompt, seeds, **kwargs) -> list[Generation]:
    """One group, from a synchronous test."""
    how = Sampling(**{"temperature": 1.0, "max_new_tokens": 16, "ignore_eos": True} | kwargs)

    async def run():
        async with GenerationClient(process.url, process.token) as client:
            return await asyncio.gather(*(client.sample(prompt, seed, how) for seed in seeds))

    return asyncio.run(run())


@contextmanager
def generating(served: Served, prompt, seeds, max_new_tokens=1500):
    """A long group in the background, which has sampled its first tokens when the block starts."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(generate, served, prompt, seeds, max_new_tokens=max_new_tokens)
        # Requests are admitted in order: an answer to a later one means the earlier ones run.
        # Two tokens, since another connection may have overtaken the first request.
        while served_running(served) == 0:
            assert not future.done()
        generate(served, prompt_of(3), [0], max_new_tokens=2)
        yield future


def served_running(served: Served) -> int:
    """Requests that run or wait, asked of the server itself."""
    import httpx

    headers = {"Authorization": f"Bearer {served.process.token}"}
    path = "/server_info" if served.kind == "embedded" else "/v1/loads"
    reply = httpx.get(f"{served.process.url}{path}", headers=headers).json()
    return sum(int(load["num_running_reqs"]) for load in reply.get("loads", [reply]))


@contextmanager
def weight_group(client: EngineClient, name: str) -> Iterator[BroadcastGroup]:
    """A gloo group of this process and one engine; torch takes a name once per process."""
    store = open_store("127.0.0.1", 2, timeout_s=60)
    with ThreadPoolExecutor(1) as pool:
        join = pool.submit(client.init_weights_group, "127.0.0.1", store.port, 1, 2, name, "gloo")
        group = BroadcastGroup("127.0.0.1", store.port, 0, 2, name, "gloo", store=store)
        join.result(60)
    yield group
    client.destroy_weights_group(name)
    group.close()


def send(client: EngineClient, group: BroadcastGroup, buckets, version: int) -> None:
    """Sends (name, tensor) as a trainer does: one HTTP call and one broadcast per bucket."""
    for index, bucket in enumerate(buckets):
        parts = [tensor.contiguous().view(-1).view(torch.uint8) for _, tensor in bucket]
        sender = threading.Thread(target=group.broadcast, args=(torch.cat(parts),))
        sender.start()
        client.update_weights(
            [name for name, _ in bucket],
            [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
            [list(tensor.shape) for _, tensor in bucket],
            group=group.name,
            version=version,
            last=index == len(buckets) - 1,
        )
        sender.join()


def wait_until(condition, timeout_s=60):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def runs(process):
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
