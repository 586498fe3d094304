"""How an engine is asked about media: by files, by their contents, or not at all."""

import asyncio
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from aiohttp import web
from engine_fixtures import sampled, started
from fake_engines import reply, served

from relax_hpc.data.media import spool
from relax_hpc.data.media.expand import MediaSpan
from relax_hpc.data.media.extent import Extent
from relax_hpc.data.media.spool import MediaView, Spooled
from relax_hpc.errors import EngineError
from relax_hpc.inference.generation import GenerationClient, Sampling
from relax_hpc.inference.sglang import receive


class Engine:
    is_elsewhere = False

    def __init__(self):
        self.seen = []

    async def generate(self, request):
        body = await request.json()
        self.seen.append(body)
        sent = spool.view_of(body["image_data"][0]) if "image_data" in body else None
        if self.is_elsewhere and sent and not sent.contents:
            error = {"error": {"message": f"{spool.MISSING}: nothing there", "code": 400}}
            return web.Response(text=f"data: {json.dumps(error)}\n\n")
        return await reply(request)


@pytest.fixture
def view(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((1, 64, 96, 3), np.uint8))
    extent = Extent("image", (6,), (64, 96), (1, 4, 6))
    medium = Spooled(extent, bytes(range(16)), tmp_path / "a.npy")
    return MediaView((medium,), (MediaSpan(0, 2, 6),))


def ask(engine, view, times=1):
    async def run():
        async with served(engine) as [url], GenerationClient(url, "t") as client:
            how = Sampling(1.0, 1, view=view)
            return [await client.sample([1] * 9, 5, how, version=3) for _ in range(times)]

    return asyncio.run(run())


def test_an_engine_of_this_node_is_told_where_the_files_lie(view):
    [done] = ask(engine := Engine(), view)
    assert done.token_ids == [7, 8]
    [body] = engine.seen
    assert body["extra_key"] == f"v3-{view.digest.hex()}"
    assert spool.view_of(body["image_data"][0]) == spool.SentView(view, 3)
    assert len(json.dumps(body)) < 1000, "no array travels"


def test_media_of_other_digests_have_other_cached_prefixes(view):
    engine, [medium] = Engine(), view.media
    other = view._replace(media=(medium._replace(digest=bytes(16)),))
    ask(engine, view), ask(engine, other), ask(engine, None)
    first, second, third = (body["extra_key"] for body in engine.seen)
    assert len({first, second, third}) == 3 and third == "v3"


def test_an_engine_elsewhere_says_so_once_and_is_sent_the_arrays(view):
    engine = Engine()
    engine.is_elsewhere = True
    assert [done.token_ids for done in ask(engine, view, times=2)] == [[7, 8], [7, 8]]
    sent = [spool.view_of(body["image_data"][0]).contents for body in engine.seen]
    content = Path(view.media[0].path).read_bytes()
    assert sent == [(), (content,), (content,)]


def test_the_embedded_engine_refuses_media_by_name(checkpoints, view, tmp_path):
    said = '(?s)the embedded engine takes no images.*"sglang"'
    engine = started("embedded", checkpoints[0], tmp_path / "engine.log")
    with engine as process, pytest.raises(EngineError, match=said):
        sampled(process, [5, 6, 7], [1], view=view)


@pytest.mark.parametrize("module", ["mm_schedule", "mm_utils"])
def test_features_of_old_weights_are_forgotten_where_each_sglang_keeps_them(monkeypatch, module):
    kept = {1: "feature"}
    monkeypatch.setitem(
        sys.modules, f"sglang.srt.managers.{module}", SimpleNamespace(embedding_cache=kept)
    )
    receive.forget()
    assert kept == {}
