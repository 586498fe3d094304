"""From a row with media to what an engine is shown and what the bus is given."""

import asyncio
import base64
import stat
from contextlib import asynccontextmanager

import numpy as np
import pytest
from chat_fakes import served
from deadly import Slow, turns_of
from episode_fakes import answer
from media_files import (
    model_folder,
    photo,
    prepared,
    prompts_of,
    recipe_of,
    seen,
    source,
    tokenizer,
    write_lines,
)  # fmt: skip
from roles.role_fakes import config

from relax_hpc.bus.shards.encode import from_columns, to_columns
from relax_hpc.data.media import spool as wire
from relax_hpc.data.media.canonical import canonical, measure_medium
from relax_hpc.data.media.expand import MediaSpan
from relax_hpc.data.media.spool import MediaView
from relax_hpc.data.media.workers import Decoders, MediaWorkers, Prepared
from relax_hpc.data.records import Records
from relax_hpc.data.rows import TaskShare
from relax_hpc.environments import session as turn_media
from relax_hpc.environments.record import record_of
from relax_hpc.environments.session import Outcome
from relax_hpc.errors import RelaxError
from relax_hpc.roles.rollout.episodes import Episodes, Grouper
from relax_hpc.roles.rollout.heldout import heldout_shares
from relax_hpc.schema import MediaKind


@pytest.fixture
def prompts(tmp_path):
    """A prompt of two images: one of 2 x 3 tokens, one of 1 x 2."""
    (tmp_path / "a.png").write_bytes(photo(64, 96))
    (tmp_path / "b.jpg").write_bytes(photo(32, 64, "JPEG", seed=1))
    row = {"prompt": "<image>or<image>?", "images": ["a.png", "b.jpg"], "answer": "1"}
    file = write_lines(tmp_path / "x.jsonl", [row])
    model = model_folder(tmp_path / "model", "qwen3_vl")
    return prompts_of(file, model, tokenizer(), media={"image_tokens": [1, 64]})


@pytest.fixture
def spool(tmp_path):
    made = tmp_path / "spool"
    made.mkdir()
    return made


class Engine:
    """Looks at what it is shown, and answers in numbers."""

    def __init__(self):
        self.seen, self.files = [], []

    async def sample(self, given, draft, how, *, seed, homes):
        media = how.view.media if how.view else ()
        self.files.append([each.path for each in media])
        self.seen.append((list(given), how.view, [np.load(m.path) for m in media]))
        return answer(draft, [5, 6], [-1.0, -0.5], [(0, 3)])


class Talk:
    """Asks the prompt, and says some more things; of None it forgets what there was."""

    def __init__(self, *more):
        self._more = more

    async def rollout(self, prompt, session):
        await session.chat()
        for content in self._more:
            before = [] if content is None else session.messages
            said = "anew" if content is None else content
            await session.chat([*before, {"role": "user", "content": said}])
        return Outcome({"all": 1.0})


def group_of(prompts, engine, spool, *more, records=None, environment=None):
    settings = config(rollout__samples_per_prompt=3)

    async def run():
        media = prompts.media_tokens
        async with MediaWorkers(media.recipe, media.decoders, spool) as workers:
            made = Episodes(
                settings, environment or Talk(*more), engine, prompts.conversation, None,
                max_tokens=1000, workers=workers, media_tokens=prompts.media_tokens,
            )  # fmt: skip
            grouper = Grouper(settings, prompts, made)
            grouper.running = {} if records is None else {0: records}
            group = await grouper(0, 0)
            assert not grouper.running and not grouper.asked
            await asyncio.sleep(0)
            return group, [path for path in spool.rglob("*") if path.is_file()]

    return asyncio.run(run())


def test_siblings_are_shown_the_canonical_arrays_and_the_bus_gets_bytes_and_digests(
    prompts, spool, tmp_path
):
    engine = Engine()
    group, left = group_of(prompts, engine, spool)
    prompt, recipe = prompts[0], prompts.media_tokens.recipe
    arrays = [canonical(each, recipe) for each in prompt.measured]
    assert [each.array.shape for each in arrays] == [(1, 64, 96, 3), (1, 32, 64, 3)]
    assert len(engine.seen) == 3 and len(set(map(str, engine.files))) == 1, "decoded once"
    for given, view, shown in engine.seen:
        assert given == prompt.token_ids
        assert all(np.array_equal(a.array, b) for a, b in zip(arrays, shown, strict=True))
        assert [each.digest for each in view.media] == [each.digest for each in arrays]
        assert [span.tokens for span in view.spans] == [6, 2]
    assert left == [] and list(spool.iterdir()) == [], "nothing is left in the spool"

    first = prompt.token_ids.index(prompts.tokenizer.convert_tokens_to_ids("<|image_pad|>"))
    for row in from_columns(to_columns([group])):
        # Six tokens of the first image, the end of it, "or", the begin of the next, and two.
        [[medium, start, count], [other, later, two]] = row.media_spans.tolist()
        assert (medium, start, count, other, two) == (0, first, 6, 1, 2)
        assert row.token_ids[later : later + 2].tolist() == [row.token_ids[first]] * 2
        assert (row.token_ids == row.token_ids[first]).sum() == 8
        assert [m.kind for m in row.media] == [MediaKind.PNG, MediaKind.JPEG]
        assert [m.canonical_xxh3 for m in row.media] == [each.digest for each in arrays]
        assert row.media[0].data.tobytes() == (tmp_path / "a.png").read_bytes()
    assert len(group.metrics) == 3, "how long a prompt waited for its media is told of each episode"
    assert len({each["media/prepare_s"] for each in group.metrics}) == 1
    rows = group.trajectories
    assert all(row.media[0] is rows[0].media[0] for row in rows), "siblings share them"


def said(text, **image):
    return [{"type": "image", **image}, {"type": "text", "text": text}]


def test_media_that_an_environment_adds_are_shown_from_that_turn_on(prompts, spool):
    """By hand: the prompt's images have 6 and 2 tokens, that of the second turn 4."""
    engine = Engine()
    data = photo(64, 64, seed=7)
    more = [said("and this?", image={"bytes": data}), "and now?"]
    group, left = group_of(prompts, engine, spool, *more)
    assert left == [] and list(spool.iterdir()) == []
    turns = [engine.seen[n : n + 3] for n in (0, 3, 6)]
    assert [len(view.media) for _, view, _ in engine.seen] == [2] * 3 + [3] * 6
    expected = seen(data, prompts.media_tokens.recipe)
    pad = prompts.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    for given, view, arrays in (*turns[1], *turns[2]):
        assert np.array_equal(arrays[2], expected.array)
        assert view.media[2].digest == expected.digest
        assert [(s.medium, s.tokens) for s in view.spans] == [(0, 6), (1, 2), (2, 4)]
        for span in view.spans:
            stretch = given[span.first - 1 : span.first + span.tokens + 1]
            assert stretch[1:-1] == [pad] * span.tokens and pad not in (stretch[0], stretch[-1])
        assert given[: len(prompts[0].token_ids)] == prompts[0].token_ids
    for row in from_columns(to_columns([group])):
        assert (row.segment, int(row.loss_mask.sum()), len(row.media)) == (0, 6, 3)
        assert row.media_spans.tolist() == [list(span) for span in turns[1][0][1].spans]
        assert row.media[2].data.tobytes() == data
        assert row.media[2].canonical_xxh3 == expected.digest


class TalkOverHttp:
    """Sends the prompt back as it was given, and then an image of its own."""

    def __init__(self, data):
        self.url = f"data:image/png;base64,{base64.b64encode(data).decode()}"

    async def rollout(self, prompt, session):
        messages = [*prompt.messages]
        async with served(session) as (_, client):
            messages.append(await client.message(messages))
            more = [{"type": "image_url", "image_url": {"url": self.url}},
                    {"type": "text", "text": "and this?"}]  # fmt: skip
            messages.append(await client.message([*messages, {"role": "user", "content": more}]))
        return Outcome({"all": 1.0})


def test_images_that_an_agent_sends_are_shown_as_those_of_an_environment(prompts, tmp_path):
    data = photo(64, 64, seed=7)
    engine = Engine()
    group, _ = group_of(prompts, engine, tmp_path, environment=TalkOverHttp(data))
    assert [len(view.media) for _, view, _ in engine.seen] == [2] * 3 + [3] * 3
    for row in group.trajectories:
        assert row.segment == 0 and row.loss_mask.sum() == 4
        assert row.media_spans[:, 2].tolist() == [6, 2, 4]
        assert row.media[2].data.tobytes() == data


def test_an_episode_that_goes_on_elsewhere_shows_the_same_media(prompts, tmp_path):
    """What was recorded is answered from the record; the turn that broke off is shown them."""
    more = [said("and this?", image={"bytes": photo(64, 64, seed=7)})]
    whole, _ = group_of(prompts, Engine(), tmp_path, *more)
    records = [record_of([row]) for row in whole.trajectories]
    for record in records:
        record.calls[-1].finish, record.calls[-1].is_over = None, False
        record.calls[-1].draft.cut(1)
    engine = Engine()
    again, _ = group_of(prompts, engine, tmp_path, *more, records=records)
    assert [len(view.media) for _, view, _ in engine.seen] == [3] * 3
    for row, before in zip(again.trajectories, whole.trajectories, strict=True):
        assert row.media_spans.tolist() == before.media_spans.tolist()
        assert [m.canonical_xxh3 for m in row.media] == [m.canonical_xxh3 for m in before.media]


def test_a_history_in_text_that_an_environment_writes_anew_is_shown_nothing(prompts, tmp_path):
    engine = Engine()
    group, _ = group_of(prompts, engine, tmp_path, None)
    assert sorted(0 if view is None else 2 for _, view, _ in engine.seen) == [0] * 3 + [2] * 3
    assert [len(row.media) for row in group.trajectories] == [2, 0] * 3


BAD_TURNS = {
    "of another kind": (said("?", image={"bytes": b"RIFF0000WAVE"}), "image 1: is WAV, of audio;"),
    "not taken": ([{"type": "audio", "audio": {"bytes": b""}}], "audio 1: is audio, which qwen3_v"),
    "a placeholder": ("<|image_pad|>", "the text holds <|image_pad|>, which stands for a medium"),
}


@pytest.mark.parametrize("case", BAD_TURNS)
def test_media_of_an_environment_that_cannot_be_shown_are_named(prompts, tmp_path, case):
    content, message = BAD_TURNS[case]
    with pytest.raises(RelaxError) as caught:
        group_of(prompts, Engine(), tmp_path, content)
    said = str(caught.value)
    assert "x.jsonl, line 1, a message of the environment: " in said and message in said


def shown_as(kind, monkeypatch):
    """Makes all media of rows and of environments such ones."""
    read, added = Records.__getitem__, turn_media.find_added_media

    def row(records, index):
        record = read(records, index)
        return record._replace(media=tuple(kind(*each) for each in record.media))

    monkeypatch.setattr(Records, "__getitem__", row)
    monkeypatch.setattr(
        turn_media, "find_added_media", lambda *given: tuple(kind(*each) for each in added(*given))
    )


async def test_the_loop_turns_while_headers_of_prompts_and_of_turns_are_read(
    prompts, tmp_path, monkeypatch
):
    data, before = photo(64, 64, seed=7), prompts[0]
    shown_as(Slow, monkeypatch)
    media = prompts.media_tokens
    message = {"role": "user", "content": said("?", image={"bytes": data})}

    @asynccontextmanager
    async def prepare():
        yield Prepared((), MediaView((), ()))

    async with MediaWorkers(media.recipe, media.decoders, tmp_path) as workers:
        turns, prompt = await turns_of(prompts.fetch(0))
        assert turns > 20 and prompt.token_ids == before.token_ids
        assert [each.facts for each in prompt.measured] == [m.facts for m in before.measured]
        monkeypatch.setattr(workers, "prepare", lambda *_: prepare())
        async with turn_media.TurnMedia(media, workers, prompts._settings) as more:
            given = turn_media.Given([1]), "x.jsonl, line 1", [message], "<|image_pad|>"
            added = more.add(*given, prompts.conversation.tokens)
            turns, found = await turns_of(added)
            assert turns > 20 and len(found.token_ids) == 1 + 4
        heldout = {"heldout": prompts}
        shares = heldout_shares(config(eval__heldout__num_prompts=1), TaskShare(0, 1), heldout)
        turns, found = await turns_of(shares)
        assert turns > 20 and [each.index for each in found["heldout"]] == [0]


@pytest.fixture
def recipe(tmp_path):
    return recipe_of(tmp_path, "qwen3_vl", image_tokens=[1, 64])


async def test_files_of_the_spool_are_private_shared_and_end_with_who_looks(recipe, tmp_path):
    """Two prompts show the same image: the file stays until both are done."""
    medium = measure_medium(source(photo(64, 96)), recipe)

    async with MediaWorkers(recipe, Decoders(1), tmp_path) as workers:
        async with workers.prepare([medium], []) as outer:
            async with workers.prepare([medium, medium], []) as inner:
                [one, two] = inner.view.media
                assert one.path == two.path == outer.view.media[0].path
            await asyncio.sleep(0)
            modes = [stat.S_IMODE(p.stat().st_mode) for p in (one.path, one.path.parent)]
            assert modes == [0o600, 0o700]
            assert [p.name for p in one.path.parent.iterdir()] == [one.digest.hex()]
        await asyncio.sleep(0)
        assert list(one.path.parent.iterdir()) == []
    assert not one.path.parent.exists()


async def test_who_is_cancelled_while_media_are_decoded_leaves_no_file(recipe, spool):
    medium = measure_medium(source(photo(1500, 1500, "JPEG")), recipe)

    async with MediaWorkers(recipe, Decoders(1), spool) as workers:

        async def look():
            async with workers.prepare([medium] * 3, []):
                pytest.fail("it was cancelled before")

        looking = asyncio.create_task(look())
        await asyncio.sleep(0.01)
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
        await asyncio.gather(*workers._tasks)
        await asyncio.sleep(0)
        assert [list(folder.iterdir()) for folder in spool.iterdir()] == [[]]


def test_a_view_is_the_same_after_the_wire_and_other_texts_are_refused(recipe, tmp_path):
    medium = measure_medium(source(photo(64, 96)), recipe)

    async def run():
        async with (
            MediaWorkers(recipe, Decoders(1), tmp_path) as workers,
            workers.prepare([medium], [MediaSpan(0, 4, 6)]) as made,
        ):
            sent = wire.view_of(wire.text_of(made.view, 7))
            assert sent == wire.SentView(made.view, 7)
            whole = wire.view_of(wire.text_of(made.view, 7, with_contents=True))
            [content] = whole.contents
            assert np.array_equal(wire.array_in(content), canonical(medium, recipe).array)

    asyncio.run(run())
    for text in (wire.BEGIN + "{}", wire.BEGIN + "no", wire.BEGIN + '{"media": [{}]}'):
        with pytest.raises(ValueError):
            wire.view_of(text)


def test_the_bus_gets_whichever_is_smaller_where_the_job_says_so(recipe, tmp_path):
    """64 tokens are 65,536 pixels, 196,608 bytes: fewer than this PNG has, more than that JPEG."""
    large, small = photo(512, 512), photo(256, 256, "JPEG", seed=1)
    assert len(small) < 65536 * 3 < len(large)
    shown = [measure_medium(source(each), recipe) for each in (large, small)]
    as_array, as_it_is = prepared(recipe, shown, tmp_path, "smaller")[0].media
    assert as_array.kind is MediaKind.TENSOR
    array = wire.array_in(as_array.data.tobytes())
    assert np.array_equal(array, canonical(shown[0], recipe).array)
    assert (as_it_is.kind, as_it_is.data.tobytes()) == (MediaKind.JPEG, small)
