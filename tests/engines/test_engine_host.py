"""An engine that is lost comes back as another start, also one over several nodes."""

import os
import signal
import time

import psutil
import pytest
from engine_fixtures import wait_until
from trainers import job

from relax_hpc.config.run import RunConfig
from relax_hpc.errors import EngineError
from relax_hpc.inference import members
from relax_hpc.inference.client import EngineClient
from relax_hpc.inference.members import Roster, RosterEntry
from relax_hpc.roles.context import TaskContext
from relax_hpc.roles.engine.host import EngineHost, EngineSlot, hosting_of
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
