"""Wrong values of options are answered in a line, with what is allowed or meant."""

import logging
import subprocess
import sys
from itertools import pairwise

import fake_slurm
import pytest
from test_screens import emit, evaluated
from typer.testing import CliRunner

from relax_hpc.bus.durable import read_whole
from relax_hpc.cli import keys
from relax_hpc.cli import main as cli
from relax_hpc.config import job_file
from relax_hpc.config.rollout import RolloutConfig
from relax_hpc.environments import registry
from relax_hpc.errors import ConfigError
from relax_hpc.launch import preflight
from relax_hpc.launch.placement import Component
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.sections import Resources

NUMBER = "use a whole number; relax-hpc {} -h says more"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run called `run`, which was evaluated on `heldout`."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    fake = fake_slurm.make(tmp_path, monkeypatch)
    emit(RunPaths(fake.run_dir), "rollout-0", evaluated("before", 0, 2.0))
    return fake


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("ls -n two", f"--last two: {NUMBER.format('ls')}"),
        ("ls -n 0", "--last 0: use 1 or more; relax-hpc ls -h says more"),
        ("scale out run --engines two", f"--engines two: {NUMBER.format('scale out')}"),
        ("eval run --right abc", "--right abc: use a number; relax-hpc eval -h says more"),
        ("make-tiny m --digits 7", "--digits 7: use 6 or less; relax-hpc make-tiny -h"),
        ("view run --sort wurst", "--sort wurst: is none of newest, best, worst, random, flipped; "
         "did you mean worst?"),
        ("export wandc", "SERVICE wandc: is none of wandb, mlflow; did you mean wandb?"),
        ("status", "relax-hpc status: lacks RUN; which run? relax-hpc ls lists yours"),
        ("check", "relax-hpc check: lacks JOB; which job? relax-hpc init NAME makes one"),
        ("replay run", "relax-hpc replay: lacks --step; relax-hpc replay -h says what it takes"),
        ("eval rum", "rum: is no run (run.json, there or under runs/) and no model (config.json); "
         "did you mean run?"),
        ("eval run --set heldot", "no evaluation of it is in runs/run; did you mean heldout?"),
        ("logs run --component acto", "this run has no such component; did you mean actor?"),
        ("keys staleness", "staleness: no key of a job; did you mean schedule.max_staleness?"),
        ("keys temper", "did you mean rollout.temperature or eval.<name>.temperature?"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_answered_in_a_line_of_our_own(run, command, said):  # U12
    answer = CliRunner().invoke(cli.app, command.split(), prog_name="relax-hpc")
    assert isinstance(answer.exception, ConfigError), answer.output
    assert said in str(answer.exception) and "\n" not in str(answer.exception)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nope.py:Env", "= 'nope.py:Env': nope.py: no such file; name one"),
        ("single_tun", "no such environment; did you mean single_turn?"),
    ],
)
def test_an_environment_that_is_not_there_is_named_without_an_errno(name, said):  # U12
    with pytest.raises(ConfigError) as refused:
        registry.make(RolloutConfig(environment=name))
    assert said in str(refused.value) and "Errno" not in str(refused.value)


@pytest.mark.parametrize("command", ["logs", "resume", "bench bus", "bus show"])
def test_a_paragraph_of_help_is_wrapped_once_as_wide_as_the_terminal(command):  # U13
    answer = CliRunner(env={"COLUMNS": "400", "TERMINAL_WIDTH": "400"}).invoke(
        cli.app, [*command.split(), "-h"], prog_name="relax-hpc"
    )
    about = answer.output.partition("Usage")[2].partition("╭")[0].splitlines()[1:]
    texts = [line.strip() for line in about]
    assert texts and all(not (a and b) for a, b in pairwise(texts)), "an empty line between two"


def test_who_reads_logs_as_it_should_be_hears_nothing_of_it(tmp_path, caplog):  # U13
    log = tmp_path / "log"
    log.write_bytes(b"x")
    caplog.set_level(logging.INFO)
    assert read_whole(log) == b"x"
    assert not [record for record in caplog.records if "are read with" in record.getMessage()]


def completed(typed):
    asked = {"_RELAX_HPC_COMPLETE": "complete_bash", "COMP_CWORD": str(typed.count(" "))}
    answer = CliRunner(env=asked | {"COMP_WORDS": typed}).invoke(cli.app, prog_name="relax-hpc")
    return answer.output.split()


@pytest.mark.parametrize(
    ("typed", "some"),
    [
        ("relax-hpc init first --like qwen3-4b-g", ["qwen3-4b-gsm8k", "qwen3-4b-gsm8k-distill"]),
        ("relax-hpc check j.toml --profile lo", ["local"]),
        ("relax-hpc check j.toml --set schedule.max_st", ["schedule.max_staleness="]),
        ("relax-hpc check j.toml --set engines.rollout.k", ["engines.rollout.kind="]),
        ("relax-hpc check j.toml --set actor.resources.gpus", ["actor.resources.gpus_per_node="]),
        ("relax-hpc check j.toml --explain actor.optim", ["actor.optimizer", "actor.optimizer.lr"]),
        ("relax-hpc keys rollout.temp", ["rollout.temperature"]),
        ("relax-hpc check j.toml --set algorithm.preset=grp", ["algorithm.preset=grpo"]),
        ("relax-hpc eval ru", ["run"]),
        ("relax-hpc logs run --component ac", ["actor"]),
        ("relax-hpc view run --sort wor", ["worst"]),
    ],
)
def test_values_are_completed(run, typed, some):  # U14
    said, begun = completed(typed), typed.rpartition(" ")[2]
    assert set(some) <= set(said) and all(each.startswith(begun) for each in said)


def test_behind_a_key_its_values_are_completed_where_they_are_few():  # U14
    assert keys.settings("engines.rollout.kind=") == [
        "engines.rollout.kind=embedded", "engines.rollout.kind=sglang",
    ]  # fmt: skip
    assert keys.settings("algorithm.preset=gs") == ["algorithm.preset=gspo"]
    assert keys.settings("schedule.num_steps=") == []


def test_what_is_completed_needs_neither_torch_nor_hdf5():  # U14
    code = (
        "import sys; from relax_hpc.cli import main, completion, keys; keys.settings('a');"
        "completion.names_of_jobs(''); print({'torch', 'h5py', 'transformers'} & {*sys.modules})"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout == "set()\n"


def test_the_jobs_that_come_along_are_listed_each_with_what_it_is():  # U14
    answer = CliRunner().invoke(cli.app, ["init", "--list"], prog_name="relax-hpc")
    lines = dict(line.split(": ", 1) for line in answer.output.splitlines())
    assert answer.exit_code == 0 and lines.keys() == job_file.list_jobs().keys()
    assert lines["arithmetic"].startswith("Two-digit addition, learned by a tiny policy")
    assert all(len(about) > 20 for about in lines.values())


@pytest.mark.parametrize(
    ("engine", "gpus", "is_told"),
    [
        ({}, 1, True),
        ({}, 0, False),
        ({"kind": "embedded"}, 1, False),
        ({"kind": "sglang"}, 1, False),
    ],
)
def test_gpus_without_a_kind_of_engine_are_remarked_on_in_a_line(engine, gpus, is_told):  # U15
    tree = {
        "name": "run", "model": {"path": "m"}, "prompts": {"train": "t"},
        "schedule": {"num_steps": 3},
        "engines": {"rollout": engine | {"resources": {"gpus_per_node": gpus}}},
    }  # fmt: skip
    config = job_file.validate(tree, source="test")
    rollout = Component("rollout", 1, Resources(gpus_per_node=gpus))
    said = []
    preflight.tell_engines(config, [rollout, Component("actor", 1, Resources())], said.append)
    assert [line.partition(",")[0] for line in said] == (
        ["engines.rollout.kind: is not set"] * is_told
    )
