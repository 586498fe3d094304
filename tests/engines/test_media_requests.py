"""How an engine is asked about media: by files, by their contents, or not at all."""

import asyncio
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from engine_fixtures import started

from relax_hpc.data.media import spool
from relax_hpc.data.media.expand import MediaSpan
from relax_hpc.data.media.extent import Extent
from relax_hpc.data.media.spool import MediaView, Spooled
from relax_hpc.errors import EngineError
from relax_hpc.inference import capabilities
from relax_hpc.inference.generation import GenerationClient, Sampling
from relax_hpc.inference.sglang import receive
from relax_hpc.inference.sglang.recent_tensors import RecentTensors

ANSWER = {
    "meta_info": {
        "completion_tokens": 1, "output_token_logprobs": [[-0.5, 7, None]],
        "weight_version": "3", "finish_reason": {"type": "length"},
    }
}  # fmt: skip


class Handler(BaseHTTPRequestHandler):
    """Answers one token, or that files are not there."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append(body)
        sent = spool.view_of(body["image_data"][0]) if "image_data" in body else None
        chunk = ANSWER
        if sent and not sent.contents and self.server.is_elsewhere:
            chunk = {"error": {"message": f"{spool.MISSING}: nothing there", "code": 400}}
        elif sent and self.server.elsewhere:
            try:
                self.server.elsewhere.answer(sent)
            except ValueError as error:
                chunk = {"error": {"message": str(error), "code": 400}}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\ndata: [DONE]\n\n")

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.seen, server.is_elsewhere, server.daemon_threads = [], False, True
        server.elsewhere = None
        server.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=[0.02])
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def view(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((1, 64, 96, 3), np.uint8))
    extent = Extent("image", (6,), (64, 96), (1, 4, 6))
    medium = Spooled(extent, bytes(range(16)), tmp_path / "a.npy")
    return MediaView((medium,), (MediaSpan(0, 2, 6),))


def ask(server, view, times=1):
    async def run():
        async with GenerationClient(server.url, "t") as client:
            how = Sampling(1.0, 1, view=view)
            return [await client.sample([1] * 9, 5, how, version=3) for _ in range(times)]

    return asyncio.run(run())


def test_an_engine_of_this_node_is_told_where_the_files_lie(server, view):
    [done] = ask(server, view)
    assert (done.token_ids, done.version_runs) == ([7], [(0, 3)])
    [body] = server.seen
    assert body["extra_key"] == f"v3-{view.digest.hex()}"
    assert spool.view_of(body["image_data"][0]) == spool.SentView(view, 3)
    assert len(json.dumps(body)) < 1000, "no array travels"


def test_media_of_other_digests_have_other_cached_prefixes(server, view):
    [medium] = view.media
    other = view._replace(media=(medium._replace(digest=bytes(16)),))
    ask(server, view), ask(server, other), ask(server, None)
    first, second, third = (body["extra_key"] for body in server.seen)
    assert len({first, second, third}) == 3 and third == "v3"


def test_an_engine_elsewhere_says_so_once_and_is_sent_the_arrays(server, view):
    server.is_elsewhere = True
    assert [done.token_ids for done in ask(server, view, times=2)] == [[7], [7]]
    sent = [spool.view_of(body["image_data"][0]).contents for body in server.seen]
    content = Path(view.media[0].path).read_bytes()
    assert sent == [(), (content,), (content,)]


class Elsewhere:
    """What an engine of another node keeps. The second who names a file waits to be told that it is
    not there until the first comes with what is in it."""

    def __init__(self):
        self.kept, self.loop = RecentTensors(1000), asyncio.new_event_loop()
        self.named, self.come = [], threading.Event()
        self.first, self.again = threading.Event(), threading.Event()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def answer(self, sent):
        if sent.contents:
            assert self.again.wait(20)
        asyncio.run_coroutine_threadsafe(self._of(sent), self.loop).result(20)

    async def _of(self, sent):
        making = asyncio.create_task(
            self.kept.of(sent.view.media[0].digest, lambda: self._made(sent))
        )
        await asyncio.sleep(0)
        if sent.contents:
            self.come.set()
        return await making

    def _made(self, sent):
        if sent.contents:
            return torch.from_numpy(spool.array_in(sent.contents[0]).ravel()[:9])
        self.named.append(sent)
        (self.again if self.first.is_set() else self.first).set()
        assert len(self.named) == 1 or self.come.wait(20)
        raise ValueError(f"{spool.MISSING}: not on this node")


def test_contents_are_looked_at_though_another_task_has_just_named_the_file(server, view):
    server.elsewhere = Elsewhere()

    async def run():
        how = Sampling(1.0, 1, view=view)
        async with (
            GenerationClient(server.url, "t") as one,
            GenerationClient(server.url, "t") as other,
        ):
            first = asyncio.create_task(one.sample([1] * 9, 5, how, version=3))
            assert await asyncio.to_thread(server.elsewhere.first.wait, 20)
            return await asyncio.gather(first, other.sample([1] * 9, 5, how, version=3))

    assert [done.token_ids for done in asyncio.run(run())] == [[7], [7]]


def test_the_embedded_engine_refuses_media_by_name(checkpoints, view, tmp_path):
    with started("embedded", checkpoints[0], tmp_path / "engine.log") as process:

        async def run():
            async with GenerationClient(process.url, process.token) as client:
                await client.sample([5, 6, 7], 1, Sampling(1.0, 2, view=view))

        with pytest.raises(EngineError) as caught:
            asyncio.run(run())
    said = str(caught.value)
    assert "the embedded engine takes no images" in said and '"sglang"' in said


class Refusing:
    """An engine that does not know our processor."""

    url = "http://e"

    def ask(self, method, path, body):
        assert spool.view_of(body["image_data"][0]).view.media[0].path.exists()
        raise EngineError("cannot load relax-media:{...}")


def test_an_engine_that_cannot_be_shown_an_image_is_named_at_its_start(tmp_path):
    record = {"model_type": "qwen3_vl", "image_token_id": 9}
    (tmp_path / "config.json").write_text(json.dumps(record))
    (tmp_path / "preprocessor_config.json").write_text("{}")
    with pytest.raises(EngineError, match=r"SGLang 0\.9\.9 does not take images .*: cannot load"):
        capabilities._show(Refusing(), tmp_path, "0.9.9")


@pytest.mark.parametrize("module", ["mm_schedule", "mm_utils"])
def test_features_of_old_weights_are_forgotten_where_each_sglang_keeps_them(monkeypatch, module):
    kept = {1: "feature"}
    monkeypatch.setitem(
        sys.modules, f"sglang.srt.managers.{module}", SimpleNamespace(embedding_cache=kept)
    )
    receive.forget()
    assert kept == {}
