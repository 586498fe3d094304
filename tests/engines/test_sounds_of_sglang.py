"""SGLang hears canonical spectra beside what it sees, and computes what Hugging Face computes."""

import json

import pytest
import torch
from engine_fixtures import started
from seer import (
    AUDIO,
    IMAGE,
    TOGETHER,
    TOLERANCE,
    VIDEO,
    Hearer,
    ask,
    assert_update_is_seen,
    clip,
    film,
    make,
    sound,
    source,
)
from sglang_under_test import SGLANG_PYTHON
from test_media_of_sglang import Half, groups

from relax_hpc.bus.shards.encode import from_columns, to_columns
from relax_hpc.data.media.expand import MediaSpan
from relax_hpc.data.media.stored import StoredMedium
from relax_hpc.inference import capabilities
from relax_hpc.trainer.megatron.packing import position_ids

pytestmark = [pytest.mark.sglang, pytest.mark.skipif(not SGLANG_PYTHON, reason="needs SGLang")]


CHUNK = 24  # tokens of a prompt that are read at once; the long sound has more


@pytest.fixture(scope="module")
def hearer(tmp_path_factory):
    """On an engine that reads prompts in pieces, and puts off what runs beside another request."""
    folder = tmp_path_factory.mktemp("hearer")
    whole = make(folder, kind="omni")
    made = Hearer(folder)
    made.whole = whole
    log_path = tmp_path_factory.mktemp("log") / "engine.log"
    args = {"chunked_prefill_size": CHUNK}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_TEST_RETRACT", "1")
        with started("sglang", folder, log_path, args=args) as made.process:
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
    assert hearer.gap(prompt, generation).max() <= TOLERANCE


def test_sounds_of_all_lengths_are_heard_apart(hearer, tmp_path):
    """Requests begin together, and a sound is heard as if it were alone; twice, from the cache."""
    seconds = [0.31, 0.8, 0.99, 1.0, 1.7, 2.0, 3.3, 0.31]
    prompts = [
        hearer.prompt(AUDIO + "what?", sound(tmp_path, 100 + n, s)) for n, s in enumerate(seconds)
    ]
    for _ in range(2):
        for prompt, made in zip(prompts, ask(hearer, prompts, new=3), strict=True):
            assert hearer.gap(prompt, made).max() <= TOGETHER
    of_last, of_first = (hearer.logprobs(each, made.token_ids) for each in (prompt, prompts[0]))
    assert prompts[0][0] == prompt[0] and (of_first - of_last).abs().max() > 1e-3


def test_placeholders_in_a_draft_are_text(hearer, tmp_path):
    prompt = hearer.prompt(AUDIO + "what?", sound(tmp_path, 1))
    draft = [65, hearer.audio, hearer.audio, 66, hearer.image, 67]
    [generation] = ask(hearer, [prompt], draft=draft, new=18)
    assert generation.token_ids[:6] == draft and len(generation.logprobs) == 18
    assert hearer.gap(prompt, generation)[6:].max() <= TOLERANCE


def test_an_update_of_the_tower_that_hears_is_heard_at_once(hearer, tmp_path):
    make(tmp_path / "other", kind="omni", seed=6, like=hearer.whole)
    prompt = hearer.prompt(AUDIO + "what?", sound(tmp_path, 79))
    assert_update_is_seen(hearer, Hearer(tmp_path / "other"), prompt)


def heard(medium):
    """As Hugging Face is told: all sounds are of videos."""
    is_of_video = medium.extent.modality == "audio"
    return medium._replace(extent=medium.extent._replace(is_of_video=is_of_video))


def test_a_video_of_the_data_is_heard_by_engine_and_trainer_alike(hearer, tmp_path):
    """What was sampled has Hugging Face's logprobs of what the bus has; so have positions."""
    names = [
        film(tmp_path, seed, heard_s=seconds).path.name for seed, seconds in ((30, 2.0), (31, 0.9))
    ]
    rows = [
        {"prompt": "<video> or <video>?", "videos": names, "answer": "1"},
        {"prompt": "what is <video>?", "videos": names[1:], "answer": "1"},
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"audio_in_video": True, "video_tokens_per_frame": [2, 24]}
    for group in groups(hearer, tmp_path, Half(), 2, **settings):
        for row in from_columns(to_columns([group])):
            assert len(row.media) == 2 * len(rows[row.prompt_index]["videos"])
            media = [heard(StoredMedium(m, "a row").canonical(hearer.recipe)) for m in row.media]
            spans = [MediaSpan(*map(int, span)) for span in row.media_spans]
            tokens = row.token_ids.tolist()
            ids, response = tokens[: row.prompt_len], tokens[row.prompt_len :]
            reference = hearer.logprobs_of(ids, media, spans, response)
            sampled = torch.from_numpy(row.columns["rollout_logprobs"][row.prompt_len :])
            assert len(response) == 9 and (sampled - reference).abs().max() <= TOGETHER
            expected = hearer._positions(ids, [m.extent for m in media])[:, 0]
            found = position_ids([row], 0, hearer.recipe).T
            assert torch.equal(found[:, : len(ids)].float(), expected)
            assert (found[:, len(ids) :] == expected[:, -1].max() + 1 + torch.arange(9)).all()


def test_an_engine_that_hears_passes_its_probe(hearer):
    process = hearer.process
    able = capabilities.probe(process.url, process.token, timeout_s=120, model_path=hearer.folder)
    assert able.engine == "sglang"
