"""The local executor, end to end with toy functions in real processes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import cloudpickle
import psutil
import pytest
from submitit import JobEnvironment
from submitit.core.utils import FailedJobError

from relax_hpc.comm.process_id import ProcessId
from relax_hpc.config.sections import Resources
from relax_hpc.errors import MismatchError
from relax_hpc.launch import component
from relax_hpc.launch.jobs import Call
from relax_hpc.launch.local import HetLocalExecutor, LocalHetJob, processes
from relax_hpc.launch.placement import Component
from relax_hpc.launch.script import Job

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # tasks do not import tests


def who_am_i(role):
    return component.task_context(role)


def kill_yourself_at_the_first_start(role):
    context = component.task_context(role)
    if context.start == 1 and context.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return context.start


def raise_until(start, message):
    if component.start_count.get() < start:
        raise ValueError(message)
    return component.start_count.get()


def wait_forever_with_a_child(pid_file):
    child = os.fork()
    if child == 0:
        time.sleep(3600)
    Path(f"{pid_file}-{JobEnvironment().global_rank}").write_text(f"{os.getpid()} {child}")
    time.sleep(3600)


def launch(folder, calls, **options) -> LocalHetJob:
    executor = HetLocalExecutor(folder)
    return executor.submit_het(calls, Job("toy", folder.absolute(), restart_delay_s=0.1, **options))


def tasks(role, count, **resources):
    return Component(role, count, Resources(**resources))


def until(condition, timeout_s=30.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "timeout"
        time.sleep(0.05)


def alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_process_is_found_by_its_number_and_start_until_it_has_ended():
    own = ProcessId.of(os.getpid())
    assert own.find().pid == os.getpid()
    assert ProcessId(own.pid, own.start_time - 1).find() is None  # another had this number then
    with subprocess.Popen(["sleep", "60"]) as child:
        its = ProcessId.of(child.pid)
        assert its.find().pid == child.pid
        child.kill()
        until(lambda: psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE)
        assert its.find() is None  # although nobody has waited for it
    assert its.find() is None


def test_both_components_run_and_every_task_knows_who_it_is(tmp_path):
    job = launch(tmp_path, [
        Call(tasks("rollout", 2), who_am_i, ("rollout",)),
        Call(tasks("actor", 1), who_am_i, ("actor",)),
    ])  # fmt: skip
    rollout, actor = job.results()
    assert [(task.name, task.size, task.start) for task in rollout] == [
        ("rollout-0", 2, 1), ("rollout-1", 2, 1)]  # fmt: skip
    assert [task.name for task in actor] == ["actor-0"]
    assert actor[0].attempt == f"{job.job_id}.0"
    assert job.exit_code(30) == 0


@pytest.mark.parametrize("name", ["with space", "a'quote", 'double"quote', "dollar$HOME", "a;b&c"])
def test_hostile_folder_names_are_only_names(tmp_path, name):
    job = launch(tmp_path / name, [Call(tasks("role with 'quote", 1), raise_until, (1, "x"))])
    assert job.results() == [[1]]


def test_a_killed_task_has_its_whole_step_started_again_in_place(tmp_path):
    job = launch(tmp_path, [
        Call(tasks("rollout", 2), kill_yourself_at_the_first_start, ("rollout",)),
        Call(tasks("actor", 1), who_am_i, ("actor",)),
    ], max_restarts=1)  # fmt: skip
    assert job.exit_code(60) == 0  # before, a result of the first start may still lie there
    rollout, actor = job.results()
    assert rollout == [2, 2], "a finished rank starts again together with its peers"
    assert actor[0].start == 1, "the other component was left alone"


def test_an_exception_that_is_followed_by_a_restart_leaves_no_result(tmp_path):
    job = launch(tmp_path, [Call(tasks("actor", 1), raise_until, (3, "not yet"))], max_restarts=2)
    assert job.results() == [[3]]
    assert "ValueError: not yet" in job.components[0].stderr()


def test_a_component_without_restarts_left_ends_the_others_and_says_why(tmp_path):
    job = launch(tmp_path, [
        Call(tasks("rollout", 1), wait_forever_with_a_child, (tmp_path / "pids",)),
        Call(tasks("actor", 1), raise_until, (9, "boom in the actor")),
    ], max_restarts=1)  # fmt: skip
    error = job.components[1].exception()
    assert isinstance(error, FailedJobError) and "boom in the actor" in str(error)
    assert job.exit_code(30) != 0
    until(lambda: job.components[0].done())
    log = (tmp_path / f"{job.job_id}_batch.log").read_text()
    assert "actor: failed 2 times, giving up" in log


def fail_for_good(mark):
    with Path(mark).open("a") as file:
        file.write(f"{component.start_count.get()} ")
    raise MismatchError("it will be no better")


def test_an_error_that_no_restart_cures_ends_the_job_at_once(tmp_path):
    folder = tmp_path / "a [b]"
    call = Call(tasks("actor", 2), fail_for_good, (tmp_path / "starts",))
    job = launch(folder, [call], max_restarts=3)
    assert job.exit_code(60) != 0
    # Whichever fails first, the other is told to end, maybe before it has a result.
    errors = [task.exception() for task in job.components[0]._sub_jobs]
    failures = [str(error) for error in errors if isinstance(error, FailedJobError)]
    assert failures and all("it will be no better" in failure for failure in failures)
    log = (folder / f"{job.job_id}_batch.log").read_text()
    assert "actor: would fail again in the same way, giving up" in log
    assert set((tmp_path / "starts").read_text().split()) == {"1"}
    mark = folder / "c0" / f"{job.job_id}_0_final"
    assert mark.exists() or mark.with_name(f"{job.job_id}_1_final").exists()


def pids_of(folder, ranks):
    paths = [folder / f"pids-{rank}" for rank in range(ranks)]
    until(lambda: all(path.exists() and len(path.read_text().split()) == 2 for path in paths))
    return [int(pid) for path in paths for pid in path.read_text().split()]


def test_cancel_leaves_nothing_alive_and_touches_nothing_else(tmp_path):
    calls = [Call(tasks("rollout", 2), wait_forever_with_a_child, (tmp_path / "pids",))]
    other = Call(tasks("actor", 1), wait_forever_with_a_child, (tmp_path / "other-pids",))
    bystander = launch(tmp_path / "other", [other])
    job = launch(tmp_path, calls, max_restarts=3)
    pids = pids_of(tmp_path, 2)
    until((tmp_path / "other-pids-0").exists)
    job.cancel()
    assert not any(alive(pid) for pid in pids)
    assert job.exit_code(10) == 143
    assert not bystander.done()
    bystander.cancel()


@pytest.mark.parametrize("victim", ["controller", "launcher"])
def test_nothing_survives_when_what_started_it_is_killed(tmp_path, victim):
    job = launch(tmp_path, [
        Call(tasks("rollout", 2), wait_forever_with_a_child, (tmp_path / "pids",))])  # fmt: skip
    pids = pids_of(tmp_path, 2)[::2]
    launcher = processes(tmp_path / "c0", job.job_id)[0].pid
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
