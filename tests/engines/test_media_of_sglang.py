"""SGLang is shown canonical arrays, and computes what Hugging Face computes of them."""

import asyncio
import json

import pytest
import seer as seeing
import torch
from engine_fixtures import started
from sglang_under_test import SGLANG_PYTHON

from relax_hpc.bus.shards.encode import from_columns, to_columns
from relax_hpc.config import job_file
from relax_hpc.data.media.expand import MediaSpan
from relax_hpc.data.media.stored import StoredMedium
from relax_hpc.data.media.workers import Decoders, MediaWorkers
from relax_hpc.environments.session import Outcome
from relax_hpc.errors import EngineError
from relax_hpc.inference.generation import GenerationClient, Sampling
from relax_hpc.roles.rollout import prompt_check
from relax_hpc.roles.rollout.episodes import Episodes, Grouper
from relax_hpc.trainer.megatron.packing import position_ids

pytestmark = [pytest.mark.sglang, pytest.mark.skipif(not SGLANG_PYTHON, reason="needs SGLang")]

CHUNK = 24  # tokens of a prompt that are read at once; the long sound has more


@pytest.fixture(scope="module")
def seer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("seer")
    whole, made = seeing.make(folder), seeing.Seer(folder)
    made.whole = whole
    with started("sglang", folder, tmp_path_factory.mktemp("log") / "log") as made.process:
        yield made


@pytest.fixture(scope="module")
def hearer(tmp_path_factory):
    """On an engine that reads prompts in pieces, and puts off what runs beside another request."""
    folder = tmp_path_factory.mktemp("hearer")
    whole, made = seeing.make(folder, kind="omni"), seeing.Hearer(folder)
    made.whole = whole
    log, args = tmp_path_factory.mktemp("log") / "log", {"chunked_prefill_size": CHUNK}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_TEST_RETRACT", "1")
        with started("sglang", folder, log, args=args) as made.process:
            yield made


@pytest.fixture
def engine(request):
    return request.getfixturevalue(request.param)


of_both = pytest.mark.parametrize("engine", ["seer", "hearer"], indirect=True)


@pytest.mark.parametrize(
    ("engine", "case"),
    [*(("seer", case) for case in seeing.SEEN), *(("hearer", case) for case in seeing.HEARD)],
    indirect=["engine"],
)
def test_logprobs_are_hugging_faces_of_the_same_arrays(engine, tmp_path, case):
    text, media = (seeing.SEEN | seeing.HEARD)[case]
    prompt = engine.prompt(text, *media(tmp_path))
    [generation] = seeing.ask(engine, [prompt])
    assert engine.gap(prompt, generation).max() <= seeing.TOLERANCE


def test_placeholders_in_a_draft_are_text(seer, tmp_path):
    prompt = seer.prompt(seeing.IMAGE + "what?", seeing.source(tmp_path, 1))
    draft = [65, seer.image, seer.image, 66, seer.video, 67]
    [generation] = seeing.ask(seer, [prompt], draft=draft, new=18)
    assert generation.token_ids[:6] == draft and len(generation.logprobs) == 18
    assert seer.gap(prompt, generation)[6:].max() <= seeing.TOLERANCE


@of_both
def test_media_are_never_confused(engine, tmp_path):
    """Images of one size, after the same tokens; sounds of all lengths. Twice, from the cache."""
    if isinstance(engine, seeing.Hearer):
        seconds = [0.31, 0.8, 0.99, 1.0, 1.7, 2.0, 3.3, 0.31]
        text, media = (
            seeing.AUDIO,
            [seeing.sound(tmp_path, 100 + n, s) for n, s in enumerate(seconds)],
        )
    else:
        text, media = seeing.IMAGE, [seeing.source(tmp_path, n) for n in range(100, 124)]
    prompts = [engine.prompt(text + "what?", each) for each in media]
    for _ in range(2):
        for prompt, made in zip(prompts, seeing.ask(engine, prompts, new=3), strict=True):
            assert engine.gap(prompt, made).max() <= seeing.TOGETHER
    of_last, of_first = (engine.logprobs(each, made.token_ids) for each in (prompt, prompts[0]))
    assert prompts[0][0] == prompt[0] and (of_first - of_last).abs().max() > 1e-3


def test_an_array_that_is_not_of_its_digest_is_refused(seer, tmp_path):
    def wrong(view):
        return view._replace(media=tuple(m._replace(digest=bytes(16)) for m in view.media))

    prompt = seer.prompt(seeing.IMAGE + "what?", seeing.source(tmp_path, 78))
    with pytest.raises(EngineError, match="holds an array of digest"):
        seeing.ask(seer, [prompt], before=wrong)


@of_both
def test_an_update_of_the_tower_is_seen_at_once(engine, tmp_path):
    kind = "omni" if isinstance(engine, seeing.Hearer) else "vl"
    seeing.make(tmp_path / "other", kind=kind, seed=6, like=engine.whole)
    if kind == "vl":
        prompt = engine.prompt(seeing.IMAGE + "what?", seeing.source(tmp_path, 79))
    else:
        prompt = engine.prompt(seeing.AUDIO + "what?", seeing.sound(tmp_path, 79))
    seeing.assert_update_is_seen(engine, type(engine)(tmp_path / "other"), prompt)


class Client:
    def __init__(self, client):
        self._client = client

    async def sample(self, given, draft, how, *, seed, homes):
        sampling = Sampling(how.temperature, how.max_new_tokens, ignore_eos=True, view=how.view)
        return await self._client.sample(given, seed, sampling, draft=draft)


class Half:
    async def rollout(self, prompt, session):
        await session.chat()
        return Outcome({"half": 0.5})


def groups(seer, folder, environment, count, **media):
    """The first prompt groups of the data in a folder, of three siblings; `media` are settings."""
    settings = job_file.validate(
        {
            "name": "t", "model": {"path": str(seer.folder)},
            "prompts": {"train": str(folder / "train.jsonl"), "media": media},
            "rollout": {"samples_per_prompt": 3, "max_new_tokens": 9},
            "engines": {"rollout": {"kind": "sglang"}}, "schedule": {"num_steps": 1},
        },
        source="test",
    )  # fmt: skip
    sources = prompt_check.sources_of(settings, prompt_check.open_files(settings), seer.tokens)

    async def run():
        async with (
            MediaWorkers(seer.recipe, Decoders(1)) as workers,
            GenerationClient(seer.process.url, seer.process.token) as client,
        ):
            episodes = Episodes(
                settings, environment, Client(client), sources.train.conversation, None,
                max_tokens=1000, workers=workers,
                media_tokens=sources.train.media_tokens,
            )  # fmt: skip
            group = Grouper(settings, sources.train, episodes)
            return await asyncio.gather(*(group(guid, 0) for guid in range(count)))

    return asyncio.run(run())


class Shows:
    """Shows an image of its own in the second turn, and says something in the third."""

    def __init__(self, folder):
        self._path = str(folder / "more.png")
        seeing.image(301, 64, 64).save(self._path)

    async def rollout(self, prompt, session):
        await session.chat(max_new_tokens=5)
        more = [{"type": "text", "text": "and "}, {"type": "image", "image": self._path}]
        for content in (more, "so?"):
            user = {"role": "user", "content": content}
            await session.chat([*session.messages, user], max_new_tokens=6)
        return Outcome({"all": 1.0})


def test_an_image_that_an_environment_adds_is_seen_from_its_turn_on(seer, tmp_path):
    seeing.image(300, 100, 150).save(tmp_path / "a.png")
    row = {"prompt": "<image> which?", "images": ["a.png"], "answer": "1"}
    (tmp_path / "train.jsonl").write_text(json.dumps(row) + "\n")
    [group] = groups(seer, tmp_path, Shows(tmp_path), 1)
    others = []
    for row in group.trajectories:
        assert [m.kind.name for m in row.media] == ["PNG", "PNG"] and row.segment == 0
        media = [StoredMedium(m, "a row").canonical(seer.recipe) for m in row.media]
        spans = [MediaSpan(*map(int, span)) for span in row.media_spans]
        tokens, starts = row.token_ids.tolist(), [int(s) for s, kind in row.turns if kind == 1]
        assert len(starts) == 3 and starts[0] < spans[1].first < starts[1]
        for start, size in zip(starts, (5, 6, 6), strict=True):
            sampled = torch.from_numpy(row.columns["rollout_logprobs"][start : start + size])
            shown = [span for span in spans if span.first < start]
            there = media[: len(shown)]
            reference = seer.logprobs_of(tokens[:start], there, shown, tokens[start:][:size])
            assert (sampled - reference).abs().max() <= seeing.TOGETHER
            if len(shown) == 2:
                swapped = [media[0], media[1]._replace(array=255 - media[1].array)]
                other = seer.logprobs_of(tokens[:start], swapped, shown, tokens[start:][:size])
                others.append(float((sampled - other).abs().max()))
    assert min(others) > 1e-2, "the image of the second turn matters"


def assert_sampled_of(engine, row, media):
    """The row's response has Hugging Face's logprobs of these media; (prompt, spans)."""
    spans = [MediaSpan(*map(int, span)) for span in row.media_spans]
    tokens = row.token_ids.tolist()
    ids, response = tokens[: row.prompt_len], tokens[row.prompt_len :]
    reference = engine.logprobs_of(ids, media, spans, response)
    sampled = torch.from_numpy(row.columns["rollout_logprobs"][row.prompt_len :])
    assert len(response) == 9 and (sampled - reference).abs().max() <= seeing.TOGETHER
    return ids, spans


def heard(medium):
    """As Hugging Face is told: all sounds are of videos."""
    is_of_video = medium.extent.modality == "audio"
    return medium._replace(extent=medium.extent._replace(is_of_video=is_of_video))


def test_a_video_of_the_data_is_heard_by_engine_and_trainer_alike(hearer, tmp_path):
    """What was sampled has Hugging Face's logprobs of what the bus has; so have positions."""
    names = [
        seeing.film(tmp_path, n, heard_s=seconds).path.name for n, seconds in ((30, 2.0), (31, 0.9))
    ]
    rows = [
        {"prompt": "<video> or <video>?", "videos": names, "answer": "1"},
        {"prompt": "what is <video>?", "videos": names[1:], "answer": "1"},
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"advanced": {"audio_in_video": True}, "video_tokens_per_frame": [2, 24]}
    for group in groups(hearer, tmp_path, Half(), 2, **settings):
        for row in from_columns(to_columns([group])):
            assert len(row.media) == 2 * len(rows[row.prompt_index]["videos"])
            media = [heard(StoredMedium(m, "a row").canonical(hearer.recipe)) for m in row.media]
            ids, spans = assert_sampled_of(hearer, row, media)
            expected = hearer._positions(ids, [m.extent for m in media], spans)[:, 0]
            found = position_ids([row], 0, hearer.recipe).T
            assert torch.equal(found[:, : len(ids)].float(), expected)
            assert (found[:, len(ids) :] == expected[:, -1].max() + 1 + torch.arange(9)).all()
