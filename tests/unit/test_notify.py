"""Messages about a run: to whom, when, how often; and what no log may hold."""

import json
import logging
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from board_runs import make, step

from relax_hpc.errors import ConfigError
from relax_hpc.launch import preflight
from relax_hpc.runs.boards import notify
from relax_hpc.runs.boards.notify import Comment, Notifier, ProgressWatch


@pytest.fixture
def told(tmp_path):
    """A program that keeps what it is told, and the messages."""
    program, kept = tmp_path / "tell.sh", tmp_path / "told.jsonl"
    program.write_text(f"#!/bin/sh\ncat >> {kept}\necho >> {kept}\n")
    program.chmod(0o755)

    def read():
        return [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []

    return str(program), read


@pytest.fixture
def service():
    """Starts a server with these answers; returns (path, message) of what it was sent, and its
    port."""
    servers = []

    def start(*answers):
        asked, left = [], list(answers)

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                asked.append((self.path, json.loads(body)))
                self.send_response(left.pop(0))
                self.end_headers()

            def log_message(self, *_):
                pass

        servers.append(HTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return asked, servers[-1].server_port

    yield start
    for each in servers:
        each.shutdown()


def test_an_occasion_is_told_once_in_a_while_over_all_attempts(tmp_path, told, monkeypatch):
    program, read = told
    paths, config = make(tmp_path, notify={"command": [program], "on": ["start", "requeue"]})
    ProgressWatch(Notifier(paths, config), 0).begin(0)
    ProgressWatch(Notifier(paths, config), 0).begin(0)  # restarted at once
    ProgressWatch(Notifier(paths, config), 0).begin(2)
    assert Notifier(paths, config).tell("finish", "is complete") is False, "nobody asked"
    assert [(m["run"], m["news"], m["text"]) for m in read()] == [
        ("run", "start", "run: has started"),
        ("run", "requeue", "run: goes on after requeue number 2"),
    ]
    monkeypatch.setattr(notify, "_APART_S", 0.0)
    ProgressWatch(Notifier(paths, config), 0).begin(0)
    assert len(read()) == 3


def test_a_reward_that_rises_no_more_is_told_once_and_again_after_it_rose(tmp_path, told):
    program, read = told
    watch = ProgressWatch(Notifier(*make(tmp_path, notify={"command": [program]})), 3)
    watch.take([step(number, 1.0, 0.5) for number in range(1, 4)])
    assert read() == []
    watch.take([step(4, 1.0, 0.5), step(5, 1.0, 0.25), step(6, 1.0, None)])
    [message] = read()
    assert (message["news"], message["step"]) == ("plateau", 4)
    assert message["text"] == "run: no better reward for 3 steps: 0.500, best 0.500"


def test_a_webhook_is_asked_three_times_and_its_url_is_in_no_log(
    tmp_path, caplog, monkeypatch, service
):
    monkeypatch.setattr(notify, "_WAIT_S", 0.0)
    asked, port = service(500, 503, 403, 200)
    url = tmp_path / "url"
    url.write_text(f"http://127.0.0.1:{port}/hook/s3cret\n")
    paths, config = make(tmp_path, notify={"webhook": str(url)})
    with caplog.at_level(logging.WARNING):
        Notifier(paths, config).tell("failure", "has failed")
        Notifier(paths, config).tell("finish", "is complete")
    failed = ("/hook/s3cret", "run: has failed")
    posts = [(path, message["text"]) for path, message in asked]
    assert posts == [failed] * 3 + [("/hook/s3cret", "run: is complete")]
    assert "notify.webhook: the webhook answers 403" in caplog.text and "s3cret" not in caplog.text
    assert "s3cret" not in paths.config.read_text() + paths.notified.read_text()


@pytest.mark.parametrize(
    ("mode", "text", "said"),
    [(0o644, "https://a/b", "chmod 600"), (0o600, "a/b", "holds no URL")],
)
def test_a_webhook_that_others_may_read_or_that_is_none_is_refused(tmp_path, mode, text, said):
    file = tmp_path / "url"
    file.write_text(text)
    file.chmod(mode)
    _, config = make(tmp_path, notify={"webhook": str(file)})
    with pytest.raises(ConfigError, match=said):
        preflight.check_notify(config)


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Slurm's commands: a file is the comment of the job."""
    (tmp_path / "comment").write_text("(null)\n")
    scripts = {
        "squeue": 'echo "squeue $*" >> asked; cat comment',
        "scontrol": '[ ! -e refuses ] && echo "$3" >> asked && echo "${3#Comment=}" > comment',
    }
    for name, text in scripts.items():
        (tmp_path / name).write_text(f"#!/bin/bash\ncd {tmp_path}\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(notify, "_COMMENT_EVERY_S", 0.0)
    return tmp_path


def test_the_jobs_comment_says_the_progress(slurm):
    comment, other = Comment("7"), Comment("8")
    comment.show(step(3, 1.0, 0.5, eta_s=7200.0), 100)
    comment.show(step(4, 1.0, None), 100)
    asked = slurm / "asked"
    assert asked.read_text().splitlines() == [
        "squeue -h -j 7 -o %k", "Comment=relax-hpc: step 3 of 100, reward 0.500, 2.0 h to go",
        "squeue -h -j 7 -o %k", "Comment=relax-hpc: step 4 of 100",
    ]  # fmt: skip
    asked.unlink()
    for said in ("my experiment\n", "(null)\n"):  # a comment of the user's stays
        (slurm / "comment").write_text(said)
        comment.show(step(5, 1.0, 0.5), 100)
        assert (slurm / "comment").read_text() == said
    (slurm / "refuses").touch()
    other.show(step(3, 1.0, 0.5), 100)
    (slurm / "refuses").unlink()
    other.show(step(4, 1.0, 0.5), 100)  # a Slurm that refuses is asked no more
    Comment("local-12").show(step(3, 1.0, 0.5), 100)
    assert len(asked.read_text().splitlines()) == 2


def test_a_service_of_apprise_gets_the_text_and_its_url_is_in_no_log(
    tmp_path, caplog, monkeypatch, service
):
    monkeypatch.setattr(notify, "_WAIT_S", 0.0)
    asked, port = service(500, 200)
    url = tmp_path / "url"
    url.write_text(f"json://127.0.0.1:{port}/s3cret\n")
    url.chmod(0o600)
    paths, config = make(tmp_path, notify={"webhook": str(url)})
    preflight.check_notify(config)
    with caplog.at_level(logging.INFO):
        Notifier(paths, config).tell("finish", "is complete")
    assert [(each["title"], each["message"]) for _, each in asked] == [
        ("run: finish", "run: is complete")
    ] * 2, "asked again once"
    assert "s3cret" not in caplog.text
    url.write_text("slakc://x/y\n")
    with pytest.raises(ConfigError, match="Apprise cannot use the URL slakc://"):
        preflight.check_notify(config)
