"""The clock of a node is set, e.g. by chronyd or since a virtual machine was resumed: a process is
the one that it was."""

import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest
from toys import until

from relax_hpc.config.run import LaunchConfig
from relax_hpc.environments.rewards import process as rewards
from relax_hpc.launch import holder, local, local_step, record
from relax_hpc.runs.scale import scaler
from relax_hpc.runs.scale.records import Extra, ScaleState
from relax_hpc.runtime.paths import ComponentPaths, RunPaths
from relax_hpc.runtime.process import ProcessId, start_ticks


@pytest.fixture
def set_clock(monkeypatch):
    """Sets the clock on by seconds, as far as psutil sees it."""
    real = psutil._pslinux.boot_time

    def set_clock(seconds):
        monkeypatch.setattr(psutil._pslinux, "boot_time", lambda: real() + seconds)

    return set_clock


@pytest.fixture
def sleeper():
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as process:
        yield process
        process.kill()


def test_a_process_is_itself_though_the_clock_is_set_and_nobody_else_is(sleeper, set_clock):
    found = ProcessId.of(sleeper.pid)
    earlier = {"start_ticks": found.start_ticks - 1}
    others = [replace(found, **each) for each in (earlier, {"boot_id": "1"}, {"pid": os.getpid()})]
    for seconds in (0, 1, -3600):
        set_clock(seconds)
        assert found.find().pid == sleeper.pid
        assert ProcessId.of(sleeper.pid) == found
        assert not any(each.find() for each in others)


def test_ticks_are_those_of_the_process_whatever_its_name(tmp_path):
    shell = tmp_path / "a) b (c 1 2"
    shell.symlink_to("/bin/sleep")
    with subprocess.Popen([shell, "600"]) as child:
        seconds = start_ticks(child.pid) / os.sysconf("SC_CLK_TCK")
        assert seconds == psutil.Process(child.pid)._proc.create_time(monotonic=True)
        child.kill()
    assert start_ticks(child.pid) is None


def test_what_an_older_version_wrote_holds_within_seconds(sleeper, set_clock):
    old = ProcessId.read({"pid": sleeper.pid, "start_time": ProcessId.of(sleeper.pid).start_time})
    assert old.find().pid == sleeper.pid
    set_clock(3)
    assert old.find().pid == sleeper.pid
    set_clock(60)  # more than a clock is set by, or another process
    assert old.find() is None


def test_every_record_of_a_process_names_it_after_the_clock_was_set(sleeper, tmp_path, set_clock):
    paths, mine = RunPaths(tmp_path), ProcessId.of(sleeper.pid)
    local_step.record_processes(ComponentPaths(tmp_path, "local-1").processes, [sleeper.pid])
    parts = (record.LaunchedComponent("actor", "local-1", 1, paths.component("actor")),)
    record.write(paths, record.LaunchRecord("local", "local-1", parts, 1.0, mine), {})
    record.claim(paths, record.read(tmp_path), sure=False)
    extra = Extra("extra-1", 1, "n2", 0, "ACTIVE", 0.0, process=mine)
    ScaleState("1.0", 2, ["n2"], 1, extras={"extra-1": extra}).write(paths)
    set_clock(3600)
    found = [
        *local.processes(tmp_path, "local-1"),
        record.read(tmp_path).controller,
        ScaleState.read(paths).extras["extra-1"].process,
    ]
    assert found == [mine] * 3 and all(each.find() for each in found)
    assert not record._is_void(paths.launch_claim(2))  # of this very process


def test_a_worker_is_ended_with_its_family_after_the_clock_was_set(set_clock):
    command = "sleep 600 & setsid sleep 600 & echo $!; wait"
    with subprocess.Popen(
        ["bash", "-c", command], start_new_session=True, stdout=subprocess.PIPE
    ) as leader:
        away = ProcessId.of(int(leader.stdout.readline()))
        started = start_ticks(leader.pid)
        others = rewards._family(leader.pid, started - 1)  # the number is another's
        rewards._kill_family(leader.pid, started - 1)
        code = leader.poll()
        set_clock(1)
        rewards._kill_family(leader.pid, started)
        assert leader.wait(5) == -9 and code is None and others == []
    until(lambda: away.find() is None)


def started(monkeypatch, module, tmp_path, *options):
    """A main whose script is not the process of that number any more."""
    gone = replace(ProcessId.of(os.getpid()), start_ticks=1)
    monkeypatch.setattr(module, "ProcessId", SimpleNamespace(of=lambda _: gone))
    monkeypatch.setattr(module.job_file.storage, "settle", lambda *_, **__: None)
    monkeypatch.setattr(module.job_file.permissions, "adopt", lambda _: None)
    config = SimpleNamespace(launch=LaunchConfig(advanced={"peer_timeout_s": 9, "idle_s": 9}))
    monkeypatch.setattr(module, "RunConfig", SimpleNamespace)
    monkeypatch.setattr(module.job_file, "read_resolved", lambda _: config)
    argv = [str(tmp_path), "--job-id", "7", "--controller", str(os.getpid()), *options]
    monkeypatch.setattr(sys, "argv", [module.__name__, *argv])
    return module.main


def test_a_holder_and_a_scaler_that_nobody_has_told_to_end_have_failed(monkeypatch, tmp_path):
    ended = []
    monkeypatch.setattr(holder, "Holder", lambda *_: None)
    monkeypatch.setattr(scaler, "LocalSteps", lambda *_: None)
    monkeypatch.setattr(scaler, "Scaler", lambda *_: SimpleNamespace(end=ended.append))
    events = SimpleNamespace(set=None, wait=lambda _: False, is_set=lambda: False)
    monkeypatch.setattr(scaler, "threading", SimpleNamespace(Event=lambda: events))
    monkeypatch.setattr(scaler, "signal", SimpleNamespace(signal=lambda *_: 0, SIGTERM=15))
    for module, *options in ((holder, "--side", "sampling"), (scaler, "--local")):
        with pytest.raises(SystemExit, match="the job script, is not there"):
            started(monkeypatch, module, tmp_path, *options)()
    assert len(ended) == 1
