"""The job script: its text, compared with one written down, and what bash makes of it."""

import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from relax_hpc.launch import cluster, script
from relax_hpc.launch.placement import Component
from relax_hpc.launch.supervision import SUPERVISION, WAIT
from relax_hpc.sections import Resources

FOLDER = "/runs/r/submission/rollout"
ONCE = "max_restarts=1 restart_delays_s=(0)"
GOLDEN = Path(__file__).parent / "golden"
ROLLOUT = Resources(
    partition="gpu", nodes=2, max_nodes=3, gpus_per_node=4, cpus_per_task=8, mem="200G",
    time="1-00:00:00", mpi="pmix", python="/envs/sglang/bin/python", sbatch=["--exclusive"],
    setup=["module load cuda", "export NCCL_CUMEM_ENABLE=0"], srun=["--cpu-bind=none"],
)  # fmt: skip
COMPONENTS = [
    Component("rollout", 4, ROLLOUT, "mpi"),
    Component("actor", 2, Resources(python="/envs/train/bin/python")),
]
WRITE = {"slurm": script.slurm_script, "local": script.local_script}


def job(run_dir):
    return script.Job("my-run", Path(run_dir), 3)


@pytest.fixture(autouse=True)
def same_interpreter(monkeypatch):
    monkeypatch.setattr("sys.executable", "/envs/submit/bin/python")


@pytest.mark.parametrize("mode", ["slurm", "local"])
def test_the_script_is_the_one_written_down(mode):
    assert WRITE[mode](job("/runs/it's here"), COMPONENTS) == (GOLDEN / f"{mode}.sh").read_text()


def test_nothing_that_sbatch_was_asked_for_reaches_srun_as_its_default():
    names = "THREADS_PER_CORE NTASKS_PER_CORE NTASKS_PER_SOCKET NTASKS_PER_GPU OVERCOMMIT TRES_BIND"
    text = script.slurm_script(job("/runs/r"), COMPONENTS[1:])
    [unset] = [line for line in text.splitlines() if line.startswith("unset SLURM_MEM")]
    lines = f"{unset}\necho ${{!SLURM_@}}"
    of_sbatch = {f"SLURM_{name}": "1" for name in f"{names} CPU_BIND_TYPE MEM_PER_CPU".split()}
    environment = of_sbatch | {"SLURM_JOB_ID": "7"}
    done = subprocess.run(["bash", "-c", lines], env=environment, capture_output=True, text=True)
    assert done.stdout == "SLURM_JOB_ID\n", done


def test_components_on_one_machine_get_different_gpus():
    asked = [Component(role, 2, Resources(gpus_per_node=2)) for role in ("rollout", "actor")]
    text = script.local_script(job("/runs/r"), asked)
    assert "--first-gpu 0 --gpus 2" in text and "--first-gpu 2 --gpus 2" in text


@pytest.mark.parametrize(
    ("limit", "minutes"),
    [("90:30", 91), ("1:30:00", 90), ("1-02:30", 1590), ("0", cluster.NO_LIMIT)],
)
def test_slurms_time_limits_are_read(limit, minutes):
    assert cluster.minutes(limit) == minutes


def test_a_component_has_nothing_of_those_before_it_that_it_did_not_ask_for():
    """sbatch passes these on; with an empty one Slurm 22.05 gives a component its own nodes."""
    first = Resources(exclude="n1,n4", reservation="res1")
    asked = enumerate([first, Resources(exclude="n2"), Resources()])
    parts = [Component(f"part{k}", 1, each) for k, each in asked]
    _, *later = script.slurm_script(job("/runs/it"), parts).split("#SBATCH hetjob\n")
    said = [
        [line for line in part.splitlines() if re.match("#SBATCH --(exclude|reservation)", line)]
        for part in later
    ]
    assert said == [
        ["#SBATCH --exclude=n2", "#SBATCH --reservation="],
        ["#SBATCH --exclude=", "#SBATCH --reservation="],
    ]


# srun as Slurm 22.05's now and then is over several components: its step has ended, it has not, and
# it does not hear TERM. The first time a task had failed, the second time all had succeeded.
DEAF_SRUN = """#!/bin/bash
cd "$(dirname "$0")"
touch submission/rollout/7_0_done
[ ! -e called ] || touch submission/actor/7_0_done
touch called
sleep 60 & echo $! > task
echo 7.0 $! > submission/rollout/7_step
trap '' TERM
while true; do sleep 0.05; done
"""

# Slurm does not answer, knows the step, knows it no more; only then the first task ends.
SQUEUE = """#!/bin/bash
cd "$(dirname "$0")"
echo . >> asked
times=$(wc -l < asked)
[ $times -lt 6 ] || kill -KILL $(<task)
case $times in 1) exit 1 ;; 2) echo 7.0 ;; *) echo 7.1 ;; esac
"""


def test_srun_that_does_not_end_after_its_step_is_killed_and_marks_say_how_it_went(tmp_path):
    parts = [Component(role, 1, Resources(mpi="pmix"), "mpi_job") for role in ("rollout", "actor")]
    toy = script.Job("toy", tmp_path, 1, (0.0,), has_summary=False, look_every_s=0.1)
    for name, text in (("srun", DEAF_SRUN), ("squeue", SQUEUE)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    script.make_folders(toy, parts)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    command = ["bash", "-c", script.slurm_script(toy, parts)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    said = [line.split(" ", 1)[1] for line in done.stdout.splitlines()]
    assert said == [
        "step 7.0 has ended, its srun has not: killing srun",
        "rollout+actor: start 1 ended with exit code 137",
        "step 7.0 has ended, its srun has not: killing srun",
        "rollout+actor: start 2 ended with exit code 0",
    ]
    assert done.returncode == 0 and (toy.folder / "7_exit_code").read_text() == "0\n"
    asked = len((tmp_path / "asked").read_text().splitlines())
    # More where a task that was killed is a zombie for a while.
    assert asked >= 7 + 2, "silence, a step that is there and a task that is do not count"


def bash(*lines, settings="max_restarts=0 restart_delays_s=(0)"):
    """Runs them after the functions that every job's script has."""
    of_all = "job_id=7 restart_window_s=1800 look_every_s=15 ask_controller=(true) verdict=()"
    text = "\n".join([of_all, settings, SUPERVISION, *lines])
    return subprocess.run(["bash", "-c", text], capture_output=True, text=True, timeout=30)


def test_a_component_waits_longer_before_every_further_start():
    settings = "max_restarts=4 restart_delays_s=(0.5 1 2)"
    tell = 'sleep() { echo "sleep $1"; }'
    done = bash(tell, "(supervise actor 1 /nowhere -- false)", settings=settings)
    slept = [line for line in done.stdout.splitlines() if line.startswith("sleep")]
    assert slept == ["sleep 0.5", "sleep 1", "sleep 2", "sleep 2"], done


@pytest.mark.parametrize(("window_s", "starts"), [(1800, 3), (0, 6)])
def test_only_failures_within_the_window_count(tmp_path, window_s, starts):
    settings = f"max_restarts=2 restart_delays_s=(0) restart_window_s={window_s}"
    step = f"[ @start@ -ge 6 ] && touch {tmp_path}/7_0_done"
    done = bash(f"(supervise actor 1 {tmp_path} -- eval '{step}')", settings=settings)
    assert done.stdout.count("ended with exit code") == starts, done
    assert done.returncode == (0 if starts == 6 else 1)
    assert ("failed 3 times within 1800 s, giving up" in done.stdout) == (starts == 3)


def test_what_failed_while_the_controller_was_away_is_started_again_and_not_counted(tmp_path):
    settings = f"max_restarts=0 restart_delays_s=(0.1) ask_controller=(test -e {tmp_path}/up)"
    step = f"[ -e {tmp_path}/up ] && touch {tmp_path}/7_0_done"
    done = bash(
        f"(command sleep 1; touch {tmp_path}/up) &",
        f"(supervise actor 1 {tmp_path} -- eval '{step}')",
        settings=settings,
    )
    said = [line.partition(" ")[2] for line in done.stdout.splitlines()]
    assert said == [
        "actor: start 1 ended with exit code 1",
        "actor: the controller does not answer; waiting for it",
        "actor: the controller answers again",
        "actor: start 2 ended with exit code 0",
    ]
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("queue", "gives_up"),
    [
        ("7+0 RUNNING\n7+1 CANCELLED\n", True),
        ("7+0 RUNNING\n7+1 RUNNING\n", False),
        ("7+0 CANCELLED\n7+1 COMPLETING\n7+10 FAILED\n", False),
        ("", False),
    ],
)
def test_a_component_whose_part_of_the_job_was_cancelled_is_not_started_again(
    tmp_path, queue, gives_up
):
    (tmp_path / "queue").write_text(queue)
    done = bash(
        f"squeue() {{ cat {tmp_path}/queue; }}",
        'tell() { echo "told $*"; }',
        f"(supervise actor 1 {tmp_path} -- false --het-group=1)",
        settings="max_restarts=2 restart_delays_s=(0)",
    )
    assert done.stdout.count("ended with exit code 1") == (1 if gives_up else 3), done
    told = "told ended --words actor: Slurm has ended its part of the job (7+1 CANCELLED); resume"
    assert (told in done.stdout) == gives_up and done.returncode == 1


@pytest.mark.parametrize(("end", "ended"), [("kill -9 $$", ["-Q 8.1"]), ("exit 9", [])])
def test_a_step_whose_srun_is_killed_is_ended_before_the_next_start(tmp_path, end, ended):
    """Of a heterogeneous job; those of its other components and the script's own go on."""
    (tmp_path / "steps").write_text("8.batch batch\n8.0 rollout\n8.1 actor\n8.2 actor-1\n")
    done = bash(
        "SLURM_JOB_ID_HET_GROUP_1=8",
        f'squeue() {{ [[ "$*" != "--noheader --steps --jobs=8 "* ]] || cat {tmp_path}/steps; }}',
        'scancel() { echo "scancel $*"; }',
        f"srun() {{ sh -c '{end}'; }}",
        f"(supervise actor 1 {tmp_path} -- srun --het-group=1 --job-name=actor)",
        settings="max_restarts=1 restart_delays_s=(0)",
    )
    lines = [line.partition("scancel ") for line in done.stdout.splitlines()]
    said = [given for before, found, given in lines if found and not before]
    assert said == ended, done
    assert done.stdout.count("ended with exit code") == 2


@pytest.mark.parametrize(
    ("away", "waits"),
    [("false", 'grep -q waiting "$said"'), ("true", 'pgrep -P "$loop" sleep > /dev/null')],
)
def test_a_component_that_is_told_to_end_while_it_waits_ends_then(tmp_path, away, waits):
    """For the controller, or for its next start."""
    done = bash(
        f"said={tmp_path}/said",
        'supervise actor 1 /nowhere -- false > "$said" & loop=$!',
        f"until {waits}; do command sleep 0.05; done",
        'kill -TERM "$loop"; wait "$loop"',
        settings=f"max_restarts=1 restart_delays_s=(60) ask_controller=({away})",
    )
    assert done.returncode == 1 and "start 2" not in (tmp_path / "said").read_text()


def test_a_run_whose_component_gives_up_ends_though_a_board_goes_on(tmp_path):
    """The component ends while the script hears of it: bash 5.2 then waited for ever, mostly."""
    hears = 'trap "exit 3" TERM; while true; do sleep 0.05; done'
    for _ in range(4):
        done = bash(
            f"supervise rollout 1 {tmp_path} -- bash -c 'touch {tmp_path}/7_0_final; exit 1' &",
            "components+=($!)",
            f"supervise actor 1 /nowhere -- bash -c '{hears}' & components+=($!)",
            "sleep 60 & boards+=($!)",
            WAIT,
            "exit $exit_code",
        )
        assert "rollout: would fail again in the same way, giving up" in done.stdout
        assert done.returncode == 3


@pytest.mark.parametrize("in_order", [("rollout", "actor"), ("actor", "rollout")])
def test_who_is_ended_because_another_gave_up_does_not_make_it_a_job_that_was_cancelled(
    tmp_path, in_order
):
    commands = {
        "rollout": f"supervise rollout 1 {tmp_path} -- "
        f"bash -c 'touch {tmp_path}/7_0_final; sleep 0.5; exit 1' &",
        "actor": "supervise actor 1 /nowhere -- sleep 60 &",
    }
    started = [line for name in in_order for line in (commands[name], "components+=($!)")]
    done = bash(*started, WAIT, "exit $exit_code")
    assert "actor: start 1 ended with exit code 143" in done.stdout
    assert done.returncode == 1, done


@pytest.mark.parametrize(
    ("assigned", "command"),
    [("step", "supervise actor 1 /nowhere -- sleep 60"), ("child", "serve scaler sleep 60")],
)
def test_told_to_end_between_the_start_of_a_step_and_its_number_it_ends_the_step(assigned, command):
    tell = f"trap '[[ $BASH_COMMAND != {assigned}=* ]] || kill -TERM $BASHPID' DEBUG"
    done = bash("set -o functrace", tell, command)
    assert done.returncode == (143 if assigned == "step" else 0), done


def apart(tasks=4, resources=Resources(nodes=2, gpus_per_node=4), **settings):  # noqa: B008
    return Component("rollout", tasks, resources, is_apart=True, **settings)


def steps_of(text):
    """The words of each line that supervises a step of rollout."""
    return [line.split() for line in text.splitlines() if line.startswith("  supervise rollout")]


def test_tasks_that_know_nothing_of_each_other_have_a_step_each_which_sees_all_of_its_node():
    """Two nodes, two tasks on each: CPUs of both tasks, all GPUs, and the place on the node."""
    resources = Resources(nodes=2, gpus_per_node=4, cpus_per_task=3)
    text = script.slurm_script(job("/runs/r"), [apart(resources=resources), COMPONENTS[1]])
    assert [line[:4] for line in steps_of(text)] == [["supervise", "rollout", "1", FOLDER]] * 4
    for rank, line in enumerate(steps_of(text)):
        size = {"--overlap", "--nodes=1", "--ntasks=1", "--ntasks-per-node=1"}
        assert f"--job-name=rollout-{rank}" in line
        assert size | {"--cpus-per-task=6"} <= {*line}
        assert f'--nodelist="$(hosts 0 {rank // 2} 1)"' in " ".join(line)
        assert {"--gpus-per-node=4", "--mpi=none"} <= {*line}
        assert f'--output={FOLDER}/"$job_id"_{rank}_log.out' in line
        assert line[line.index("--apart-from") :] == [
            "--apart-from", str(rank), "--tasks", "4", "--on-node", "2", "--cpus", "3",
        ]  # fmt: skip
        assert f"  local ranks=({rank})\n" in text and f"component_0_{rank} &" in text
    for whole in (apart(on="actor"), replace(apart(), is_apart=False), apart(bootstrap="mpi")):
        assert whole.steps == [range(4)]


@pytest.mark.parametrize(
    "asked",
    [{"srun": ["--cpu-bind=map_cpu:0,4"]}, {"container": "nvcr.io#nvidia/pytorch:25.01-py3"}],
)
def test_what_is_dealt_to_the_tasks_of_a_step_leaves_those_of_a_node_together(asked):
    together = apart(resources=Resources(nodes=2, gpus_per_node=4, cpus_per_task=3, **asked))
    assert together.steps == [range(2), range(2, 4)]
    lines = steps_of(script.slurm_script(job("/runs/r"), [together, COMPONENTS[1]]))
    for place, line in enumerate(lines):
        size = {"--nodes=1", "--ntasks=2", "--ntasks-per-node=2", "--cpus-per-task=3"}
        assert size <= {*line} and "--overlap" not in line
        assert f'--nodelist="$(hosts 0 {place} 1)"' in " ".join(line)
        assert line[line.index("--apart-from") :] == [
            "--apart-from", str(2 * place), "--tasks", "4",
        ]  # fmt: skip


def test_of_very_many_tasks_those_of_a_node_are_in_a_step_and_of_very_many_nodes_several():
    for tasks, nodes, sizes in ((128, 16, {1}), (136, 17, {8}), (600, 300, {6})):
        many = Component("rollout", tasks, Resources(nodes=nodes), is_apart=True)
        assert {*map(len, many.steps)} == sizes and len(many.steps) == tasks // max(sizes)
        assert [rank for step in many.steps for rank in step] == [*range(tasks)]
    assert many.nodes_of(many.steps[1]) == range(3, 6)


def test_a_step_of_some_tasks_looks_at_and_removes_the_marks_of_these_alone(tmp_path):
    for name in ("7_0_done", "7_3_final"):
        (tmp_path / name).touch()
    step = f"echo start; touch {tmp_path}/7_2_done; [ -e {tmp_path}/again ] || "
    step += f"{{ touch {tmp_path}/again; exit 1; }}"
    done = bash(
        f"one() {{ local ranks=(2); supervise rollout 1 {tmp_path} -- bash -c '{step}'; }}; (one)",
        settings=ONCE,
    )
    assert done.stdout.count("start\n") == 2 and "start 2 ended with exit code 0" in done.stdout
    assert (tmp_path / "7_0_done").exists() and (tmp_path / "7_3_final").exists()
