"""A score that a service of somebody's is asked for."""

import asyncio
import dataclasses
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from reward_runs import in_processes, refusal

from relax_hpc.config.rollout import RewardConfig
from relax_hpc.environments.rewards import trial
from relax_hpc.environments.rewards.contract import Sample, Score
from relax_hpc.environments.rewards.functions import remote
from relax_hpc.errors import ConfigError

SAMPLE = Sample(
    "a response", [{"role": "user", "content": "ü?"}], "7", {"topic": "sums"}, "stop", 3
)


class Service(ThreadingHTTPServer):
    """Replies as it is told; the last reply is repeated."""

    daemon_threads, request_queue_size = True, 128

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Answers)
        self.replies, self.asked, self.released = [(200, b"1")], [], threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}/score"


class Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked.append(json.loads(body))
        replies = self.server.replies
        status, content = replies.pop(0) if len(replies) > 1 else replies[0]
        if status == "hang":
            self.server.released.wait(30)
            self.close_connection = True
            return
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture(scope="module")
def server():
    server = Service()
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def service(server):
    server.asked.clear()
    yield server
    server.released.set()
    server.released = threading.Event()


def ask(service, *replies, **settings):
    service.replies = list(replies)
    return asyncio.run(remote.score(SAMPLE, **({"url": service.url} | settings)))


def test_the_service_is_given_all_fields_of_a_sample(service):
    assert ask(service, (200, b"0.5")) == Score(0.5)
    [given] = service.asked
    assert given == dataclasses.asdict(SAMPLE) | {"prompt": [{"role": "user", "content": "ü?"}]}


def test_a_score_may_have_parts(service):
    reply = json.dumps({"score": 1, "parts": {"right": 0.75, "short": 0.25}}).encode()
    assert ask(service, (200, reply)) == Score(1.0, {"right": 0.75, "short": 0.25})


def test_a_service_that_stumbles_is_asked_again_no_more_often_than_it_may_be(service):
    assert ask(service, (500, b"oh"), (503, b"busy"), (200, b"1")) == Score(1.0)
    assert len(service.asked) == 3
    with pytest.raises(remote.BusyError, match=r"^url = .*/score': replied 500: 'oh'"):
        ask(service, (500, b"oh"), retries=1)
    assert len(service.asked) == 5


@pytest.mark.parametrize("status", [404, 302])
def test_a_service_that_refuses_is_not_asked_again(service, status):
    with pytest.raises(remote.RemoteRefusedError, match=rf"/score': replied {status}: 'no such"):
        ask(service, (status, b"no such task"))
    assert len(service.asked) == 1


def test_a_try_that_hangs_is_given_up_and_another_may_succeed(service):
    assert ask(service, ("hang", b""), (200, b"1"), timeout_s=0.2) == Score(1.0)
    assert len(service.asked) == 2


def test_all_tries_together_keep_the_budget_and_the_last_reason_is_said(service):
    with pytest.raises(remote.BusyError, match=r"no reply in 0\.1 s; gave up after 1\.5 s"):
        ask(service, ("hang", b""), timeout_s=0.1, retries=1000, budget_s=1.5)
    assert len(service.asked) >= 2


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"<html>", "which is not JSON"), (b"NaN", "not finite"),
        (b'{"score": 1, "parts": {"right": NaN}}', "right = nan"),
        (b'{"score": 1, "parts": [1]}', "let it reply"), (b'"1"', "no number"),
        (b'"' + b"x" * (2 << 20) + b'"', "more than 1048576 bytes"),
    ],
)  # fmt: skip
def test_what_is_no_finite_number_is_an_error_and_is_not_asked_for_again(service, content, words):
    with pytest.raises(remote.RemoteRefusedError) as refused:
        ask(service, (200, content))
    assert words in str(refused.value) and len(str(refused.value)) < 400
    assert len(service.asked) == 1


def test_a_job_names_the_service_among_the_settings_of_the_reward(service):
    service.replies = [(200, b"0.5")]
    config = RewardConfig(name="remote", args={"url": service.url}, advanced={"workers": 1})
    trial.check(config, SAMPLE)
    assert in_processes(config, [SAMPLE, SAMPLE]) == [[Score(0.5), Score(0.5)]]
    said = refusal(RewardConfig(name="remote"), SAMPLE)
    assert said.startswith("reward.name = 'remote': url = '': is no address")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://127.0.0.1:9/score", "nobody answers here"),
        ("http://[::1", "is no address"),
    ],
)
def test_a_service_out_of_reach_is_refused_by_its_address(url, words):
    with pytest.raises(ConfigError) as refused:
        remote.check(url=url, timeout_s=1.0)
    assert str(refused.value).startswith(f"url = {url!r}: ") and words in str(refused.value)
