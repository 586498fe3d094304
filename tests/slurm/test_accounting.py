"""Jobs that a cluster with accounting would refuse, or never start: `check` says which key."""

import getpass
import json
import re
import subprocess

import pytest
from cluster import local_slurm
from typer.testing import CliRunner

from relax_hpc.cli.demo import models
from relax_hpc.cli.main import app
from relax_hpc.errors import ConfigError

CONF = """\
AccountingStorageEnforce=associations,limits,qos
PartitionName=short Nodes=ALL MaxTime=60 State=UP
PartitionName=broad Nodes=ALL MinNodes=3 State=UP
PartitionName=drained Nodes=ALL State=DRAIN
PartitionName=closed Nodes=ALL State=INACTIVE
"""
PARTITIONS = """\
PartitionName=paying Nodes=ALL AllowAccounts=gold State=UP
PartitionName=fast Nodes=ALL AllowQos=fast State=UP
PartitionName=debug Nodes=ALL QOS=single
"""
ACCOUNTING = """\
add qos small MaxTRESPerJob=cpu=2,gres/gpu=1 Flags=DenyOnLimit
add qos fast MaxWall=00:30:00 Flags=DenyOnLimit
add qos hidden
add account gold
add account spent MaxSubmitJobs=0
add user {me} account=spent
add qos single MaxJobsPerUser=1
add qos double MaxJobsPerUser=2
add account alone MaxJobs=1
add user {me} account=alone
modify user {me} set qos=normal,small,fast,single,double
"""
JOB = """
name = "refused"
model = { path = "model", dtype = "float32" }
prompts.train = "prompts.jsonl"
schedule = { num_steps = 5, prompts_per_step = 4 }
"""
REFUSED = {
    "account=gold": "account = 'gold': sbatch: Invalid account .*; yours are alone, default",
    "account=spent": "account = 'spent': sbatch: AssocMaxSubmitJobLimit; ",
    "qos=hidden": "qos = 'hidden': sbatch: Invalid qos specification; yours are double, fast",
    "qos=small cpus_per_task=4": "qos = 'small', .*cpus_per_task = 4: sbatch: QOSMaxCpuPerJobLimit",
    "qos=fast time=60": "qos = 'fast', .*time = '60': sbatch: QOSMaxWallDurationPerJobLimit",
    "partition=drained": "partition = 'drained': sbatch: Required partition not available",
    "partition=short time=2:00:00": "time = '2:00:00': partition short lets jobs run for 01:00:00;",
    "partition=broad": "nodes = 1: partition broad takes 3 nodes or more",
    "partition=paying account=default": "account = 'default': partition paying takes gold only",
    "partition=fast qos=normal": "qos = 'normal': partition fast takes fast only",
    "constraint=h100": "constraint = 'h100': sbatch: Invalid feature .*; no node has a feature, ",
    "gpus_per_node=4": "gpus_per_node = 4: 0 nodes of partition main have as many",
    "mem=999G": "mem = '999G': sbatch: .*(Memory|node config)",
    "reservation=maintenance": "reservation = 'maintenance': sbatch: .*reservation is invalid",
    "exclude=n9": "exclude = 'n9': sbatch: Invalid node name specified",
    "sbatch=['--licenses=matlab:1']": "sbatch = .'--licenses=matlab:1'.: sbatch: Invalid license",
}


@pytest.fixture(scope="module", autouse=True)
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("a")
    (folder / "extra.conf").write_text(CONF)
    options = ["--accounting", "dbd", "--extra", folder / "extra.conf"]
    with local_slurm(folder, "slurmctld", "slurmdbd", "mariadbd", options=options):
        for line in ACCOUNTING.format(me=getpass.getuser()).splitlines():
            subprocess.run(["sacctmgr", "-i", "-Q", *line.split()], check=True, timeout=60)
        for line in PARTITIONS.splitlines():  # a starting controller must know their QOS
            subprocess.run(["scontrol", "create", *line.split()], check=True, timeout=60)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder, tokens = tmp_path_factory.mktemp("job"), models.tokenizer()
    models.save(folder / "model", models.model(tokens, seed=0), tokens)
    (folder / "prompts.jsonl").write_text(json.dumps({"prompt": "1+1=", "answer": "2"}))
    (folder / "job.toml").write_text(JOB)
    return folder


def check(folder, monkeypatch, settings, component="engines.rollout."):
    monkeypatch.chdir(folder)
    monkeypatch.delenv("RELAX_PROFILE", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder))
    told = [f"--set={component}resources.{each}" for each in settings.split()]
    return CliRunner().invoke(app, ["check", "job.toml", *told])


@pytest.mark.parametrize("settings", REFUSED)
def test_a_job_that_slurm_would_refuse_is_refused_by_its_key(folder, monkeypatch, settings):
    answer = check(folder, monkeypatch, settings)
    assert isinstance(answer.exception, ConfigError), answer.output
    said = str(answer.exception)
    assert said.startswith("engines.rollout.resources."), said
    assert re.search(f"engines.rollout.resources.{REFUSED[settings]}", said), said
    assert "\n" not in said
    assert subprocess.run(["squeue", "-h"], capture_output=True, timeout=30).stdout == b""


def test_the_component_at_fault_is_named_and_what_slurm_would_take_is_told_its_start(
    folder, monkeypatch
):
    answer = check(folder, monkeypatch, "account=nope", component="actor.")
    assert str(answer.exception).startswith("actor.resources.account = 'nope': sbatch: Invalid")
    answer = check(folder, monkeypatch, "qos=fast time=20 gpus=2 account=default")
    assert answer.exit_code == 0, answer.exception
    assert "Slurm would start it at 20" in answer.stderr
    assert json.loads(answer.stdout)["engines"]["rollout"]["resources"]["gpus_per_node"] == 2
    assert subprocess.run(["squeue", "-h"], capture_output=True, timeout=30).stdout == b""


@pytest.mark.parametrize(
    ("settings", "whose"),
    [
        ("qos=single account=default", "QOS single"),
        ("partition=debug", "QOS single"),
        ("account=alone", "account alone"),
    ],
)
def test_components_that_slurm_would_never_start_together_are_refused(
    folder, monkeypatch, settings, whose
):
    answer = check(folder, monkeypatch, settings)
    assert answer.exit_code == 0, answer.exception  # it is one of them alone
    said = str(check(folder, monkeypatch, settings, component="").exception)
    begin = f"engines.rollout.resources, actor.resources: {whose} lets 1 of your jobs run at a time"
    assert said.startswith(begin) and "\n" not in said
    # Slurm takes the first of partition, QOS and account that has one.
    if "partition" not in settings:
        answer = check(folder, monkeypatch, "qos=double account=alone", component="")
        assert answer.exit_code == 0, answer.exception
