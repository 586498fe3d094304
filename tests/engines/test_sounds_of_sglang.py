"""SGLang hears canonical spectra beside what it sees, and computes what Hugging Face computes."""

import pytest
import torch
from seer import (
    AUDIO,
    IMAGE,
    TOGETHER,
    TOLERANCE,
    VIDEO,
    Hearer,
    ask,
    clip,
    film,
    make,
    sound,
    source,
)
from sglang_under_test import SGLANG_PYTHON

from relax_hpc.engines import capabilities
from relax_hpc.engines.process import start_engine
from relax_hpc.engines.spec import EngineSpec

pytestmark = [pytest.mark.sglang, pytest.mark.skipif(not SGLANG_PYTHON, reason="needs SGLang")]


@pytest.fixture(scope="module")
def hearer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hearer")
    whole = make(folder, kind="omni")
    made = Hearer(folder)
    made.whole = whole
    log_path = tmp_path_factory.mktemp("log") / "engine.log"
    with start_engine(
        EngineSpec("sglang", folder, start_timeout_s=240),
        host="127.0.0.1", token="a right token", log_path=log_path, python=SGLANG_PYTHON,
    ) as made.process:  # fmt: skip
        yield made


CASES = {
    "text": ("what is it?", lambda f: []),
    "sound": (AUDIO + "what?", lambda f: [sound(f, 1)]),
    "long sound": (AUDIO + "what?", lambda f: [sound(f, 2, 5.03)]),
    "2 sounds": ("is " + AUDIO + "as" + AUDIO + "?", lambda f: [
        sound(f, 1), sound(f, 3, 0.31),
    ]),
    "image and sound": (IMAGE + "and" + AUDIO + "?", lambda f: [source(f, 1), sound(f, 1)]),
    "video": (VIDEO + "what?", lambda f: [clip(f, 10)]),
    "video at 3 frames a second": (VIDEO + "what?", lambda f: [
        clip(f, 10)._replace(fps=3.0),
    ]),
    "video and its sound": (VIDEO + "what?", lambda f: [film(f, 20)]),
    "sound that ends before": ("so" + VIDEO + "?", lambda f: [film(f, 21, rate=8, heard_s=0.3)]),
    "two of them": (VIDEO + "or" + AUDIO + "or" + VIDEO + IMAGE + "?", lambda f: [
        film(f, 22), sound(f, 1), film(f, 23, heard_s=3.1), source(f, 1),
    ]),
    "all of it": (VIDEO + "a" + AUDIO + "b" + IMAGE + "?", lambda f: [
        clip(f, 10), sound(f, 2, 2.5), source(f, 1),
    ]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_logprobs_are_hugging_faces_of_the_same_arrays(hearer, tmp_path, case):
    text, media = CASES[case]
    prompt = hearer.prompt(text, *media(tmp_path))
    [generation] = ask(hearer, [prompt])
    reference = hearer.logprobs(prompt, generation.token_ids)
    assert (torch.tensor(generation.logprobs) - reference).abs().max() <= TOLERANCE


def test_sounds_of_all_lengths_are_heard_apart(hearer, tmp_path):
    """Requests begin together, and a sound is heard as if it were alone; twice, from the cache."""
    seconds = [0.31, 0.8, 0.99, 1.0, 1.7, 2.0, 3.3, 0.31]
    prompts = [
        hearer.prompt(AUDIO + "what?", sound(tmp_path, 100 + n, s)) for n, s in enumerate(seconds)
    ]
    for _ in range(2):
        for prompt, made in zip(prompts, ask(hearer, prompts, new=3), strict=True):
            reference = hearer.logprobs(prompt, made.token_ids)
            assert (torch.tensor(made.logprobs) - reference).abs().max() <= TOGETHER
    other = hearer.logprobs(prompts[0], made.token_ids)
    assert prompts[0][0] == prompts[-1][0] and (other - reference).abs().max() > 1e-3


def test_placeholders_in_a_draft_are_text(hearer, tmp_path):
    prompt = hearer.prompt(AUDIO + "what?", sound(tmp_path, 1))
    draft = [65, hearer.audio, hearer.audio, 66, hearer.image, 67]
    [generation] = ask(hearer, [prompt], draft=draft, new=18)
    reference = hearer.logprobs(prompt, generation.token_ids)
    got = torch.tensor(generation.logprobs)
    assert generation.token_ids[:6] == draft and len(got) == 18
    assert (got - reference)[6:].abs().max() <= TOLERANCE


def test_an_update_of_the_tower_that_hears_is_heard_at_once(hearer, tmp_path):
    prompt = hearer.prompt(AUDIO + "what?", sound(tmp_path, 79))
    [before] = ask(hearer, [prompt])
    folder = tmp_path / "other"
    make(folder, kind="omni", seed=6, like=hearer.whole)
    client = hearer.process.client()
    try:
        client.update_weights_from_disk(str(folder), 1)
        [after] = ask(hearer, [prompt])
        old = hearer.logprobs(prompt, after.token_ids)
        new = Hearer(folder).logprobs(prompt, after.token_ids)
        assert (torch.tensor(after.logprobs) - new).abs().max() <= TOLERANCE
        assert (new - old).abs().max() > 1e-2
        assert before.version_runs == [(0, 0)] and after.version_runs == [(0, 1)]
    finally:
        client.update_weights_from_disk(str(hearer.folder), 2)
        client.close()


def test_an_engine_that_hears_passes_its_probe(hearer):
    process = hearer.process
    able = capabilities.probe(process.url, process.token, timeout_s=120, model_path=hearer.folder)
    assert able.engine == "sglang"
