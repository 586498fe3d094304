"""One engine that is asked, and one way to say what went wrong: by threads and by an event loop."""

import asyncio
import socket
import threading
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from relax_hpc.errors import EngineError, EngineFaultError, EngineLostError
from relax_hpc.inference.http import AsyncHttp, Http


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.seen.append((self.path, dict(self.headers), self.client_address))
        if self.path == "/slow":
            self.server.over.wait(20)
        if self.path == "/endless":
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"4\r\nmore\r\n")
            self.server.over.wait(20)
            return
        status, body = {
            "/json": (200, b'{"a": 1}'),
            "/text": (200, b"fine"),
            "/refused": (200, b'{"success": false, "message": "no group g"}'),
            "/wrong": (400, b'{"message": "no such model"}'),
            "/broken": (503, b"down"),
            "/moved": (302, b""),
        }.get(self.path, (404, b"nothing here"))
        self.send_response(status)
        if self.path == "/moved":
            self.send_header("Location", "/json")
        self.send_header("Content-Length", str(len(body) + 10 * (self.path == "/cut")))
        self.end_headers()
        with suppress(BrokenPipeError):  # who asked has lost patience
            self.wfile.write(body)
        self.close_connection = self.path == "/cut"

    do_POST = do_OPTIONS = do_GET  # noqa: N815

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.seen, server.over, server.daemon_threads = [], threading.Event(), True
        server.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=[0.02])
        thread.start()
        yield server
        server.over.set()
        server.shutdown()
        thread.join()


@contextmanager
def asking(side, url):
    if side == "threads":
        with Http(url, "t", timeout_s=1) as http:
            yield http.ask
        return
    with asyncio.Runner() as runner:
        client = AsyncHttp(url, "t", silence_s=1)
        yield lambda *request: runner.run(client.ask(*request))
        runner.run(client.aclose())


both = pytest.mark.parametrize("side", ["threads", "loop"])


@both
def test_a_reply_is_json_or_nothing_and_status_200_alone_is_not_success(side, server):
    with asking(side, server.url) as ask:
        assert ask("GET", "/json") == {"a": 1}
        assert ask("POST", "/text", {"b": 2}) is None
        for path, kind, said in (
            ("/refused", EngineError, "HTTP 200: no group g"),
            ("/wrong", EngineError, "HTTP 400: no such model"),
            ("/absent", EngineError, "HTTP 404: nothing here"),
            ("/moved", EngineError, "HTTP 302: "),
            ("/broken", EngineFaultError, "HTTP 503: down"),
        ):
            with pytest.raises(EngineError) as error:
                ask("GET", path)
            assert type(error.value) is kind
            assert str(error.value) == f"{server.url}{path}: {said}"
    path, headers, _ = server.seen[1]
    assert (path, headers["Authorization"]) == ("/text", "Bearer t")
    assert headers["Content-Type"] == "application/json"


@both
@pytest.mark.parametrize("path", ["/slow", "/nobody"])
def test_no_answer_names_who_was_asked_for_what(side, server, path):
    url = server.url if path == "/slow" else "http://127.0.0.1:9"
    with asking(side, url) as ask, pytest.raises(EngineLostError, match=f"^{url}{path}: "):
        ask("GET", path)


def test_a_stream_that_was_cut_off_is_lost_and_the_next_exchange_has_another_connection(server):
    async def run():
        client = AsyncHttp(server.url, "t", silence_s=5)
        for _ in range(2):
            await client.ask("GET", "/json")
        with pytest.raises(EngineLostError, match="/cut: "):
            await client.ask("GET", "/cut")
        async for _ in client.stream("GET", "/json"):
            break
        await client.ask("GET", "/json")
        await client.aclose()

    asyncio.run(run())
    one, again, *_ = [address for _, _, address in server.seen]
    assert one == again
    assert server.seen[-1][2] not in (one, server.seen[2][2])


def test_exchanges_under_way_end_when_a_client_is_closed_and_none_begins_after_it(server):
    async def run():
        client, pieces = AsyncHttp(server.url, "t", silence_s=60), []

        async def read():
            async for piece in client.stream("GET", "/endless"):
                pieces.append(piece)

        unanswered = asyncio.create_task(client.ask("GET", "/slow"))
        streaming = asyncio.create_task(read())
        async with asyncio.timeout(10):
            slowly = client.stream("GET", "/endless")  # read on after the end only
            assert await anext(slowly) == b"more"
            while len(server.seen) < 3 or not pieces:
                await asyncio.sleep(0.005)
            await client.aclose()
            with pytest.raises(EngineLostError, match="/slow: "):
                await unanswered
            for reading in (streaming, anext(slowly)):
                with pytest.raises(EngineLostError, match="/endless: "):
                    await reading
        assert pieces == [b"more"]
        with pytest.raises(EngineLostError, match="was closed"):
            await client.ask("GET", "/json")

    asyncio.run(run())


def test_what_an_engine_does_not_take_or_accept_ends_with_its_client_and_with_patience():
    """Of one engine the connection is made, and a body sent that it does not read; of the other
    even the connection waits."""

    async def run(listener, body):
        client = AsyncHttp("http://{}:{}".format(*listener.getsockname()), "t", silence_s=60)
        under_way = asyncio.create_task(client.ask("POST", "/generate", body))
        await asyncio.sleep(0.2)
        assert not under_way.done()
        await client.aclose()
        async with asyncio.timeout(5):
            with pytest.raises(EngineLostError, match="/generate: "):
                await under_way

    async def run_unclosed(listener, body):
        client = AsyncHttp("http://{}:{}".format(*listener.getsockname()), "t", silence_s=0.3)
        with pytest.raises(EngineLostError, match=r"/generate: silent for 0\.3 s"):
            await asyncio.wait_for(client.ask("POST", "/generate", body), 5)
        await client.aclose()

    large = {"x": "y" * (30 << 20)}
    with socket.create_server(("127.0.0.1", 0)) as listener:
        asyncio.run(run(listener, large))
        asyncio.run(run_unclosed(listener, large))
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener, ExitStack() as others:
        for _ in range(4):
            other = others.enter_context(socket.socket())
            other.setblocking(False)
            other.connect_ex(listener.getsockname())
        asyncio.run(run(listener, None))


def test_proxies_of_the_environment_are_passed_over(server, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for side in ("threads", "loop"):
        with asking(side, server.url) as ask:
            assert ask("GET", "/json") == {"a": 1}
