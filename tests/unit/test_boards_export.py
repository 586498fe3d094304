"""What services are sent of a run: each point once; read by W&B's and MLflow's own API."""

import importlib.util
import json
import os
import signal
import struct
import subprocess
import sys
import time

import pytest
from board_runs import curves, evaluation, event, make, read, step, write
from job_trees import job_of
from toys import until
from typer.testing import CliRunner

from relax_hpc.cli.main import app
from relax_hpc.errors import ConfigError
from relax_hpc.launch import preflight
from relax_hpc.runs import status
from relax_hpc.runs.boards.export import Export


class FakeService:
    """Takes what it is given, and refuses what a service may refuse."""

    def __init__(self, run):
        self.run, self.points, self.ended = run, [], []

    def log(self, step, values, time):
        assert values and not self.ended and time > 0
        self.points += [(tag, step, value) for tag, value in values.items()]

    def say(self, text): ...
    def finish(self, *, failed):
        self.ended.append("failed" if failed else "finished")

    def pause(self):
        self.ended.append("paused")


def test_each_point_is_sent_once_over_restarts_of_run_and_sender(tmp_path):
    run, made = make(tmp_path), []

    def export():
        def make_service(described):
            return made.append(FakeService(described)) or made[-1]

        return Export(*run, "wandb", offline=True, make=make_service)

    first = export()
    write(run[0], step(1, 1.0, 0.25, loss=0.5), step(2, 2.0, 0.5, loss=0.25))
    first.update()
    first.update()
    write(run[0], event("resume", 3.0, step=1), step(2, 4.0, 0.75))
    write(run[0], evaluation(2, 2.0, 4.5, number=1), step(3, 5.0, 1.0))
    second = export()  # the first was killed, say
    second.end(failed=False)
    assert [service.run.id for service in made] == [made[0].run.id] * 2
    assert made[0].points + made[1].points == [
        ("reward/mean", 1, 0.25), ("loss/total", 1, 0.5),
        ("reward/mean", 2, 0.5), ("loss/total", 2, 0.25),
        ("eval/heldout/reward", 2, 0.5), ("reward/mean", 3, 1.0),
    ]  # fmt: skip
    assert [service.ended for service in made] == [[], ["finished"]]
    assert made[0].run.settings["schedule.num_steps"] == 9
    export().pause()
    assert made[2].points == [] and made[2].ended == ["paused"]


def test_a_job_whose_service_is_not_installed_or_nowhere_is_refused(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"set boards\.advanced\.tracking_uri, or boards\.adv"):
        job_of(boards={"export": ["mlflow"]})
    _, config = make(tmp_path, boards={"export": ["wandb"]})
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"boards.export.*pip install 'relax-hpc\[wandb\]'"):
        preflight.check_boards(config)


@pytest.mark.parametrize("end", ["told", "script killed"])
def test_a_follower_draws_and_tells_while_the_run_goes_and_the_rest_at_its_end(tmp_path, end):
    told = tmp_path / "told"
    (tmp_path / "tell").write_text(f"#!/bin/sh\ncat >> {told}\n")
    (tmp_path / "tell").chmod(0o755)
    paths, _ = make(tmp_path, notify={"command": [str(tmp_path / "tell")]})
    write(paths, step(1, time.time(), 0.25))
    module = [sys.executable, "-m", "relax_hpc.runs.boards.follower", str(paths.root)]
    line = f"{' '.join(module)} --job-id local-1 --controller $$ & echo $!; wait $!; wait $!"
    script = subprocess.Popen(["bash", "-c", line], stdout=subprocess.PIPE, text=True)
    follower = int(script.stdout.readline())
    until(lambda: paths.tensorboard.exists() and told.exists())
    os.kill(follower, signal.SIGTERM)  # as Slurm does to everybody when a job is cancelled
    write(paths, step(2, time.time(), 0.5))
    if end == "told":
        os.kill(follower, signal.SIGUSR1)
    else:
        script.kill()
    until(paths.tensorboard_made.exists)
    assert json.loads(paths.tensorboard_made.read_text())["failed"] is (end != "told")
    assert curves(read(paths.tensorboard)) == {"reward/mean": [(1, 0.25), (2, 0.5)]}
    until(paths.reward_curve.exists)
    assert json.loads(told.read_text())["news"] == "start"
    script.wait(timeout=30)
    script.stdout.close()


def rows_of(folder):
    """Rows of an offline run, the run, and how it ended, in W&B's own messages."""
    from wandb.proto.wandb_internal_pb2 import Record

    [file] = folder.glob("*.wandb")
    records = [Record.FromString(data) for data in logged(file.read_bytes())]
    rows = [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json)
         for item in record.history.item}
        for record in records if record.HasField("history")
    ]  # fmt: skip
    [run] = [record.run for record in records if record.HasField("run")]
    exits = [record.exit.exit_code for record in records if record.HasField("exit")]
    return rows, run, exits


def logged(data):
    """Records of a log of LevelDB, behind W&B's own 7 bytes: checksum, length, type, data."""
    at, parts = 7, b""
    while at < len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or its last part
            yield parts
            parts = b""


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="needs the package wandb")
def test_w_and_b_has_the_curves_of_a_run_offline(tmp_path, monkeypatch):
    paths, _ = make(tmp_path)
    write(paths, step(1, 1.0, 0.25), step(2, 2.0, 0.5), evaluation(0, 1.0, 2.5, number=0))
    monkeypatch.setattr(status, "job_state", lambda _: "CANCELLED")
    found = CliRunner().invoke(app, ["export", "wandb", str(paths.root), "--offline"])
    assert found.exit_code == 0, found.output
    [folder] = paths.root.glob("wandb/offline-run-*")
    rows, run, exits = rows_of(folder)
    shown = [{key: row[key] for key in row if not key.startswith("_")} for row in rows]
    assert shown == [
        {"step": 1, "reward/mean": 0.25},
        {"step": 2, "reward/mean": 0.5},
        {"step": 0, "eval/heldout/reward": 0.25},
    ]
    assert [row["_timestamp"] for row in rows] == [1.0, 2.0, 2.5]
    assert (run.display_name, run.project, exits) == ("run", "relax-hpc", [1])
    config = {each.key: json.loads(each.value_json) for each in run.config.update}
    assert config["schedule.num_steps"] == 9 and f"wandb sync --append {folder}" in found.output
    again = CliRunner().invoke(app, ["export", "wandb", str(paths.root), "--offline"])
    assert again.exit_code == 0 and run.run_id in again.output
    assert sum(len(rows_of(each)[0]) for each in paths.root.glob("wandb/offline-run-*")) == 3
