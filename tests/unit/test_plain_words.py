"""Wrong values of options and keys are answered in a line of ours, with what is allowed."""

import datetime
import math
import re
from typing import get_args, get_origin

import fake_slurm
import pytest
from job_trees import job_of, tree_of
from pydantic import BaseModel, ValidationError
from pydantic_core.core_schema import ErrorType
from test_screens import emit, evaluated
from typer.testing import CliRunner

from relax_hpc.algorithms.table import PARTS
from relax_hpc.cli import main as cli
from relax_hpc.config import job_file
from relax_hpc.config.run import RunConfig, SftRunConfig
from relax_hpc.errors import ConfigError
from relax_hpc.launch import preflight, profiles
from relax_hpc.launch.placement import Component
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.runtime.text import wrong
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


PYDANTIC = re.compile(
    r"\binput\b|should (be|have|match|not)|valid (integer|number|string|boolean|list|tuple|dict)|"
    r"value error|assertion failed|field required|not permitted|unable to|<class|instance of",
    re.IGNORECASE,
)
BAD = [
    None, True, 0, -1, 5.0, math.nan, math.inf, 10**30, 1e300, "", "x y", "x" * 500, [], [1],
    ["x"], [1, 2, 3], {}, {"a": 1}, {"a/b": 1}, datetime.date(2024, 1, 1),
]  # fmt: skip
LIMITS = {
    "ge": 0, "gt": 0, "le": 1, "lt": 1.0, "multiple_of": 2, "expected": "'a' or 'b'",
    "min_length": 1, "max_length": 2, "pattern": "^a$", "error": ValueError("is odd"),
}  # fmt: skip


def keys(section, *before):
    for name, field in section.model_fields.items():
        yield (*before, name)
        inner = (*before, name, "a") if get_origin(field.annotation) is dict else (*before, name)
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from keys(kind, *inner)


def tree(key, value):
    for part in reversed(key):
        value = {part: value}
    return value


def refusals(kind):
    """The message of each key with each of the values that it refuses."""
    for key in keys(kind):
        for value in BAD:
            job = ({"sft": {}} if kind is SftRunConfig and key[0] != "sft" else {}) | tree(
                key, value
            )
            try:
                job_file.validate(job, source="job")
            except ConfigError as error:
                yield str(error)


def test_whatever_is_wrong_with_a_key_is_said_in_our_own_words():  # U12
    said = [*refusals(RunConfig), *refusals(SftRunConfig)]
    assert len(said) > 1000
    assert not [line for line in said if PYDANTIC.search(line) or "[key]" in line]


def test_whatever_is_wrong_with_a_profile_or_a_part_is_said_in_our_own_words():  # U12
    for kind in (profiles._kind(), *(part for parts in PARTS.values() for part in parts)):
        for key in kind.model_fields:
            for value in BAD:
                try:
                    kind.model_validate({key: value})
                except ValidationError as error:
                    said = [wrong(item) for item in error.errors()]
                    assert said and not PYDANTIC.search(" ".join(said)), said


def test_no_type_of_error_is_answered_in_words_of_pydantic():  # U12
    item = {"msg": "Input should be a valid thing", "input": "c", "url": "", "ctx": LIMITS}
    for kind in get_args(ErrorType):
        said = wrong(item | {"type": kind})
        assert said and not PYDANTIC.search(said), kind


SAID = {
    "schedule.num_steps=two": "'two': use a whole number, without a point or quotes",
    "schedule.num_steps=0": "0: use more than 0",
    "schedule.max_staleness=-1": "-1: use 0 or more",
    "rollout.temperature=warm": "'warm': use a number, without quotes",
    "algorithm.loss={name = 'ppo_clip', clip_low = 1.5}": (
        "algorithm.loss.clip_low = 1.5: use less than 1"
    ),
    "rollout.advanced.routed_experts=maybe": "'maybe': use true or false",
    "model.dtype=float61": (
        "'float61': use 'float32', 'bfloat16' or 'float16'; did you mean float16?"
    ),
    "actor.frozen=vision": "'vision': use a list, in brackets",
    "actor.lora.targets=[]": "[]: use 1 or more entries",
    "engines=3": "3: is a table of settings, not one value",
    "eval={'a/b' = {path = 'x'}}": (
        "eval.a/b = 'a/b': use letters of a to z, digits, - and _, a letter first"
    ),
}


@pytest.mark.parametrize("setting", SAID)
def test_a_wrong_value_of_a_key_is_answered_with_what_is_allowed(setting):  # U12
    with pytest.raises(ConfigError) as refused:
        job_file.with_overrides(tree_of(), [setting], source="job.toml")
    line = SAID[setting]
    key = "" if line.startswith(("eval.", "algorithm.")) else f"{setting.partition('=')[0]} = "
    assert str(refused.value) == f"job.toml: {key}{line}"


def test_a_wrong_value_of_a_profile_is_named_with_its_key(tmp_path):  # U12
    (tmp_path / "site.toml").write_text("[actor]\nmem = '1 G'", encoding="utf-8")
    said = (
        rf"^{tmp_path}/site.toml: actor.mem = '1 G': is no amount of memory; use \"64G\", or 65536"
    )
    with pytest.raises(ConfigError, match=said):
        profiles.load(str(tmp_path / "site.toml"))
