"""Wrong values of options are answered in a line, with what is allowed or meant."""

import fake_slurm
import pytest
from job_trees import job_of
from test_screens import emit, evaluated
from typer.testing import CliRunner

from relax_hpc.cli import main as cli
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
        ("eval run --right abc", "--right abc: use a number; relax-hpc eval -h says more"),
        ("view run --sort wurst", "--sort wurst: is none of newest, best, worst, random, flipped; "
         "did you mean worst?"),
        ("status", "relax-hpc status: lacks RUN; which run? relax-hpc ls lists yours"),
        ("replay run", "relax-hpc replay: lacks --step; relax-hpc replay -h says what it takes"),
        ("eval rum", "rum: is no run (run.json, there or under runs/) and no model (config.json); "
         "did you mean run?"),
        ("eval run --set heldot", "no evaluation of it is in runs/run; did you mean heldout?"),
        ("logs run --component acto", "this run has no such component; did you mean actor?"),
        ("keys staleness", "staleness: no key of a job; did you mean schedule.max_staleness?"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_answered_in_a_line_of_our_own(run, command, said):  # U12
    answer = CliRunner().invoke(cli.app, command.split(), prog_name="relax-hpc")
    assert isinstance(answer.exception, ConfigError), answer.output
    assert said in str(answer.exception) and "\n" not in str(answer.exception)


def completed(typed):
    asked = {"_RELAX_HPC_COMPLETE": "complete_bash", "COMP_CWORD": str(typed.count(" "))}
    answer = CliRunner(env=asked | {"COMP_WORDS": typed}).invoke(cli.app, prog_name="relax-hpc")
    return answer.output.split()


@pytest.mark.parametrize(
    ("typed", "some"),
    [
        ("relax-hpc init first --like qwen3-4b-g", ["qwen3-4b-gsm8k", "qwen3-4b-gsm8k-distill"]),
        ("relax-hpc check j.toml --set schedule.max_st", ["schedule.max_staleness="]),
        ("relax-hpc check j.toml --explain actor.optim", ["actor.optimizer", "actor.optimizer.lr"]),
        ("relax-hpc check j.toml --set algorithm.preset=grp", ["algorithm.preset=grpo"]),
        ("relax-hpc eval ru", ["run"]),
        ("relax-hpc logs run --component ac", ["actor"]),
        ("relax-hpc view run --sort wor", ["worst"]),
    ],
)
def test_values_are_completed(run, typed, some):  # U14
    said, begun = completed(typed), typed.rpartition(" ")[2]
    assert set(some) <= set(said) and all(each.startswith(begun) for each in said)


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
    config = job_of(engines__rollout=engine | {"resources": {"gpus_per_node": gpus}})
    rollout = Component("rollout", 1, Resources(gpus_per_node=gpus))
    said = []
    preflight.tell_engines(config, [rollout, Component("actor", 1, Resources())], said.append)
    assert [line.partition(",")[0] for line in said] == (
        ["engines.rollout.kind: is not set"] * is_told
    )
