"""What a site and a user want said to Slurm: spellings, shared tables, profiles, interpreters."""

import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from job_trees import job_of
from typer.testing import CliRunner

from relax_hpc.cli.main import app
from relax_hpc.errors import ConfigError
from relax_hpc.launch import cluster, interpreter, profiles, script, submit
from relax_hpc.launch.placement import Component, place
from relax_hpc.launch.submit import plan, resolve
from relax_hpc.sections import Resources


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """Nobody's profiles but those of a test."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv(profiles.VARIABLE, raising=False)
    folder = tmp_path / "config" / "relax-hpc"
    folder.mkdir(parents=True)
    return folder


def job(resources=None, rollout=None, actor=None, **launch):
    return job_of(
        engines__rollout__resources=rollout or {}, actor__resources=actor or {},
        resources=resources or {}, launch=launch,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        ({"time": "UNLIMITED"}, "--time=UNLIMITED"),
        ({"gpus_per_node": "h100:4"}, "--gpus-per-node=h100:4"),
        ({"gpus": 8, "nodes": 1}, "--gpus-per-node=8"),
        ({"exclude": "n[3-4]"}, "--exclude='n[3-4]'"),
    ],
)
def test_requests_are_written_as_slurm_writes_them(asked, line):
    rollout, _ = components = place(job(rollout=asked))
    text = script.slurm_script(script.Job("run", Path("/runs/run")), components)
    leader, follower = text.split("#SBATCH hetjob\n")
    assert f"#SBATCH {line}\n" in leader and f"#SBATCH {line}" not in follower
    assert Resources.model_validate_json(rollout.resources.model_dump_json()) == rollout.resources


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"gpus": 3, "nodes": 2}, "gpus = 3: does not divide over nodes = 2"),
        ({"gpus": "many"}, "gpus = 'many': is no number of GPUs; use 4 or"),
        ({"gpus": 2, "gpus_per_node": 1}, "takes either gpus or gpus_per_node; remove one of them"),
        ({"mem": "64 GB"}, "mem = '64 GB': is no amount of memory; use"),
        ({"mail": "a@b.c"}, "resources.mail = 'a@b.c': is of the whole job; set resources.mail"),
    ],
)
def test_spellings_that_mean_nothing_are_refused(asked, message):
    with pytest.raises(ConfigError) as error:
        job(rollout=asked)
    assert message in str(error.value)


def test_what_components_share_is_between_the_site_and_their_own(home):
    (home / "site.toml").write_text('qos = "site"\ntime = 1\naccount = "site"\n[actor]\ntime = 2\n')
    shared = {"time": 3, "account": "shared", "partition": "shared"}
    rollout, actor = place(job(shared, actor={"partition": "own"}, profile="site"))
    asked = Resources(qos="site", time="3", account="shared", partition="shared")
    assert rollout.resources == asked
    assert actor.resources == asked.model_copy(update={"partition": "own"})


def test_what_is_of_the_whole_job_is_said_once_and_the_jobs_word_is_last(home):
    (home / "site.toml").write_text('comment = "of the site"\nmail = "site@b.c"')
    asked = {"mail": "me@b.c", "dependency": "afterok:7"}
    config, components = resolve(job(asked, profile="site"))
    first = plan("slurm", config, components, 1).script
    leader, follower = first.split("#SBATCH hetjob\n")
    for line in ("--comment='of the site'", "--mail-user=me@b.c", "--dependency=afterok:7"):
        assert f"#SBATCH {line}\n" in leader and line not in follower
    assert "#SBATCH --mail-type=BEGIN,END,FAIL,REQUEUE" in leader
    again = plan("slurm", config, components, 2).script
    assert "--mail-user" in again and "--dependency" not in again


def test_the_profile_is_the_jobs_then_the_variables_then_the_users_default(home, monkeypatch):
    assert profiles.chosen(None) is None and resolve(job())[0].launch.profile is None
    (home / "default.toml").write_text('qos = "default"')
    (home / "mine.toml").write_text('qos = "mine"')
    config, [rollout, _] = resolve(job())
    assert (rollout.resources.qos, config.launch.profile) == ("default", str(home / "default.toml"))
    monkeypatch.setenv(profiles.VARIABLE, "mine")
    assert place(job())[0].resources.qos == "mine"
    assert place(job(profile="local"))[0].resources.qos is None
    assert profiles.chosen("local") == "local", "wherever the package is by then"
    monkeypatch.setenv(profiles.VARIABLE, "mien")
    with pytest.raises(ConfigError, match=r"\$RELAX_PROFILE = 'mien': no such .* mean mine"):
        place(job())


def look(*, use_slurm=True, packages=(), **resources):
    said = []
    asked = Resources(**resources)
    interpreter.check(
        "actor.resources", asked, use_slurm=use_slurm, say=said.append, packages=packages
    )
    return said


def program(path, text):
    """Makes this shell script a program; its path."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def answers(said):
    """A line of shell that answers as an interpreter does, behind what else it prints."""
    return f"echo hello; echo '{interpreter._MARK}{said}'"


def test_an_interpreter_is_looked_at(tmp_path):
    assert look(python=sys.executable) == []
    for name, answer in (
        (str(tmp_path / "none"), "no such program"),
        (str(tmp_path), "no such program"),
        (program(tmp_path / "bare", "exit 1"), "has no relax-hpc; install relax-hpc"),
        (program(tmp_path / "old", answers('"0.0.1"')), "has relax-hpc 0.0.1, and this is"),
        ("apptainer exec image.sif python", "is one path, not a command; an image is named by"),
    ):
        with pytest.raises(ConfigError) as error:
            look(python=name)
        assert answer in str(error.value)
    later = look(python="/local/env/bin/python", setup=["tar -C /local -xf env.tar"])
    assert "is looked up on the nodes, after `setup`" in later[0]


def test_an_interpreter_may_greet_before_it_answers(tmp_path):  # O1
    greeting = r"printf 'Bienvenue sur le r\351seau\n{\"a\": 1}\n'; printf '\351' >&2"
    python = program(tmp_path / "python", f'{greeting}\n{sys.executable} "$@"; {greeting}')
    assert look(python=python, packages=["torch"]) == []
    with pytest.raises(ConfigError, match="has no nowhere"):
        look(python=python, packages=["nowhere"])


def test_an_interpreter_that_lacks_what_its_tasks_import_is_refused(tmp_path, monkeypatch):
    own = metadata.version("relax-hpc")
    for name, has in (("with", "true"), ("without", "false")):
        text = f"case $2 in *sglang*) {answers(has)} ;; *) {answers(json.dumps(own))} ;; esac"
        program(tmp_path / name, text)
    there, absent = str(tmp_path / "with"), str(tmp_path / "without")
    assert look(python=there, packages=["sglang"]) == []
    with pytest.raises(ConfigError, match=r"python = '.*without': has no sglang; install sg"):
        look(python=absent, packages=["sglang"])
    monkeypatch.setattr("sys.executable", absent)
    assert look(packages=["sglang"]) == [], "a login node may have less than the others"
    with pytest.raises(ConfigError, match=rf"python \(unset, so {absent}\): has no sglang"):
        look(packages=["sglang"], use_slurm=False)
    [said] = look(packages=["sglang"], use_slurm=False, setup=["module load sglang"])
    assert said.endswith("has no sglang, unless `setup` adds it")


def test_an_interpreter_named_from_here_is_the_same_from_anywhere(tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    python = program(tmp_path / "bin" / "python", "true")
    monkeypatch.chdir(tmp_path)
    assert place(job(rollout={"python": "bin/python"}))[0].resources.python == python
    for kept in ({"python": "python3.11"}, {"python": "bin/python", "container": "docker://image"}):
        assert interpreter.make_absolute(Resources(**kept)) == Resources(**kept)


def test_an_image_is_run_by_apptainer_which_sees_the_run_directory(tmp_path):
    image = tmp_path / "relax.sif"
    image.touch()
    program(tmp_path / "apptainer", f'echo "$*" > {tmp_path}/asked; shift 5; exec "$@"')
    asked = Resources(container=str(image), python=sys.executable, gpus_per_node=1)
    assert look(container=str(image)) == []
    command = interpreter.command(asked, tmp_path / "runs", "unused")
    path = f"{tmp_path}:{os.environ['PATH']}"
    said = subprocess.run(
        [*command, "-c", "print('in')"], env={"PATH": path}, capture_output=True, text=True
    )
    assert said.stdout == "in\n"
    told = (tmp_path / "asked").read_text()
    assert told.startswith(f"exec --nv --bind {tmp_path}/runs {image} {sys.executable} -c ")
    without = interpreter.command(Resources(container=str(image)), tmp_path, "unused")
    assert "--nv" not in without


def test_an_image_of_enroot_is_run_by_srun():
    asked = Component("actor", 1, Resources(container="nvcr.io/site/relax:1", srun=["--extra"]))
    text = script.slurm_script(script.Job("run", Path("/runs/run")), [asked])
    image = "--container-image=nvcr.io/site/relax:1 --container-mounts=/runs:/runs --extra "
    assert image in text and " python3 -u -P -m relax_hpc.launch.entry " in text
    with pytest.raises(ConfigError, match="is run by pyxis, a part of srun; without Slurm use"):
        look(container="nvcr.io/site/relax:1", use_slurm=False)
    with pytest.raises(ConfigError, match="no such file or folder"):
        look(container="/nowhere/relax.sif")


@pytest.mark.parametrize(("said", "mounts"), [
    (["--container-mounts=/a:/a,/b:/c:ro", "--container-mounts=/a:/a,/d:/d"],
     "/a:/a,/b:/c:ro,/d:/d,/runs:/runs"),
    (["--container-mounts=/runs:/runs,/a:/a"], "/a:/a,/runs:/runs"),
])  # fmt: skip
def test_all_mounts_of_an_image_are_one_option_since_pyxis_keeps_the_last(said, mounts):
    asked = Resources(container="nvcr.io/site/relax:1", srun=["--first", *said, "--last"])
    image = ["--container-image=nvcr.io/site/relax:1", f"--container-mounts={mounts}"]
    assert interpreter.srun_options(asked, Path("/runs")) == [*image, "--first", "--last"]


PARTITIONS = """\
PartitionName=low GraceTime={grace} PriorityTier=1 PreemptMode={mode}
PartitionName=high GraceTime=0 PriorityTier=10 PreemptMode={mode}
PartitionName=apart GraceTime=0 PriorityTier=1 PreemptMode={mode}
"""


def test_whose_jobs_are_preempted_and_how_is_read_as_slurm_prints_it():
    def found(names, mode="REQUEUE", grace=15):
        limits = cluster.parse_limits(PARTITIONS.format(mode=mode, grace=grace))
        nodes = cluster.parse_sinfo("low*|n1|(null)\nhigh|n1|(null)\napart|n2|(null)")
        return cluster.preemption_by_partition(limits, nodes, names)

    assert found(["low"]) == ("partition low", "REQUEUE", 15, True)
    assert found(["high", "low"], "GANG,SUSPEND", 0) == ("partition low", "SUSPEND", 0, True)
    assert found(["high"]) is None, "nobody is above it"
    assert found(["apart"]) is None, "who is above it has other nodes"
    assert found(["low"], "OFF") is None
    known = {
        "normal": cluster.Qos("normal", "", "", "cluster", "00:00:00"),
        "urgent": cluster.Qos("urgent", "", "normal,scavenge", "cluster", "00:00:00"),
        "scavenge": cluster.Qos("scavenge", "", "", "cancel", "00:02:05"),
    }

    def by_qos(name, mode):
        return cluster.preemption_by_qos(known, name, mode)

    assert by_qos("normal", "REQUEUE") == ("QOS normal", "REQUEUE", 0, True)
    assert by_qos("scavenge", "OFF") == ("QOS scavenge", "CANCEL", 125, True)
    assert by_qos("normal", "OFF") is by_qos("urgent", "REQUEUE") is None


PREEMPTS = "engines.rollout.resources: partition low "
COSTS = {
    # mode, GraceTime, longest save: what is said
    ("REQUEUE", 15, None): "announces a preemption 15 s before (GraceTime); how long a save takes "
    "is not known before the first",
    ("CANCEL", 15, 12.0): "announces a preemption 15 s before (GraceTime), and a save of this run "
    "took 12 s: up to 20 steps are trained again; lower actor.save_every",
    ("REQUEUE", 0, None): "requeues jobs that it preempts, at once; up to 20 steps are trained "
    "again; lower actor.save_every",
    ("CANCEL", 0, None): "cancels jobs that it preempts, at once: resume it then; up to 20 steps "
    "are trained again; lower actor.save_every",
    ("SUSPEND", 0, None): "suspends jobs that it preempts: all of this one stands still then, and "
    "time-outs go on",
}


CONFIG = """\
Configuration data as of 2026-11-27T14:31:10
JobRequeue              = 1
PreemptMode             = REQUEUE
PreemptParameters       = (null)
PreemptType             = preempt/partition_prio
PreemptExemptTime       = 00:00:00
SlurmctldParameters     = {parameters}
"""


def told_of(monkeypatch, mode, grace, save_s=None, sbatch=(), signals="preempt_send_user_signal"):
    """What is said of a run of two components in partition low."""
    said = []
    answers = {
        "sinfo": "low*|n1|(null)\nhigh|n1|(null)",
        "scontrol show config": CONFIG.format(parameters=signals),
        "scontrol --all show partition": PARTITIONS.format(mode=mode, grace=grace),
    }

    def output_of(command):
        text = next(t for name, t in answers.items() if " ".join(command).startswith(name))
        return subprocess.CompletedProcess(command, 0, text, "")

    monkeypatch.setattr(cluster, "output_of", output_of)
    components = [
        Component("rollout", 1, Resources(sbatch=list(sbatch)), section="engines.rollout"),
        Component("actor", 1, Resources()),
    ]
    cluster.check_preemption(
        components, cluster.Cluster(), save_every=20, save_s=save_s, say=said.append
    )
    return said


@pytest.mark.parametrize("case", COSTS, ids=str)
def test_what_a_preemption_would_cost_is_said_once_before_the_job_is_queued(monkeypatch, case):
    assert told_of(monkeypatch, *case) == [PREEMPTS + COSTS[case]]


def test_a_requeue_that_is_asked_for_by_name_is_refused_where_nobody_could_do_it(monkeypatch):
    asked = ["--requeue"]
    assert all(told_of(monkeypatch, *how, sbatch=asked) for how in (("REQUEUE", 0), ("CANCEL", 15)))
    with pytest.raises(ConfigError, match=r"engines.rollout.resources.sbatch asks for --requeue: "):
        told_of(monkeypatch, "CANCEL", 0, sbatch=asked)
    [said] = told_of(monkeypatch, "REQUEUE", 0, sbatch=["--no-requeue"])
    assert "cancels jobs that it preempts, at once: resume it" in said


@pytest.mark.parametrize("parameters", ["(null)", "enable_configless,idle_on_node_suspend"])
def test_a_grace_of_which_no_signal_tells_is_none(monkeypatch, parameters):
    lacks = "in effect at once (GraceTime = 60, without preempt_send_user_signal)"
    again = "up to 20 steps are trained again; lower actor.save_every"
    for mode, then in (("REQUEUE", ""), ("CANCEL", ": resume it then")):
        [said] = told_of(monkeypatch, mode, 60, 5.0, signals=parameters)
        assert said == f"{PREEMPTS}{mode.lower()}s jobs that it preempts, {lacks}{then}; {again}"
    with pytest.raises(ConfigError, match=r"GraceTime = 60, without preempt_send_user_signal\)"):
        told_of(monkeypatch, "CANCEL", 60, sbatch=["--requeue"], signals=parameters)


def asked_of(job, *words):
    """What both components of the job file ask for, by the script."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(submit, "mode_of", lambda **_: "slurm")
        patch.setattr(submit.preflight, "check", lambda config, *_, **__: config)
        answer = CliRunner().invoke(app, ["submit", str(job), "--dry-run", *words])
    return [
        re.findall(r"#SBATCH --(account|partition|time)=(\S+)", part)
        for part in answer.output.split("#SBATCH hetjob\n")
    ] if answer.exception is None else str(answer.exception)  # fmt: skip


def test_account_partition_and_time_may_be_said_as_to_sbatch(tmp_path, home):
    (home / "default.toml").write_text('account = "site"\n[actor]\npartition = "site"\n')
    file = tmp_path / "job.toml"
    text = (
        'name = "run"\nmodel.path = "m"\nprompts.train = "t"\nschedule.num_steps = 1\n'
        'resources = { time = 5, partition = "shared" }\n'
    )
    file.write_text(text)
    said = asked_of(file, "-A", "mine", "-p", "gpu", "-t", "2-00:00:00")
    told = {"account": "mine", "partition": "gpu", "time": "2-00:00:00"}
    assert [dict(each) for each in said] == [told, told]
    assert [dict(each)["account"] for each in asked_of(file, "--time", "7")] == ["site"] * 2
    (home / "other.toml").write_text('account = "other"')
    assert dict(asked_of(file, "--profile", "other")[1])["account"] == "other"
    twice = "--time 7: --set resources.time=8 says so, too; leave one out"
    assert asked_of(file, "-t", "7", "--set", "resources.time=8") == twice
    file.write_text(text + 'actor.resources.partition = "big"\n')
    said = asked_of(file, "-p", "gpu")
    assert said.startswith("--partition gpu: the job has actor.resources.partition = 'big'; ")
    assert dict(asked_of(file, "-p", "big")[1])["partition"] == "big"
