"""Processes in which media are read and decoded: whoever ends one is named, and harms nobody."""

import asyncio
import time

import pytest
from deadly import Deadly, Endless, Later, Once, Slow
from media_files import photo, prepared, recipe_of, source

from relax_hpc.data.media import workers
from relax_hpc.data.media.canonical import canonical, measure_media, measure_medium
from relax_hpc.data.media.workers import Decoders, MediaWorkers
from relax_hpc.errors import ConfigError, MediumError


@pytest.fixture
def recipe(tmp_path):
    return recipe_of(tmp_path, "qwen3_vl", image_tokens=[1, 64])


@pytest.fixture
def decoders():
    with Decoders(2) as made:
        yield made


def test_headers_are_those_of_the_media_in_order_and_the_first_error_is_raised(recipe, decoders):
    """The first one takes longest, so the second's error is there before the first's."""
    first, second = source(photo(64, 96)), source(photo(32, 64))
    slow = Slow(*first)
    one, other = measure_media([first, second], recipe)
    found = decoders.headers([slow, second], recipe).result()
    assert found == (one._replace(source=slow), other)
    for place, media in enumerate(([Slow(*source(b"")), source(b"BM")], [second, source(b"BM")])):
        with pytest.raises(MediumError, match=("is empty", "is BMP")[place]):
            decoders.headers(media, recipe).result()
        with pytest.raises(MediumError, match=("is empty", "is BMP")[place]):
            asyncio.run(awaited(decoders, media, recipe))


async def awaited(decoders, media, recipe):
    return await decoders.headers(media, recipe)


def test_a_header_that_ends_its_process_is_named_and_those_beside_it_are_read(recipe, decoders):
    good, bad = source(photo()), Deadly(*source(photo(), "video"))
    jobs = [decoders.headers([each], recipe) for each in (good, bad, good, good)]
    for number, job in enumerate(jobs):
        if number != 1:
            assert job.result() == measure_media([good], recipe)
    with pytest.raises(MediumError, match="line 3: video 1: ends the process that decodes it"):
        jobs[1].result()


def test_who_is_ended_by_somebody_else_is_read_again(recipe, decoders, tmp_path):
    (tmp_path / "a.png").write_bytes(photo())
    once = Once(*source(None))._replace(path=tmp_path / "a.png")
    [medium] = decoders.headers([once], recipe).result()
    assert medium.facts.height == 60 and (tmp_path / "a.times").read_text() == ".."


def test_a_header_that_is_never_read_is_named(recipe, decoders, monkeypatch):
    decoders.headers([source(photo())], recipe).result()
    monkeypatch.setattr(workers, "LONGEST_S", 1)
    with pytest.raises(MediumError, match=r"line 3: image 1: ends .* or keeps it for more"):
        decoders.headers([Endless(*source(photo()))], recipe).result()


def test_headers_that_nobody_waits_for_any_more_are_not_read(recipe):
    with Decoders(1) as decoders:
        slow = decoders.headers([Slow(*source(photo()))], recipe)
        rest = decoders.headers([Slow(*source(photo()))] * 50, recipe)
        begun = time.perf_counter()
        with pytest.raises(TimeoutError):
            asyncio.run(asyncio.wait_for(rest, 0.1))
        slow.result()
        decoders.headers([source(photo())], recipe).result()
        assert time.perf_counter() - begun < 30, "fifty of them take fifty seconds"


def test_a_medium_that_kills_its_decoder_is_named_and_others_are_decoded(recipe, tmp_path):
    good = measure_medium(source(photo(64, 96)), recipe)
    bad = good._replace(source=Deadly(*good.source))

    async def run(decoders):
        async with MediaWorkers(recipe, decoders, tmp_path) as looks:

            async def look(medium):
                async with looks.prepare([medium], []) as made:
                    return made.view.media[0].digest

            return await asyncio.gather(
                *(look(each) for each in (bad, good, good, good)), return_exceptions=True
            )

    with Decoders(1) as decoders:
        [error, *digests] = asyncio.run(run(decoders))
    assert isinstance(error, ConfigError)
    assert "x.jsonl, line 3: image 1: ends the process that decodes it" in str(error)
    assert digests == [canonical(good, recipe).digest] * 3


def test_what_a_process_that_was_ended_had_written_is_written_again(recipe, decoders, tmp_path):
    (tmp_path / "a.png").write_bytes(photo())
    medium = measure_medium(source(None)._replace(path=tmp_path / "a.png"), recipe)
    medium = medium._replace(source=Later(*medium.source))
    made, _ = prepared(recipe, [medium], tmp_path, decoders=decoders)
    assert (tmp_path / "a.times").read_text() == "...."
    assert made.view.media[0].digest == canonical(medium, recipe).digest
