"""Runs over hosts that share files and nothing else: each has its own name, networks, /dev/shm.

By its own name a host finds itself at 127.0.1.1; `docker0` has the same address on all of them.
"""

import json
import os
import re
import shutil
import signal
import socket
import threading
from collections import Counter
from pathlib import Path

import psutil
import pytest
from cluster import local_slurm
from e2e_runs import (
    assert_whole,
    cli,
    events_of,
    has_done,
    hurry,
    newest,
    sized,
    submit,
    unhurried,
    wait_until,
    wait_until_over,
)
from test_extending import PAGE

from relax_hpc.runtime.paths import RunPaths

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None, reason="takes root and ip (iproute2)"
    ),
]

STEPS, PROMPTS, SIBLINGS = 4, 4, 4


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    """Brings up four; returns the first three bytes of their addresses by interface."""
    folder = Path(tmp_path_factory.mktemp("s"))
    with local_slurm(folder, "slurmctld", options=("--isolate", "net")) as variables:
        conf = Path(variables["SLURM_CONF"]).read_text(encoding="utf-8")
        first, second, third = re.search(r"NodeAddr=(\d+\.\d+)\.(\d+)\.(\d+)", conf).groups()
        assert third == "2"
        yield {"eth0": f"{first}.{second}.", "ib0": f"{first}.{int(second) + 1}."}


class Capture:
    """Counts the packets between hosts that hold certain bytes. A context manager."""

    def __init__(self, *words):
        self.seen = Counter()
        self._words = words
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
        self._socket.settimeout(0.2)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stopping.set()
        self._thread.join()
        self._socket.close()

    def _read(self):
        while not self._stopping.is_set():
            try:
                packet = self._socket.recv(1 << 17)
            except TimeoutError:
                continue
            self.seen.update(word for word in self._words if word in packet)


def tasks_of(run_dir):
    """Component -> its first task, by the newest start."""
    return {role: psutil.Process(newest(run_dir, role, "start")["pid"])
            for role in ("rollout", "actor")}  # fmt: skip


def doors_on(task):
    """Processes of MPI, by their command, on a task's host."""
    found = []
    for process in psutil.process_iter(["cmdline", "pid"]):
        words = process.info["cmdline"] or []
        if "relax_hpc.runtime.comm.mpi_door" in words and net_of(process) == net_of(task):
            found.append(Path(words[0]).name)
    return found


def net_of(process):
    return Path(f"/proc/{process.pid}/ns/net").readlink()


@pytest.mark.parametrize("network", ["eth0", "ib0"])
def test_engines_join_over_the_chosen_network_by_mpi_and_no_request_crosses_it(
    hosts, tiny, tmp_path, network
):
    settings = sized(tmp_path, 150, 8, 4, 8) | {
        "launch.profile": "local", "launch.max_restarts": 9,
        "engines.rollout.resources.max_nodes": 2, "reward.name": unhurried(tmp_path),
        "actor.save_every": 2, "weights.advanced.checksum_every": 1,
    }  # fmt: skip
    if network != "eth0":  # Slurm's own is found without a word
        settings["launch.advanced.network"] = network
    with Capture(b'"offset": ', b"POST /init_weights") as capture:
        run_dir = submit("demo", tiny, local=False, **settings).run_dir
        wait_until(run_dir, has_done(2), 300)
        at_first = capture.seen[b'"offset": ']
        assert at_first, "the agreement crosses the wire in frames of MPI's"
        tasks = tasks_of(run_dir)
        assert net_of(tasks["rollout"]) != net_of(tasks["actor"])
        for task in tasks.values():
            assert sorted(doors_on(task)) == ["mpiexec.gforker", "python"]
        said = cli("scale", "out", run_dir, "--engines", "2", "--wait")
        assert said.endswith("done\n")
        steps = wait_until(run_dir, has_done(3), 60)["progress"]["steps_done"]
        tasks["rollout"].send_signal(signal.SIGKILL)
        wait_until(run_dir, has_done(steps + 4), 300)
    assert capture.seen[b'"offset": '] > at_first
    assert not capture.seen[b"POST /init_weights"]
    paths = RunPaths(run_dir)
    group = json.loads(paths.rendezvous("weights").read_text())
    assert {(each["id"], each["invited_by"]) for each in group["members"]} == {
        ("rollout-0", "mpi"), ("extra-1", "mpi")}  # fmt: skip
    urls = [json.loads(path.read_text())["url"] for path in paths.root.glob("members/*.json")]
    assert len(urls) == 2 and all(f"//{hosts[network]}" in url for url in urls)
    hurry(tmp_path)
    after = wait_until_over(run_dir, 400)
    assert after["state"] == "COMPLETED" and after["progress"]["trajectories"]["trained_twice"] == 0
    checks = events_of(run_dir, "actor", "verify")
    assert checks and all(each["equal"] for each in checks)


@pytest.mark.parametrize(
    ("job", "more"),
    [
        ("tiny/arithmetic_ppo", {"algorithm.kl.name": "k3", "algorithm.kl.coefficient": 0.01,
                                 "reference.placement": "own", "critic.warmup_steps": 1}),
        ("tiny/arithmetic_distill", {}),
    ],
    ids=["critic and reference", "teacher"],
)  # fmt: skip
def test_what_scores_and_values_works_from_a_host_of_its_own(hosts, tiny, tmp_path, job, more):
    settings = sized(tmp_path, STEPS, PROMPTS, SIBLINGS, 8) | more
    settings |= {"launch.profile": "local", "engines.rollout.count": 1,
                 "engines.rollout.resources.nodes": 1}  # fmt: skip
    if job.endswith("distill"):
        settings["teachers.sums.path"] = tiny / "model"
    run_dir = submit(job, tiny, local=False, **settings).run_dir
    assert_whole(run_dir, wait_until_over(run_dir, 300), STEPS, PROMPTS, SIBLINGS)


def test_agents_speak_to_engines_of_two_hosts(hosts, tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program = re.search(r"^```python\n# agent.py\n(.*?)^```", PAGE, re.M | re.S)[1]
    (tmp_path / "agent.py").write_text(program)
    settings = sized(tmp_path, STEPS, PROMPTS, SIBLINGS, 8) | {
        "launch.profile": "local", "rollout.environment": "program",
        "rollout.program.command": json.dumps(["python3", "agent.py", "{task}", "{outcome}"]),
        "engines.rollout.count": 2, "engines.rollout.resources.nodes": 2,
    }  # fmt: skip
    run_dir = submit("demo", tiny, local=False, **settings).run_dir
    assert_whole(run_dir, wait_until_over(run_dir, 300), STEPS, PROMPTS, SIBLINGS)
    assert len({json.loads(path.read_text())["url"].split(":")[1]
                for path in run_dir.glob("members/*.json")}) == 2  # fmt: skip


def test_two_jobs_of_one_run_meet_in_files_alone(hosts, tiny, tmp_path):
    settings = sized(tmp_path, STEPS, PROMPTS, SIBLINGS, 8) | {
        "launch.profile": "local", "launch.layout": "separate", "weights.transport": "files",
        "launch.advanced.idle_s": 3, "schedule.max_staleness": 2,
    }  # fmt: skip
    run_dir = submit("demo", tiny, local=False, **settings).run_dir
    assert_whole(run_dir, wait_until_over(run_dir, 400), STEPS, PROMPTS, SIBLINGS)


def test_a_network_that_leads_to_nobody_ends_the_run_by_its_name(hosts, tiny, tmp_path):
    settings = sized(tmp_path, STEPS, PROMPTS, SIBLINGS, 8) | {
        "launch.profile": "local", "launch.advanced.network": "docker0", "launch.max_restarts": 0,
    }  # fmt: skip
    run_dir = submit("demo", tiny, local=False, **settings).run_dir
    after = wait_until_over(run_dir, 300)
    assert after["state"] == "FAILED"
    assert re.search(
        r"the trainer on node n\d \(172.17.0.1\) cannot reach engine rollout-0 at 172.17.0.1:\d+ .*"
        r"set launch.advanced.network",
        cli("logs", run_dir),
    )
