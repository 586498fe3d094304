"""An engine that leaves: its requests end, or go back with what there is of them."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from engine_fixtures import generate, prompt_of

from relax_hpc.errors import EngineError
from relax_hpc.inference import members
from relax_hpc.inference.client import EngineClient
from relax_hpc.inference.members import Member
from relax_hpc.roles.engine import loop
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.schema import FinishReason


@pytest.mark.parametrize(
    ("drain_s", "tokens", "aborted"), [(0.0, 3000, 1), (60.0, 300, 0)], ids=["deadline", "idle"]
)
def test_a_drain_ends_when_the_engine_is_idle_or_hands_back_what_it_has(
    served, tmp_path, monkeypatch, drain_s, tokens, aborted
):
    monkeypatch.setattr(loop, "_NOTICE_S", 0.1)
    paths, at = RunPaths(tmp_path), served.process
    engine = served.client()
    members.announce(paths, Member("extra-1", "e", at.url, 1, served.kind, "DRAINING"))
    assert engine.num_requests() == 0
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(generate, served, prompt_of(8), [1], max_new_tokens=tokens)
        deadline = time.monotonic() + 30
        while not engine.num_requests():
            assert time.monotonic() < deadline and not asked.done()
            time.sleep(0.005)
        left = loop._drain(paths, "extra-1", at.token, threading.Event(), drain_s)
        [response] = asked.result(timeout=30)
    assert left == aborted and engine.num_requests() == 0
    if aborted:
        assert response.finish is FinishReason.ABORT and len(response.token_ids) < tokens
    else:
        assert response.finish is FinishReason.LENGTH and len(response.token_ids) == tokens


def test_an_engine_that_is_not_there_has_no_known_load():
    with pytest.raises(EngineError, match=r"127\.0\.0\.1:9/v1/loads"):
        EngineClient("http://127.0.0.1:9", "token", timeout_s=1).num_requests()
    assert loop._num_requests("http://127.0.0.1:9", "token") == 0
