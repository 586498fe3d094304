"""SGLang is shown canonical pixels, and computes what Hugging Face computes of them."""

import asyncio
import json
import time

import numpy as np
import pytest
import torch
from engine_fixtures import started
from seer import (
    IMAGE,
    TOGETHER,
    TOLERANCE,
    VIDEO,
    Seer,
    ask,
    assert_update_is_seen,
    clip,
    image,
    make,
    source,
)
from sglang_under_test import SGLANG_PYTHON

from relax_hpc.bus import layout
from relax_hpc.bus.producer import Producer
from relax_hpc.bus.reader import Reader
from relax_hpc.bus.tools import inventory
from relax_hpc.config import job_file
from relax_hpc.data.media.expand import MediaSpan
from relax_hpc.data.media.stored import DECODERS, StoredMedium, decoders
from relax_hpc.data.media.workers import Decoders, MediaWorkers
from relax_hpc.environments.environment import Outcome
from relax_hpc.errors import EngineError
from relax_hpc.inference import capabilities
from relax_hpc.inference.generation import Draft, GenerationClient, Sampling
from relax_hpc.roles.rollout import prompt_check
from relax_hpc.roles.rollout.episodes import Episodes, Grouper
from relax_hpc.runtime.paths import BusPaths

THOUSANDS = 10_000

pytestmark = [pytest.mark.sglang, pytest.mark.skipif(not SGLANG_PYTHON, reason="needs SGLang")]


@pytest.fixture(scope="module")
def seer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("seer")
    make(folder)
    made = Seer(folder)
    log_path = tmp_path_factory.mktemp("log") / "engine.log"
    with started("sglang", folder, log_path) as made.process:
        yield made


CASES = {
    "image": (IMAGE + "what?", lambda f: [source(f, 1)]),
    "2 images": ("is " + IMAGE + "as" + IMAGE + "?", lambda f: [
        source(f, 1), source(f, 2, height=128, width=64),
    ]),
    "video": (VIDEO + "what?", lambda f: [clip(f, 10)]),
    "image and video": (IMAGE + "in" + VIDEO + "?", lambda f: [source(f, 1), clip(f, 10)]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_logprobs_are_hugging_faces_of_the_same_pixels(seer, tmp_path, case):
    text, media = CASES[case]
    prompt = seer.prompt(text, *media(tmp_path))
    [generation] = ask(seer, [prompt])
    assert seer.gap(prompt, generation).max() <= TOLERANCE


def test_placeholders_in_a_draft_are_text(seer, tmp_path):
    prompt = seer.prompt(IMAGE + "what?", source(tmp_path, 1))
    draft = [65, seer.image, seer.image, 66, seer.video, 67]
    [generation] = ask(seer, [prompt], draft=draft, new=18)
    assert generation.token_ids[:6] == draft and len(generation.logprobs) == 18
    assert seer.gap(prompt, generation)[6:].max() <= TOLERANCE


@pytest.mark.soak
def test_thousands_of_images_of_one_size_are_never_confused(seer, tmp_path):
    """Each is asked once, all in turn, then a part again, from the caches."""
    began = time.monotonic()
    prompts = [seer.prompt(IMAGE + "what?", source(tmp_path, n)) for n in range(THOUSANDS)]
    references, worst = {}, 0.0
    order = [*range(THOUSANDS), *range(0, THOUSANDS, 10)]
    for first in range(0, len(order), 250):
        numbers = order[first : first + 250]
        done = ask(seer, [prompts[n] for n in numbers], new=1)
        for number, made in zip(numbers, done, strict=True):
            key = number, made.token_ids[0]
            if key not in references:
                references[key] = float(seer.logprobs(prompts[number], made.token_ids)[0])
            worst = max(worst, abs(made.logprobs[0] - references[key]))
    values = np.array(list(references.values()))
    apart = np.abs(values - np.roll(values, 1))
    print(f"\n{THOUSANDS} images: {worst:.1e} nats, {time.monotonic() - began:.0f} s")
    assert worst <= TOGETHER and np.median(apart) > 1e-2


def test_images_of_one_size_are_never_confused(seer, tmp_path):
    """The same text, token by token, and the same place of the image."""
    prompts = [seer.prompt(IMAGE + "what?", source(tmp_path, n)) for n in range(100, 124)]
    assert len({tuple(ids) for ids, _, _ in prompts}) == 1
    for _ in range(2):
        for prompt, made in zip(prompts, ask(seer, prompts, new=3), strict=True):
            assert seer.gap(prompt, made).max() <= TOGETHER
    of_last, of_first = (seer.logprobs(each, made.token_ids) for each in (prompt, prompts[0]))
    assert (of_first - of_last).abs().max() > 1e-2, "the image matters"


def test_an_engine_elsewhere_is_sent_the_arrays(seer, tmp_path):
    def moved(view):
        """The path leads nowhere once the request was refused, and to the file before."""
        nowhere = tuple(
            each._replace(path=Elsewhere(each.path, f"/nowhere/{each.path.name}"))
            for each in view.media
        )
        return view._replace(media=nowhere)

    prompt = seer.prompt(IMAGE + "what?", source(tmp_path, 77))
    [generation] = ask(seer, [prompt], before=moved)
    assert seer.gap(prompt, generation).max() <= TOLERANCE


class Elsewhere:
    """A file that has another path on the engine's node."""

    def __init__(self, path, there):
        self._path, self._there = path, there

    def __str__(self):
        return self._there

    def read_bytes(self):
        return self._path.read_bytes()


def test_an_array_that_is_not_of_its_digest_is_refused(seer, tmp_path):
    def wrong(view):
        return view._replace(media=tuple(m._replace(digest=bytes(16)) for m in view.media))

    prompt = seer.prompt(IMAGE + "what?", source(tmp_path, 78))
    with pytest.raises(EngineError, match="holds an array of digest"):
        ask(seer, [prompt], before=wrong)


def test_an_update_of_the_tower_is_seen_at_once(seer, tmp_path):
    make(tmp_path / "other", seed=6, like=seer.model)
    prompt = seer.prompt(IMAGE + "what?", source(tmp_path, 79))
    assert_update_is_seen(seer, Seer(tmp_path / "other"), prompt)


def test_an_aborted_response_goes_on_from_its_draft(seer, tmp_path):
    prompt, draft = seer.prompt(IMAGE + "what?", source(tmp_path, 80)), Draft()

    async def run():
        ids, media, spans = prompt
        async with (
            MediaWorkers(seer.recipe, Decoders(1)) as workers,
            workers.prepare(media, spans) as made,
            GenerationClient(seer.process.url, seer.process.token, tokens_per_chunk=4) as client,
        ):
            how = Sampling(1.0, 300, ignore_eos=True, view=made.view)
            first = asyncio.create_task(client.sample(ids, 1, how, draft=draft))
            while len(draft.token_ids) < 8:
                await asyncio.sleep(0.01)
            await asyncio.to_thread(seer.process.client().abort_all)
            await first
            cut = len(draft.token_ids)
            return cut, await client.sample(ids, 1, how, draft=draft)

    cut, whole = asyncio.run(run())
    assert 8 <= cut < 300 == len(whole.token_ids)
    assert seer.gap(prompt, whole).max() <= TOLERANCE


class Client:
    """An episode's way to one engine."""

    def __init__(self, client):
        self._client = client

    async def sample(self, given, draft, how, *, seed, homes):
        sampling = Sampling(how.temperature, how.max_new_tokens, ignore_eos=True, view=how.view)
        return await self._client.sample(given, seed, sampling, draft=draft)


class Half:
    """A reward for everything."""

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
        image(301, 64, 64).save(self._path)

    async def rollout(self, prompt, session):
        await session.chat(max_new_tokens=5)
        more = [{"type": "text", "text": "and "}, {"type": "image", "image": self._path}]
        for content in (more, "so?"):
            user = {"role": "user", "content": content}
            await session.chat([*session.messages, user], max_new_tokens=6)
        return Outcome({"all": 1.0})


def test_an_image_that_an_environment_adds_is_seen_from_its_turn_on(seer, tmp_path):
    """Each turn has the logprobs that Hugging Face has of all that was shown before it."""
    image(300, 100, 150).save(tmp_path / "a.png")
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
            assert (sampled - reference).abs().max() <= TOGETHER
            if len(shown) == 2:
                swapped = [media[0], media[1]._replace(array=255 - media[1].array)]
                other = seer.logprobs_of(tokens[:start], swapped, shown, tokens[start:][:size])
                others.append(float((sampled - other).abs().max()))
    assert min(others) > 1e-2, "the image of the second turn matters"


def test_from_a_row_of_data_to_the_bus_and_back_it_is_one_set_of_pixels(seer, tmp_path):
    """Engine and trainer: logprobs of what was sampled are Hugging Face's of what is stored."""
    rows = []
    for number in range(2):
        names = [f"{number}-{place}.png" for place in range(1 + number)]
        for place, name in enumerate(names):
            image(200 + 10 * number + place, 100, 150).save(tmp_path / name)
        prompt = f"{'<image>' * len(names)} which?"
        rows.append({"prompt": prompt, "images": names, "answer": "1"})
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = groups(seer, tmp_path, Half(), 2)
    paths = BusPaths(tmp_path / "bus")
    layout.create(paths, ["rollout-0"], {"run": "test"})
    with Producer(paths, "rollout-0", {DECODERS: decoders()}) as producer:
        producer.put(made)
    reader, seen = Reader(paths), set()
    for guid in range(2):
        record = inventory.of_guid(paths, guid)
        for number, row in enumerate(reader.rows(record, range(3))):
            wanted = [(number, place) for place in range(len(row.media))]
            media = [each.canonical(seer.recipe) for each in reader.media(record, wanted)]
            tokens, spans = (
                row.token_ids.tolist(),
                [MediaSpan(*map(int, s)) for s in row.media_spans],
            )
            assert len(media) == len(spans) == rows[row.prompt_index]["prompt"].count("<image>")
            ids, response = tokens[: row.prompt_len], tokens[row.prompt_len :]
            reference = seer.logprobs_of(ids, media, spans, response)
            sampled = torch.from_numpy(row.columns["rollout_logprobs"][row.prompt_len :])
            assert len(response) == 9 and (sampled - reference).abs().max() <= TOGETHER
            seen.add(media[0].digest)
    assert len(seen) == 2


def test_an_engine_that_takes_media_passes_its_probe(seer):
    process = seer.process
    able = capabilities.probe(process.url, process.token, timeout_s=120, model_path=seer.folder)
    assert able.engine == "sglang"
