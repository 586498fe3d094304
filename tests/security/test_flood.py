"""S4: a stranger who sends broken requests slows no run, and does not fill its log."""

import socket
import tempfile
import time
from contextlib import closing, suppress
from http import HTTPStatus
from http.client import HTTPConnection
from pathlib import Path

import flood
import httpx
import psutil
import pytest

from relax_hpc.cli.demo import models, tasks
from relax_hpc.config import job_file
from relax_hpc.inference.process import start_engine
from relax_hpc.inference.spec import EngineSpec
from relax_hpc.launch.submit import submit
from relax_hpc.runs.cancel import cancel
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.runtime.telemetry.events import read_events

REPOSITORY = Path(__file__).parents[2]
HOST, TOKEN = "127.0.0.1", "a right token"
PER_S, WINDOW_S, WINDOWS = 1000, 10, 6
"""Broken requests a second, for a minute in all."""
MOST_RATIO, MOST_LOG_BYTES = 1.1, 100_000


def test_hundreds_of_broken_requests_delay_nobody_and_leave_a_line_for_each_kind(tmp_path):
    """S4: before, each of the first kind was a traceback, and each body was read whole."""
    tokens = models.tokenizer()
    models.save(tmp_path / "model", models.model(tokens, seed=0), tokens)
    with start_engine(
        EngineSpec("embedded", tmp_path / "model", start_timeout_s=240),
        host=HOST, token=TOKEN, log_path=tmp_path / "log",
    ) as engine:  # fmt: skip
        port, memory = int(engine.url.rsplit(":", 1)[1]), psutil.Process(engine.pid).memory_info
        before_bytes, rss = (tmp_path / "log").stat().st_size, memory().rss
        asked = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 4}}
        with flood.flood(HOST, [port], per_s=400, seconds=1.0) as shooter:
            while shooter.poll() is None:
                headers = {"Authorization": f"Bearer {TOKEN}"}
                assert httpx.post(f"{engine.url}/generate", json=asked, headers=headers).is_success
        assert httpx.get(f"{engine.url}/health").is_success
        stranger = HTTPConnection(HOST, port, timeout=20)  # which sends nothing of its body
        with closing(stranger):
            stranger.putrequest("POST", "/health")
            stranger.putheader("Content-Length", "99999999999")
            stranger.endheaders()
            assert stranger.getresponse().status == HTTPStatus.UNAUTHORIZED
        for path in ("/generate", "/pause_generation"):  # by a client of ours that is killed
            with socket.create_connection((HOST, port)) as client:
                head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
                client.sendall(head.encode() + b"Content-Length: 9\r\n\r\n{")
        assert httpx.get(f"{engine.url}/model_info", headers=headers).is_success
        lines = (tmp_path / "log").read_bytes()[before_bytes:].splitlines()
        assert len(lines) <= 4, lines
        assert memory().rss - rss < 64 << 20


def ports_of(paths):
    """What the processes of a run listen on, and somebody can connect to."""
    marks, found = str(paths.root).encode(), set()
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            command, told = process.cmdline(), Path(f"/proc/{process.pid}/environ").read_bytes()
            if marks in told or str(paths.root) in " ".join(command):
                listens = process.net_connections("tcp")
                found |= {each.laddr.port for each in listens if each.status == "LISTEN"}
    return sorted(filter(answers, found))


def answers(port):
    try:
        socket.create_connection((HOST, port), timeout=1).close()
    except OSError:
        return False
    return True


def ends_of_logs(paths):
    logs = [*(paths.root / "logs").rglob("*"), *paths.submission.glob("*.log")]
    return "\n".join(f"{each}: {each.read_text()[-2000:]}" for each in logs if each.is_file())


def num_steps(paths):
    """Steps that have been trained."""
    return sum(each["event"] == "step" for each in read_events(paths.events_folder))


@pytest.mark.long
def test_a_thousand_broken_requests_a_second_for_a_minute_change_no_step_by_a_tenth():
    """S4: held against steps while the same requests go to a port of nobody's, since who sends
    them takes a part of the processors, too."""
    with tempfile.TemporaryDirectory(prefix="relax-test-") as name, flood.sink() as nobody:
        folder, tokens = Path(name), models.tokenizer()
        tasks.write_additions(folder, 1, 64, 16, 0)
        models.save(folder / "model", models.model(tokens, seed=0), tokens)
        settings = {
            "name": "flooded", "run_root": folder / "runs", "model.path": folder / "model",
            "prompts.train": folder / "train.jsonl", "eval.heldout.path": folder / "heldout.jsonl",
            "eval.heldout.every": 0, "schedule.num_steps": 10_000, "schedule.prompts_per_step": 8,
            "actor.save_every": 1000,
        }  # fmt: skip
        overrides = [f"{key}={value}" for key, value in settings.items()]
        paths = RunPaths(folder / "runs" / "flooded")
        submit(job_file.load(REPOSITORY / "jobs" / "demo.toml", overrides), local=True)
        try:
            deadline = time.monotonic() + 240
            while num_steps(paths) < 5:
                assert time.monotonic() < deadline
                time.sleep(0.5)
            done, logged = {True: 0, False: 0}, {True: 0, False: 0}
            for _ in range(WINDOWS):
                for is_attack in (False, True):
                    ports = ports_of(paths) if is_attack else [nobody]
                    assert ports, ends_of_logs(paths)
                    before = num_steps(paths), log_bytes(paths)
                    with flood.flood(HOST, ports, PER_S):
                        time.sleep(WINDOW_S)
                    done[is_attack] += num_steps(paths) - before[0]
                    logged[is_attack] += log_bytes(paths) - before[1]
            told = logged[True] - logged[False]
            words = f"{done[False]} steps, {done[True]} under attack; {told:+} bytes of log"
            print(words)
            assert done[False] <= MOST_RATIO * done[True] and told <= MOST_LOG_BYTES, words
        finally:
            cancel(paths.root)


def log_bytes(paths):
    logs = [*(paths.root / "logs").rglob("*"), *paths.submission.glob("*.log")]
    return sum(each.stat().st_size for each in logs if each.is_file())
