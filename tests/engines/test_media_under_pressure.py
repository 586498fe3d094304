"""SGLang puts requests with media off midway, reads their prompts in pieces, and sees the same."""

import asyncio
import re
from pathlib import Path

import pytest
from engine_fixtures import started
from safetensors.torch import load_file, save_file
from seer import IMAGE, TOGETHER, VIDEO, Seer, ask, clip, make, source
from sglang_under_test import SGLANG_PYTHON, SGLANG_VERSION

from relax_hpc.data.media.workers import Decoders, MediaWorkers
from relax_hpc.inference.client import EngineClient
from relax_hpc.inference.generation import Draft, GenerationClient, Sampling
from relax_hpc.inference.members import Member
from relax_hpc.inference.sglang import launch
from relax_hpc.inference.switches import Notes
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.trainer.models.hf_files import SINGLE
from relax_hpc.weights.files import load_snapshot

pytestmark = [pytest.mark.sglang, pytest.mark.skipif(not SGLANG_PYTHON, reason="needs SGLang")]

CHUNK = 24  # tokens of a prompt that are read at once; an image has up to 64
RETRACTS, ENCODES = r"#retracted_reqs: [1-9]", "a tower encodes"
PREFERRED = -9.0  # of the row of a placeholder in the head, as it was drawn


@pytest.fixture(scope="module")
def pressed(tmp_path_factory):
    """A model of experts that likes to sample placeholders of images, on an engine that retracts
    whatever runs beside another request, every third step."""
    folder = tmp_path_factory.mktemp("pressed")
    make(folder, kind="vl-moe")
    made = Seer(folder)
    prefer(folder, made.image)
    made = Seer(folder)
    made.log = tmp_path_factory.mktemp("log") / "engine.log"
    args = {"chunked_prefill_size": CHUNK}
    made.has_prefix_cache = SGLANG_VERSION != "0.5.17"
    if not made.has_prefix_cache:
        args["disable_radix_cache"] = True  # it cannot be emptied in a pause
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_TEST_RETRACT", "1")
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=":")
        patch.setattr(launch, "_MODELS", "told_models")
        with started("sglang", folder, made.log, args=args, start_timeout_s=600) as made.process:
            yield made


def prefer(folder, token):
    tensors = load_file(folder / SINGLE)
    tensors["lm_head.weight"][token] *= PREFERRED
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})


@pytest.fixture(scope="module")
def other(pressed, tmp_path_factory):
    """The same model with another tower."""
    folder = tmp_path_factory.mktemp("other")
    make(folder, kind="vl-moe", seed=6)
    given, kept = (load_file(each / SINGLE) for each in (folder, pressed.folder))
    mixed = {name: (given if "visual" in name else kept)[name] for name in kept}
    save_file(mixed, folder / SINGLE, metadata={"format": "pt"})
    return Seer(folder)


def said(seer, what):
    return re.findall(what, seer.log.read_text())


def test_retracted_requests_see_the_same_and_what_they_sampled_is_text(pressed, tmp_path):
    """Each image is larger than a piece, is put off with its response, and encoded once."""
    large = [source(tmp_path, n, height=256, width=256) for n in range(50, 54)]
    prompts = [pressed.prompt(IMAGE + "what?", image) for image in large]
    prompts += [pressed.prompt(VIDEO + "as" + IMAGE + "?", clip(tmp_path, 20), large[0])]
    assert prompts[0][2][0].tokens == 64 > 2 * CHUNK
    retractions, encoded = (len(said(pressed, what)) for what in (RETRACTS, ENCODES))
    made = ask(pressed, prompts, new=32)
    assert len(said(pressed, RETRACTS)) >= retractions + 5
    assert len(said(pressed, ENCODES)) == encoded + 5
    for prompt, each in zip(prompts, made, strict=True):
        assert pressed.gap(prompt, each).max() <= TOGETHER
    assert sum(each.token_ids.count(pressed.image) for each in made) >= 5


def test_a_pause_that_throws_caches_away_reads_images_by_the_new_tower(pressed, other, tmp_path):
    """Tokens before it have logprobs of the old weights, those after it of the new ones alone."""
    control = EngineClient(
        pressed.process.url, pressed.process.token,
        recompute=True, has_prefix_cache=pressed.has_prefix_cache,
    )  # fmt: skip
    member = Member("rollout-0", "1", pressed.process.url, 1, "sglang", "HEALTHY")
    images = [source(tmp_path, n, height=256, width=256) for n in (60, 61)]
    prompts = [pressed.prompt(IMAGE + "what?", image) for image in images]
    retractions, folder = len(said(pressed, RETRACTS)), other.folder
    notes = Notes(RunPaths(tmp_path / "run"))
    try:
        made, done = sampled_over(
            pressed,
            prompts,
            lambda: load_snapshot(member, control, folder, 1, 60, notes, check=False),
        )
        for prompt, each in zip(prompts, made, strict=True):
            old, new = pressed.gap(prompt, each), other.gap(prompt, each)
            cuts = done.receipts[0].num_sampled.values()
            assert len(cuts) == 2 and all(8 <= cut < 60 for cut in cuts)
            gaps = {cut: max(old[:cut].max(), new[cut:].max()) for cut in cuts}
            cut = min(gaps, key=gaps.get)  # its own, of the two
            assert gaps[cut] <= TOGETHER and old[cut:].max() > 1e-2
        assert len(said(pressed, RETRACTS)) > retractions
    finally:
        load_snapshot(member, control, pressed.folder, 0, 60, notes, check=False)
        control.close()


def sampled_over(seer, prompts, act):
    drafts = [Draft() for _ in prompts]

    async def sample(workers, client, prompt, draft):
        ids, media, spans = prompt
        async with workers.prepare(media, spans) as made:
            how = Sampling(1.0, 60, ignore_eos=True, view=made.view)
            return await client.sample(ids, 1, how, draft=draft)

    async def run():
        async with (
            MediaWorkers(seer.recipe, Decoders(1)) as workers,
            GenerationClient(seer.process.url, seer.process.token, tokens_per_chunk=4) as client,
        ):
            asked = [
                asyncio.create_task(sample(workers, client, *each))
                for each in zip(prompts, drafts, strict=True)
            ]
            while min(len(draft.token_ids) for draft in drafts) < 8:
                await asyncio.sleep(0.01)
            done = await asyncio.to_thread(act)
            return await asyncio.gather(*asked), done

    return asyncio.run(run())
