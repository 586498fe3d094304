"""The job without Slurm, end to end with toys in real processes."""

import os
import signal
import subprocess
import sys

import psutil
import pytest
import toys
from toys import exit_code, results, until

from relax_hpc.launch import local
from relax_hpc.launch.local import processes
from relax_hpc.launch.placement import Component
from relax_hpc.runtime.paths import ComponentPaths, RunPaths
from relax_hpc.runtime.process import ProcessId
from relax_hpc.sections import Resources

pytestmark = pytest.mark.long


def launch(run_dir, components, calls, **options):
    toys.write(run_dir, **calls)
    return local.start(toys.job(run_dir, **options), components)


def tasks(role, count, **resources):
    return Component(role, count, Resources(**resources))


def printed(run_dir, job, component, stream="err", rank=0):
    return (
        ComponentPaths(RunPaths(run_dir).component(component), job.job_id)
        .log(rank, stream)
        .read_text()
    )


def script_log(run_dir, job):
    return (RunPaths(run_dir).submission / f"{job.job_id}_batch.log").read_text()


def alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_process_is_found_by_its_number_and_start_until_it_has_ended():
    own = ProcessId.of(os.getpid())
    assert own.find().pid == os.getpid()
    with subprocess.Popen(["sleep", "60"]) as child:
        found = ProcessId.of(child.pid)
        assert found.find().pid == child.pid
        child.kill()
        until(lambda: psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE)
        assert found.find() is None  # although nobody has waited for it
    assert found.find() is None


@pytest.mark.parametrize("name", ["with space '", 'double"quote', "dollar$HOME;b&c"])
def test_hostile_folder_names_are_only_names(tmp_path, name):
    role, run_dir = "role with 'quote", tmp_path / name
    job = launch(run_dir, [tasks(role, 1)], {role: ["raise_until", 1, "x"]})
    assert exit_code(run_dir, job.job_id, 30) == 0
    assert results(run_dir, role, 1) == [1]


def test_a_component_without_restarts_left_ends_the_others_and_says_why(tmp_path):
    calls = {
        "rollout": ["wait_forever_with_a_child", tmp_path / "pids"],
        "actor": ["raise_until", 9, "boom in the actor"],
    }
    job = launch(tmp_path, [tasks("rollout", 1), tasks("actor", 1)], calls, max_restarts=1)
    assert exit_code(tmp_path, job.job_id, 60) != 0
    assert "boom in the actor" in printed(tmp_path, job, "actor")
    left = processes(RunPaths(tmp_path).component("rollout"), job.job_id)
    until(lambda: not any(each.find() for each in left))
    assert "actor: failed 2 times within 1800 s, giving up" in script_log(tmp_path, job)


def test_an_error_that_no_restart_cures_ends_the_job_at_once(tmp_path):
    run_dir = tmp_path / "a [b]"
    calls = {"actor": ["fail_for_good", tmp_path / "starts"]}
    job = launch(run_dir, [tasks("actor", 2)], calls, max_restarts=3)
    assert exit_code(run_dir, job.job_id, 60) != 0
    # Whichever fails first, the other is told to end, maybe before it has failed.
    said = [printed(run_dir, job, "actor", rank=rank) for rank in range(2)]
    assert any("it will be no better" in words for words in said)
    assert "actor: would fail again in the same way, giving up" in script_log(run_dir, job)
    assert set((tmp_path / "starts").read_text().split()) == {"1"}
    left = ComponentPaths(RunPaths(run_dir).component("actor"), job.job_id)
    assert left.final(0).exists() or left.final(1).exists()


def pids_of(folder, ranks):
    paths = [folder / f"pids-{rank}" for rank in range(ranks)]
    until(lambda: all(path.exists() and len(path.read_text().split()) == 2 for path in paths))
    return [int(pid) for path in paths for pid in path.read_text().split()]


@pytest.mark.parametrize("victim", ["controller", "launcher"])
def test_nothing_survives_when_what_started_it_is_killed(tmp_path, victim):
    calls = {"rollout": ["wait_forever_with_a_child", tmp_path / "pids"]}
    job = launch(tmp_path, [tasks("rollout", 2)], calls)
    pids = pids_of(tmp_path, 2)[::2]
    launcher = processes(RunPaths(tmp_path).component("rollout"), job.job_id)[0].pid
    os.kill(job.controller.pid if victim == "controller" else launcher, signal.SIGKILL)
    until(lambda: not any(alive(pid) for pid in [*pids, launcher]))
    for path in tmp_path.glob("pids-*"):  # grandchildren of a killed launcher are beyond reach
        child = int(path.read_text().split()[1])
        if alive(child):
            os.kill(child, signal.SIGKILL)


# A task with a child in its own session and one in another. Once `go` is there, all but the last
# task of a step fail at the same time, with 3; the last one says 9 when it is told to end.
FAILING_TASK = """
sleep 600 & echo $! >> pids.$$
setsid sleep 600 & echo $! >> pids.$$
[ "$SUBMITIT_LOCAL_GLOBALID" = 3 ] && trap 'exit 9' TERM
touch ready.$$
while [ ! -e go ]; do sleep 0.01; done
[ "$SUBMITIT_LOCAL_GLOBALID" = 3 ] || exit 3
while true; do sleep 0.01; done
"""


def local_step(folder, num_tasks, command):
    folder.mkdir()
    options = ["--controller", str(os.getpid()), "--job-id", "x", "--processes", "processes.json"]
    logs = ["--output", "%t.out", "--error", "%t.err", "--", "bash", "-c", command]
    module = [sys.executable, "-m", "relax_hpc.launch.local_step", "--tasks", str(num_tasks)]
    return subprocess.Popen([*module, *options, *logs], cwd=folder, stderr=subprocess.PIPE)


def test_tasks_that_fail_together_give_the_first_code_and_none_of_their_children_stays(tmp_path):
    folders = [tmp_path / str(number) for number in range(4)]
    steps = [local_step(folder, 4, FAILING_TASK) for folder in folders]
    until(lambda: len(list(tmp_path.glob("*/ready.*"))) == 4 * len(folders))
    for folder in folders:
        (folder / "go").touch()
    ends = [(step.communicate(timeout=30)[1], step.returncode) for step in steps]
    assert ends == [(b"", 3)] * len(folders)
    pids = [int(pid) for path in tmp_path.glob("*/pids.*") for pid in path.read_text().split()]
    assert len(pids) == 8 * len(folders) and not [pid for pid in pids if alive(pid)]


def test_a_step_told_to_end_while_its_tasks_start_ends_those_it_has_started(tmp_path):
    step = local_step(tmp_path / "step", 200, "echo $$ >> pids; exec sleep 600")
    until((tmp_path / "step" / "pids").exists)
    step.terminate()
    assert step.communicate(timeout=30)[0] is None and step.returncode == 128 + signal.SIGTERM
    pids = [int(pid) for pid in (tmp_path / "step" / "pids").read_text().split()]
    assert len(pids) < 200 and not [pid for pid in pids if alive(pid)]
