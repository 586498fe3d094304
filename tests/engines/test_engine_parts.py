"""An engine over several nodes: its parts meet, serve as one, and are lost and found together."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from sglang_under_test import SGLANG_PYTHON
from trainers import job

from relax_hpc.config.run import RunConfig
from relax_hpc.inference import members
from relax_hpc.inference.client import EngineClient
from relax_hpc.inference.sglang import launch
from relax_hpc.roles.context import TaskContext
from relax_hpc.roles.engine import host as engine_parts
from relax_hpc.roles.engine.host import EngineHost, hosting_of, slots_of
from relax_hpc.runtime.files.run_secret import RunSecret
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.runtime.telemetry.events import EventWriter


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
            engine_parts.serve_part, hosting_of(config, slots[1]), paths, context(1), events
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
