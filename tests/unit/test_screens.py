"""What commands show on a terminal of 80 columns, compared with stored screens.

A screen that is meant to change: `RELAX_GOLDEN=1 pytest tests/unit/test_screens.py` stores it anew.
"""

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import time
from pathlib import Path
from types import SimpleNamespace

import fake_slurm
import pytest
from bus_fixtures import produce
from bus_steps import plan
from job_trees import job_of
from test_first_hour import write_steps
from typer.testing import CliRunner

from relax_hpc.bus import layout
from relax_hpc.cli import main as cli
from relax_hpc.inference import members
from relax_hpc.inference.members import Member, Roster, RosterEntry
from relax_hpc.launch import states
from relax_hpc.runs import report, status
from relax_hpc.runs.status import Watch
from relax_hpc.runtime.files.records import write_json
from relax_hpc.runtime.heartbeat import Doing, DoingFile
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.runtime.telemetry.progress import step_line

GOLDEN = Path(__file__).parent / "golden"
NOW = time.time()
HOUR = 3600.0


def on_terminal(*words, until=b"", **environment):
    """All that a command line writes to a terminal of 24 lines of 80 columns.

    Args:
        until: once this was written, Ctrl-C is pressed.
    """
    pid, terminal = pty.fork()
    if pid == 0:
        try:
            fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
            for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"):
                os.environ.pop(name, None)
            os.environ.update({"TERM": "xterm-256color", **environment})
            sys.stdout, sys.stderr = open(1, "w", encoding="utf-8"), open(2, "w", encoding="utf-8")  # noqa: SIM115
            sys.argv = ["relax-hpc", *words]
            cli.main()
        except SystemExit as end:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(end.code or 0)
        finally:
            os._exit(99)
    output, deadline, reads = b"", time.monotonic() + 60, select.poll()
    reads.register(terminal, select.POLLIN)
    while True:
        if not reads.poll(max(0.0, 1e3 * (deadline - time.monotonic()))):
            os.kill(pid, signal.SIGKILL)
        try:
            block = os.read(terminal, 1 << 16)
        except OSError:  # it has ended
            break
        output += block
        if until and until in output:
            os.write(terminal, b"\x03")
            until = b""
    os.close(terminal)
    _, status = os.waitpid(pid, 0)
    return output.decode(), os.waitstatus_to_exitcode(status)


def plain(text):
    """The characters of what was written, without what only moves or colours them."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text.rpartition("\x1b[?1049l")[2])
    return "".join(f"{line.rstrip()}\n" for line in text.replace("\r\n", "\n").splitlines())


def compare(name, text):
    stored = GOLDEN / f"screen-{name}.txt"
    if os.environ.get("RELAX_GOLDEN"):
        stored.write_text(text)
    assert text == stored.read_text()


def emit(paths, task, *events):
    role, _, rank = task.rpartition("-")
    path = paths.events(role, int(rank))
    path.parent.mkdir(exist_ok=True)
    common = {"role": role, "rank": int(rank), "pid": 1}
    path.write_text("".join(f"{json.dumps(common | event)}\n" for event in events))


def step(number):
    return {
        "event": "step", "time": NOW - 72 * HOUR + number * HOUR, "step": number,
        "reward/mean": 0.3 + number / 50, "num_tokens": 2700 * HOUR, "num_trajectories": 8,
        "staleness/max": 1, "loss": -0.003, "time/step": float(HOUR), "eta_s": 1.0,
    }  # fmt: skip


def evaluated(when, version, correct):
    return {
        "event": "eval", "time": NOW - 50 * HOUR, "name": "heldout", "headline": True,
        "when": when, "number": version, "version": version, "version_max": version,
        "correct": correct, "num_samples": 8,
    }  # fmt: skip


def log(run_dir):
    folder = run_dir / "submission"
    step = (
        "step {:2}/30 | reward {:.3f} | staleness 0.4 (max 1) | loss -0.003 | trained 2.7k tok/s | "
        "3.3 s (wait 0.7 read 0.1 forward_backward 2.0 update 0.0 publish 0.0 save 0.0) | ETA 3 min"
    ).format
    said = "2026-01-02 10:{:02}:00 node7 {} {} relax_hpc.roles.{}: {}\n".format
    (folder / "7_batch.log").write_text(
        "2026-01-02T10:09:00 actor: start 1 ended with exit code 1\n"
    )
    (folder / "rollout" / "7_0_log.err").write_text(
        said(1, "rollout-0", "INFO", "rollout.main", "rollout-0 is healthy after 12 s")
        + said(8, "rollout-0", "WARNING", "rollout.main", "rollout-0 does not answer")
    )
    (folder / "actor" / "7_0_log.err").write_text(
        "/usr/lib/python3.11/a.py:3: FutureWarning: this is old\n  old()\n"
        + "".join(
            said(n + 1, "actor-0", "INFO", "actor.rank0", step(n, 0.3 + n / 50)) for n in (1, 2, 3)
        )
        + "Traceback (most recent call last):\nValueError: odd\n"
    )


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run that has run for two hours and a bit, called `run`, and one that failed."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("RELAX_RUN_ROOT", raising=False)
    monkeypatch.chdir(tmp_path)
    fake = fake_slurm.make(tmp_path, monkeypatch)
    paths = RunPaths(fake.run_dir)
    tree = json.loads(paths.launch_record.read_text())
    write_json(paths.launch_record, tree | {"time": NOW - 74 * HOUR})
    begin = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(NOW - 72 * HOUR))
    fake.says(
        f"7+0|RUNNING|node[7-8]|7|None|{begin}|4-00:00:00",
        f"7+1|RUNNING|node9|8|None|{begin}|4-00:00:00",
        "6+0|FAILED|node1|5|NonZeroExitCode|N/A|", "6+1|CANCELLED|node2|6|None|N/A|",
    )  # fmt: skip
    began = {"event": "start", "time": NOW, "attempt": "7.1", "start": 1, "node": "node9"}
    parameters = {"event": "parameters", "time": NOW, "trained": 66_060_288, "fixed": 4_022_468_096}
    emit(paths, "actor-0", *map(step, range(1, 13)), began, began | {"start": 2}, parameters)
    load = {"event": "load", "time": NOW, "id": "rollout-0", "seconds": 10.0, "num_tokens": 14000}
    emit(
        paths, "rollout-0", evaluated("before", 0, 2.0), evaluated("during", 10, 4.0),
        began | {"node": "node7"}, load | {"in_flight": 12, "version": 12, "kv_used": 0.5},
    )  # fmt: skip
    emit(paths, "rollout-1", load | {"seconds": 5.0, "num_tokens": 6500, "in_flight": 4})
    members.announce(paths, Member("rollout-0", "7-1-1", "", 1, "embedded", "HEALTHY"))
    Roster(12, {"rollout-0": RosterEntry("7-1-1", 12, "ACTIVE")}).write(paths)
    log(fake.run_dir)
    failed = RunPaths(fake.run_dir.parent / "a-failed-one")
    write_json(failed.config, json.loads(paths.config.read_text()))
    for component in tree["components"]:
        component["job_id"] = component["job_id"].replace("7", "6")
    write_json(failed.launch_record, tree | {"leader": "6", "time": NOW - 240 * HOUR})
    yield fake
    states.has_accounting.cache_clear()


@pytest.mark.parametrize("command", ["status run", "ls", "logs run", "--help"])
def test_a_screen_is_the_stored_one(run, command, tmp_path):
    shown, code = on_terminal(*command.split())
    text = plain(shown).replace(str(tmp_path), "/home/me")
    assert code == 0
    if command != "status run":
        assert max(map(len, text.splitlines())) <= 80
    compare(command.split()[0].strip("-"), text)


def test_watching_shows_a_screen_until_ctrl_c_and_leaves_the_last_one(run):
    shown, code = on_terminal("watch", "run", until=b"rollout-0")
    assert code == 130 and shown.count("\x1b[?1049h") == shown.count("\x1b[?1049l") == 1
    compare("watch", plain(shown).replace("^C", ""))
    assert "\x1b[1;32mRUNNING" in shown


def test_status_and_watch_say_why_rollout_waits(run):
    paths = RunPaths(run.run_dir)
    for rank, phase in enumerate(("waits (max_staleness)", "waits (max_staleness)", "loop")):
        told = Doing("rollout", rank, "node7", phase, 0, 340.2, NOW)
        DoingFile(paths.doing / f"rollout-{rank}.json").write(told)
    for command in ("status", "watch"):
        output = CliRunner().invoke(cli.app, [command, "run"]).output
        said = "rollout: waits (max_staleness), for 340 s (2 of 3 tasks); loop, for 340 s"
        assert said in " ".join(output.split())


def test_tokens_that_are_trained_and_tokens_that_are_sampled_are_told_apart(run):  # U11
    """691 tokens/s are trained, prompts and all; an engine sampled 39 of them a second."""
    paths = RunPaths(run.run_dir)
    done = step(1) | {"num_tokens": 1382, "time/step": 2.0, "tokens_per_s": 691.0}
    done["response/truncated"] = 0.042
    emit(paths, "actor-0", done)
    load = {"event": "load", "time": NOW, "seconds": 10.0, "in_flight": 1, "version": 1}
    emit(paths, "rollout-0", load | {"id": "rollout-0", "num_tokens": 390})
    emit(paths, "rollout-1")
    watched = CliRunner().invoke(cli.app, ["watch", "run"]).output
    assert "trained 691 tok/s" in watched
    rows = [line.split() for line in watched.splitlines()]
    assert ["engine", "state", "node", "weights", "sampled/s", "in", "flight"] in rows
    assert ["rollout-0", "active", "-", "v12", "39", "1"] in rows
    status = CliRunner().invoke(cli.app, ["status", "run"]).output
    assert "speed         691 tokens/s trained, with prompts\n" in status
    assert "not learned from" not in watched + status
    assert "cut off" in watched and "at step 1, 4.2% of responses cut off\n" in status
    line = step_line(done, 30, None)
    assert "| 4.2% cut off |" in line and "| trained 691 tok/s |" in line


def test_status_and_watch_say_what_is_not_learned_from(run):
    paths = RunPaths(run.run_dir)
    emit(paths, "actor-0", step(1) | {"response/truncated": 0.42})
    for command in ("status", "watch"):
        output = CliRunner().invoke(cli.app, [command, "run"]).output.replace("│", "")
        said = "42 % of the responses are cut off and masked: rollout.max_new_tokens = "
        assert said in " ".join(output.split()) and "not learned from" in output


def job(slurm, count=1, **sections):
    """Makes it a job of that many engines, and of batches of 4 x 2 responses."""
    made = job_of(
        run_root=str(slurm.run_dir.parent), schedule={"num_steps": 30, "prompts_per_step": 4},
        rollout__samples_per_prompt=2, engines__rollout__count=count, **sections,
    )  # fmt: skip
    paths = RunPaths(slurm.run_dir)
    paths.config.write_text(made.model_dump_json())
    layout.create(paths.bus, [f"rollout-{rank}" for rank in range(count)], {})
    slurm.says("7+0|RUNNING", "7+1|RUNNING")
    return paths


def said(paths):
    return report.at_work(paths.root, Watch(paths.root))


def announce(paths, name, state="STARTING", reason=""):
    members.announce(paths, Member(name, "7.0-1-1", "", 1, "sglang", state, reason))


def test_status_says_why_an_engine_is_fenced_or_has_failed(slurm):
    paths = job(slurm, count=3)
    announce(paths, "rollout-0", "HEALTHY")
    announce(paths, "rollout-1", "FAILED", "it ended 3 times")
    announce(paths, "rollout-2", "HEALTHY")  # started again since
    why = "no answer to an update for 120 s"
    entries = {f"rollout-{n}": RosterEntry(f"7.0-1-{start}", None, "FENCED", why)
               for n, start in ((0, 1), (2, 0))}  # fmt: skip
    Roster(3, entries).write(paths)
    text = report.text(status.collect(paths.root))
    assert f"rollout-0 engine of rollout, fenced: {why}\n" in text
    assert "rollout-1 engine of rollout, failed: it ended 3 times\n" in text
    assert "rollout-2 engine of rollout, healthy\n" in text
    assert said(paths).startswith(f"engine rollout-0 fenced ({why});")


def test_the_next_batch_is_what_is_committed_and_not_trained_on(slurm):
    paths = job(slurm, count=2)
    for rank in range(2):
        announce(paths, f"rollout-{rank}", "HEALTHY")
    produce(paths.bus, "rollout-0", [0, 2, 4])
    assert said(paths) == "batch 1: 6 of 8 responses"
    produce(paths.bus, "rollout-1", [1, 3, 5])
    assert said(paths) == "batch 1: 8 of 8 responses"
    plan(paths.bus, 1)
    write_steps(paths.root, {"step": 1, "num_trajectories": 8})
    assert said(paths) == "batch 2: 4 of 8 responses"


def test_what_is_said_again_and_again_comes_after_pauses_that_double(slurm, monkeypatch):  # U13
    paths, now = job(slurm), [0.0]
    monkeypatch.setattr(report, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(report, "at_work", lambda *_: "0 of 150 steps")
    following, said = report.Quiet(paths.root, Watch(paths.root)), []
    for now[0] in range(400):
        said += [now[0]] * bool(following.line())
        if now[0] == 300:
            following.end()  # there was news
    assert said == [25, 50, 100, 200, 325, 350]
