"""With the experts that SGLang took, the trainer is as near to it as with a dense model."""

import asyncio

import megatron_reference
import numpy as np
import pytest
from engine_fixtures import started
from trainers import collect, opened

from relax_hpc.inference.generation import GenerationClient, Sampling
from relax_hpc.schema import FinishReason, Trajectory

LAYERS, EXPERTS, PER_TOKEN = 4, 8, 2
DTYPE = "bfloat16"
PROMPTS = [[5 + number, *range(20, 28 + number)] for number in range(8)]


def sampled(folder, *, experts):
    how = Sampling(1.0, 60, ignore_eos=True, routed_experts=experts)
    log = folder / "engine.log"
    with started("sglang", folder, log, dtype=DTYPE, routed_experts=experts) as process:

        async def run():
            async with GenerationClient(process.url, process.token) as client:
                asked = [client.sample(prompt, 7 + n, how) for n, prompt in enumerate(PROMPTS)]
                return await asyncio.gather(*asked)

        responses = asyncio.run(run())
    return [row(*each) for each in zip(range(len(PROMPTS)), PROMPTS, responses, strict=True)]


def row(guid, prompt, response):
    size = len(prompt) + len(response.token_ids)
    mask = (np.arange(size) >= len(prompt)).astype(np.uint8)
    return Trajectory(
        guid=guid, sibling=0, prompt_index=guid, seed=0,
        token_ids=np.array([*prompt, *response.token_ids], np.int32), prompt_len=len(prompt),
        loss_mask=mask, version_runs=np.array([[len(prompt), 0]], np.int32),
        columns={"rollout_logprobs": np.array([0.0] * len(prompt) + response.logprobs, np.float32)},
        finish=FinishReason.LENGTH, reward=0.0, routed_experts=response.routed_experts,
    )  # fmt: skip


def gap(ranks, folder, rows, grid="one"):
    pool = opened(ranks, folder, grid, dtype=DTYPE, budget=200)
    found = collect(pool.logprobs(rows=rows))
    gaps = [
        np.abs(mine - row.columns["rollout_logprobs"])[row.prompt_len :]
        for mine, row in zip(found, rows, strict=True)
    ]
    return float(np.concatenate(gaps).mean())


@pytest.mark.parametrize("engine", ["sglang"])
def test_replay_brings_the_gap_of_a_mixture_down_to_that_of_a_dense_model(ranks, engine, tmp_path):
    megatron_reference.dense(tmp_path / "dense", layers=LAYERS)
    megatron_reference.mixture(
        tmp_path / "mixture", layers=LAYERS, experts=EXPERTS, per_token=PER_TOKEN
    )
    dense = sampled(tmp_path / "dense", experts=False)
    rows = sampled(tmp_path / "mixture", experts=True)
    bare = [row._replace(routed_experts=None) for row in rows]
    of_dense = gap(ranks, tmp_path / "dense", dense)
    without = gap(ranks, tmp_path / "mixture", bare)
    grids = ("one", "tp2", "dp2_ep2", "pp2", "cp2")
    found = {grid: gap(ranks, tmp_path / "mixture", rows, grid) for grid in grids}
    print(f"dense {of_dense:.2e}, without replay {without:.2e}, with it {found}")
    assert max(found.values()) <= of_dense
    assert without > 2 * max(found.values())
