"""The experts that SGLang says tokens went to are those that a recomputation chooses."""

import asyncio

import megatron_reference
import numpy as np
import pytest
import torch
from engine_fixtures import started

from relax_hpc.inference.generation import Draft, GenerationClient, Sampling
from relax_hpc.inference.http import Http
from relax_hpc.schema import FinishReason

LAYERS, EXPERTS, PER_TOKEN = 3, 8, 2
CUT = {1: "aborted", 2: "lost"}
"""The end of the request of a seed."""
SAMPLING = Sampling(1.0, 200, ignore_eos=True, routed_experts=True)


@pytest.fixture(scope="module", params=["sglang"])
def engine(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixture")
    model = megatron_reference.mixture(
        folder / "model", layers=LAYERS, experts=EXPERTS, per_token=PER_TOKEN
    )
    log = folder / "engine.log"
    with started(request.param, folder / "model", log, routed_experts=True) as process:
        yield process, model.eval()


def chosen(model, tokens):
    """[tokens, layers, experts per token], in ascending order."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens]), output_router_logits=True).router_logits
    best = torch.stack([layer.topk(PER_TOKEN).indices for layer in logits], 1)
    return best.sort(-1).values.numpy()


def test_every_token_names_its_experts_also_where_a_response_goes_on_after_an_interruption(engine):
    process, model = engine
    control = Http(process.url, process.token, timeout_s=60)
    prompts = [list(range(5, 5 + length)) for length in (1, 7, 7, 30)]

    async def sample(client, prompt, seed):
        draft = Draft()
        if seed in CUT:
            task = asyncio.create_task(
                client.sample(prompt, seed, SAMPLING, draft=draft, rid=f"cut-{seed}")
            )
            while len(draft.token_ids) < 10:
                await asyncio.sleep(0.005)
            if CUT[seed] == "aborted":
                body = {"rid": f"cut-{seed}"}
                await asyncio.to_thread(control.ask, "POST", "/abort_request", body)
                assert (await task).finish is FinishReason.ABORT
                held = sum(map(len, draft.experts))
                assert held == len(prompt) + len(draft.token_ids) - 1
            else:
                task.cancel()
                await asyncio.wait({task})
                held = sum(map(len, draft.experts))  # all, if the engine could hand them over
                assert held in (0, len(prompt) + len(draft.token_ids) - 1)
                draft.experts.clear()  # as if it had died, and with it what it knew of them
        return await client.sample(prompt, seed, SAMPLING, draft=draft)

    async def run():
        async with GenerationClient(process.url, process.token) as client:
            samples = [sample(client, prompt, seed) for seed, prompt in enumerate(prompts)]
            return await asyncio.gather(*samples)

    for prompt, response in zip(prompts, asyncio.run(run()), strict=True):
        tokens = prompt + response.token_ids
        rows = response.routed_experts
        assert rows.shape == (len(tokens), LAYERS * PER_TOKEN)
        assert rows.dtype == np.int16
        found = np.sort(rows.reshape(len(tokens), LAYERS, PER_TOKEN), -1)
        expected = chosen(model, tokens)
        assert np.array_equal(found[:-1], expected[:-1])
        assert np.array_equal(found[-1], found[-2])  # it has not been through the model
