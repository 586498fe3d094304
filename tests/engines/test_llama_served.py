"""Engines that serve models of Llama's form: their logprobs, their weights, their ends."""

import json
import shutil

import pytest
import torch
from engine_fixtures import (
    named_weights,
    prompt_of,
    reference_logprobs,
    sampled,
    send,
    started,
    weight_group,
)
from tiny_models import make

from relax_hpc.schema import FinishReason

KINDS = ["embedded", "sglang"]
FIRST_END = 96
"""Tokens from here on end a response, as <|eot_id|> and <|eom_id|> do; config.json names one."""


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module", params=["llama", "mistral"])
def engine(request, kind, tmp_path_factory):
    """(process, the folder that it serves, another policy of that shape)."""
    folder, other = (tmp_path_factory.mktemp(name) for name in ("policy", "other"))
    make(folder, request.param, eos_token_id=FIRST_END)
    ends = {"eos_token_id": list(range(FIRST_END, 128))}
    (folder / "generation_config.json").write_text(json.dumps(ends))
    shutil.copytree(folder, other, dirs_exist_ok=True)
    from safetensors.torch import save_file

    weights = {name: -0.9 * tensor for name, tensor in named_weights(folder)}
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    with started(kind, folder, tmp_path_factory.mktemp("log") / "engine.log") as process:
        yield process, folder, other


def gap(process, folder):
    prompt = prompt_of(20)
    [found] = sampled(process, prompt, [1], max_new_tokens=40)
    assert len(found.token_ids) == 40
    expected = reference_logprobs(folder, prompt, found.token_ids)
    return float((torch.tensor(found.logprobs) - expected).abs().max())


def test_logprobs_are_those_of_transformers_also_after_updates(engine):
    process, folder, other = engine
    client = process.client()
    assert gap(process, folder) <= 1e-5
    assert gap(process, other) > 0.1
    with weight_group(client, f"llama-{process.url}") as group:
        send(client, group, [named_weights(other)], 1)
        assert gap(process, other) <= 1e-5
    client.update_weights_from_disk(str(folder), 2)
    assert gap(process, folder) <= 1e-5
    client.close()


def test_every_token_of_generation_config_ends_a_response(engine):
    process, _, _ = engine
    ends = set()
    for found in sampled(process, prompt_of(9), range(24), max_new_tokens=40, ignore_eos=False):
        *before, last = found.token_ids
        assert max(before, default=0) < FIRST_END
        if found.finish == FinishReason.STOP:
            assert last >= FIRST_END
            ends.add(last)
    assert len(ends) > 4
