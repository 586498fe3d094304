"""An engine that is lost comes back as another start, also one over several nodes."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from engine_fixtures import wait_until
from sglang_under_test import SGLANG_PYTHON
from trainers import job

from relax_hpc.config.run import RunConfig
from relax_hpc.errors import EngineError
from relax_hpc.inference import members
from relax_hpc.inference.client import EngineClient
from relax_hpc.inference.members import Roster, RosterEntry
from relax_hpc.inference.sglang import launch
from relax_hpc.roles.context import TaskContext
from relax_hpc.roles.engine.host import EngineHost, EngineSlot, hosting_of, serve_part, slots_of
from relax_hpc.runtime.files.run_secret import RunSecret
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.runtime.telemetry.events import EventWriter, read_events

pytestmark = pytest.mark.long

CONTEXT = TaskContext("rollout", 0, 1, 0, attempt="7.0", start=2, node="here")


class Hosted:
    def __init__(self, folder, model, **pool):
        self.paths = RunPaths(folder)
        pool = {"rollout": {"advanced": {"start_timeout_s": 60, **pool}}}
        config = RunConfig.model_validate(job(model).model_dump() | {"engines": pool})
        self.secret = RunSecret.create(self.paths.secret)
        self.events = EventWriter(self.paths.events("rollout", 0), "rollout", 0)
        slot = EngineSlot("rollout-0", number=0, local_index=0)
        self.host = EngineHost(hosting_of(config, slot), self.paths, CONTEXT, self.events)

    @property
    def member(self):
        return members.find(self.paths, "rollout-0")

    def happened(self, event):
        return [e for e in read_events(self.paths.root / "events") if e["event"] == event]

    def pid(self):
        start = int(self.member.start.rpartition("-")[2])
        wait_until(lambda: len(self.happened("engine")) == start)  # its host says so a bit later
        return self.happened("engine")[-1]["engine_pid"]

    def wait_for(self, state, start=None):
        def is_there():
            now = self.member
            return now and now.state == state and start in (None, now.start)

        wait_until(is_there)
        return self.member

    def sync(self, *, start="7.0-2-1", state="ACTIVE", reason=""):
        entry = RosterEntry(start, 1, state, reason)
        Roster(1, {"rollout-0": entry}).write(self.paths)


def test_an_engine_that_dies_hangs_or_is_fenced_is_started_again(checkpoints, tmp_path):
    hosted = Hosted(tmp_path, checkpoints[0], hang_timeout_s=2)
    with hosted.host:
        hosted.host.wait_until_healthy()
        first = hosted.member
        assert (first.state, first.start) == ("HEALTHY", "7.0-2-1")
        os.kill(hosted.pid(), signal.SIGKILL)
        second = hosted.wait_for("HEALTHY", "7.0-2-2")
        tokens = [hosted.secret.engine_token(each.id, each.start) for each in (first, second)]
        assert first.url != second.url and tokens[0] != tokens[1]
        assert EngineClient(second.url, tokens[1]).version() == 0
        with pytest.raises(EngineError, match="401"):
            EngineClient(second.url, tokens[0]).version()
        assert not EngineClient(first.url, tokens[0]).health(1.0)
        assert "killed by SIGKILL" in hosted.happened("engine_end")[0]["reason"]

        # Silence during its update says nothing; the same silence without one does.
        hosted.sync(start=second.start, state="SYNCING")
        silent = psutil.Process(hosted.pid())
        silent.suspend()
        time.sleep(5)
        assert hosted.member == second
        hosted.sync(state="SYNCING")  # one of its epochs before
        third = hosted.wait_for("HEALTHY", "7.0-2-3")
        assert not silent.is_running()
        reason = hosted.happened("engine_end")[1]["reason"]
        assert "hangs: engine http" in reason and f"process {silent.pid}: state T" in reason
        assert "embedded/server.py" in reason, "the line where it stood"
        log = hosted.paths.engine_log("rollout-0", second.start).read_text()
        assert "most recent call first" in log

        hosted.sync(start=second.start, state="FENCED", reason="of another start")
        time.sleep(1.5)
        assert hosted.member == third
        hosted.sync(start=third.start, state="FENCED", reason="half an update")
        hosted.wait_for("HEALTHY", "7.0-2-4")
        assert hosted.happened("engine_end")[2]["reason"] == "was fenced: half an update"
        last = psutil.Process(hosted.pid())
    assert hosted.member.state == "GONE"
    assert not last.is_running()
    assert len(list((tmp_path / "logs").glob("engine-rollout-0-7.0-2-*.log"))) == 4


def test_a_host_that_is_left_while_its_engine_starts_leaves_nothing_behind(checkpoints, tmp_path):
    before = {p.pid for p in psutil.Process().children(recursive=True)}
    hosted = Hosted(tmp_path, checkpoints[0])
    with hosted.host:
        hosted.wait_for("STARTING")
        wait_until(lambda: hosted.member.reason == "loading the model")
    assert hosted.member.state == "GONE"
    assert {p.pid for p in psutil.Process().children(recursive=True)} <= before


def config_of(model):
    pool = {"kind": "sglang", "nodes_per_engine": 2, "advanced": {"start_timeout_s": 600}}
    pool |= {"args": {"tp_size": 2}, "resources": {"nodes": 2}}
    return RunConfig.model_validate(job(model).model_dump() | {"engines": {"rollout": pool}})


def context(rank, start=1):
    return TaskContext("rollout", rank, 2, 0, attempt="7.0", start=start, node=f"node{rank}")


def children_with(word):
    found = psutil.Process().children(recursive=True)
    return [p for p in found if p.is_running() and word in " ".join(p.cmdline())]


@pytest.mark.sglang
def test_an_engine_over_two_nodes_serves_as_one_and_comes_back_as_one(
    checkpoints, tmp_path, monkeypatch
):
    before = children_with("sglang.serve")  # the engine that other tests share
    command = launch.command
    monkeypatch.setattr(launch, "command", lambda _: command(SGLANG_PYTHON))
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
    config, paths = config_of(checkpoints[0]), RunPaths(tmp_path)
    secret = RunSecret.create(paths.secret)
    events = EventWriter(paths.events("rollout", 0), "rollout", 0)
    slots = [slots_of(config.rollout_pool, context(rank))[0] for rank in range(2)]

    def healthy(start):
        deadline = time.monotonic() + 600
        while (now := members.find(paths, "rollout-0")).state != "HEALTHY" or now.start != start:
            assert now.state != "FAILED" and time.monotonic() < deadline, now
            time.sleep(0.5)
        client = EngineClient(now.url, secret.engine_token(now.id, now.start))
        assert client.version() == 0 and now.num_ranks == 2
        client.close()

    with ThreadPoolExecutor(1) as other_node:
        other = other_node.submit(
            serve_part, hosting_of(config, slots[1]), paths, context(1), events
        )
        with EngineHost(hosting_of(config, slots[0]), paths, context(0), events) as host:
            host.wait_until_healthy()
            healthy("7.0-1-1")
            [second] = children_with("--node-rank 1")[:1]
            os.kill(second.pid, signal.SIGKILL)
            healthy("7.0-1-2")
        other.result(60)
    assert members.find(paths, "rollout-0").state == "GONE"
    assert children_with("sglang.serve") == before
