"""Wrong values and old names of keys are answered in a line of ours, with what is allowed."""

import copy
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
from relax_hpc.cli.keys import all_keys
from relax_hpc.config import job_file
from relax_hpc.config.moved import ABSENT, ELSEWHERE, GONE, MOVED
from relax_hpc.config.run import RunConfig, SftRunConfig
from relax_hpc.errors import ConfigError
from relax_hpc.launch import preflight, profiles
from relax_hpc.launch.placement import Component
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.runtime.text import wrong
from relax_hpc.sections import Resources


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run called `run`, which was evaluated on `heldout`."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    fake = fake_slurm.make(tmp_path, monkeypatch)
    emit(RunPaths(fake.run_dir), "rollout-0", evaluated("before", 0, 2.0))
    return fake


@pytest.mark.parametrize(("command", "said"), [
    ("ls -n two", "--last two: use a whole number; relax-hpc ls -h says more"),
    ("view run --sort wurst", "worst, random, flipped; did you mean worst?"),
    ("replay run", "relax-hpc replay: lacks --step; relax-hpc replay -h says what it takes"),
    ("eval rum", "and no model (config.json); did you mean run?"),
    ("eval run --set heldot", "no evaluation of it is in runs/run; did you mean heldout?"),
    ("logs run --component acto", "this run has no such component; did you mean actor?"),
])  # fmt: skip
def test_a_wrong_value_is_answered_in_a_line_of_our_own(run, command, said):  # U12
    answer = CliRunner().invoke(cli.app, command.split(), prog_name="relax-hpc")
    assert isinstance(answer.exception, ConfigError), answer.output
    assert said in str(answer.exception) and "\n" not in str(answer.exception)


@pytest.mark.parametrize(
    ("typed", "some"),
    [
        ("relax-hpc init first --like qwen3-4b-g", ["qwen3-4b-gsm8k", "qwen3-4b-gsm8k-distill"]),
        ("relax-hpc check j.toml --set schedule.max_st", ["schedule.max_staleness="]),
        ("relax-hpc check j.toml --set algorithm.preset=grp", ["algorithm.preset=grpo"]),
        ("relax-hpc logs run --component ac", ["actor"]),
        ("relax-hpc view run --sort wor", ["worst"]),
    ],
)
def test_values_are_completed(run, typed, some):  # U14
    asked = {"_RELAX_HPC_COMPLETE": "complete_bash", "COMP_CWORD": str(typed.count(" "))}
    answer = CliRunner(env=asked | {"COMP_WORDS": typed}).invoke(cli.app, prog_name="relax-hpc")
    said, begun = answer.output.split(), typed.rpartition(" ")[2]
    assert set(some) <= set(said) and all(each.startswith(begun) for each in said)


@pytest.mark.parametrize(
    ("engine", "gpus", "is_told"),
    [({}, 1, True), ({}, 0, False), ({"kind": "embedded"}, 1, False)],
)
def test_gpus_without_a_kind_of_engine_are_remarked_on_in_a_line(engine, gpus, is_told):  # U15
    config = job_of(engines__rollout=engine | {"resources": {"gpus_per_node": gpus}})
    rollout = Component("rollout", 1, Resources(gpus_per_node=gpus))
    said = []
    preflight.tell_engines(config, [rollout, Component("actor", 1, Resources())], said.append)
    told = [line.partition(",")[0] for line in said]
    assert told == ["engines.rollout.kind: is not set"] * is_told


PYDANTIC = re.compile(
    r"\binput\b|should (be|have|match|not)|valid (integer|number|string|boolean|list|tuple|dict)|"
    r"value error|assertion failed|field required|not permitted|unable to|<class|instance of",
    re.IGNORECASE,
)
BAD = [
    None, True, -1, 5.0, math.nan, 10**30, "", "x y", "x" * 500, [], ["x"], [1, 2, 3], {},
    {"a/b": 1}, datetime.date(2024, 1, 1),
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
    """What is said of each key of a job, a profile or a part with each value that it refuses."""
    for key in keys(kind):
        for value in BAD:
            sft = {"sft": {}} if kind is SftRunConfig and key[0] != "sft" else {}
            try:
                if kind in (RunConfig, SftRunConfig):
                    job_file.validate(sft | tree(key, value), source="job")
                else:
                    kind.model_validate(tree(key, value))
            except ConfigError as error:
                yield str(error)
            except ValidationError as error:
                yield " ".join(wrong(item) for item in error.errors())


def test_whatever_is_wrong_with_a_key_is_said_in_our_own_words():  # U12
    parts = [part for parts in PARTS.values() for part in parts]
    for kind in (RunConfig, SftRunConfig, profiles._kind(), *parts):
        said = [*refusals(kind)]
        assert said or kind in parts
        assert not [line for line in said if PYDANTIC.search(line) or "[key]" in line]


def test_no_type_of_error_is_answered_in_words_of_pydantic():  # U12
    item = {"msg": "Input should be a valid thing", "input": "c", "url": "", "ctx": LIMITS}
    for kind in get_args(ErrorType):
        said = wrong(item | {"type": kind})
        assert said and not PYDANTIC.search(said), kind


SAID = {
    "schedule.num_steps=two": "'two': use a whole number, without a point or quotes",
    "schedule.max_staleness=-1": "-1: use 0 or more",
    "algorithm.loss={name = 'ppo_clip', clip_low = 1.5}": (
        "algorithm.loss.clip_low = 1.5: use less than 1"
    ),
    "model.dtype=float61": (
        "'float61': use 'float32', 'bfloat16' or 'float16'; did you mean float16?"
    ),
    "actor.frozen=vision": "'vision': use a list, in brackets",
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
    with pytest.raises(ConfigError, match=rf"^{tmp_path}/site.toml: actor.mem = '1 G': is no "):
        profiles.load(str(tmp_path / "site.toml"))


TREE = {
    "name": "n", "model": {"path": "m"}, "prompts": {"train": "t", "heldout": "h"},
    "schedule": {"num_steps": 1},
}  # fmt: skip


def refusal_of(old):
    """Returns the message about a job that has the key."""
    *path, key = old.split(".")
    section = tree = copy.deepcopy(TREE)
    for name in path:
        section = section.setdefault(name, {})
    section[key] = 1
    with pytest.raises(ConfigError) as error:
        job_file.validate(tree, source="job.toml")
    return str(error.value)


@pytest.mark.parametrize("key", [key.name for key in all_keys() if ".advanced." in key.name])
def test_an_advanced_key_is_found_without_that_word(key):
    key = key.replace("<name>", "rollout")
    assert f" = 1: is {key} now; use that" in refusal_of(key.replace(".advanced", ""))


OLD = {old: f"is {new} now; use that" for old, new in MOVED.items()}
OLD |= {old: f"is gone, {remedy}" for old, remedy in GONE.items()}


@pytest.mark.parametrize("old", OLD)
def test_an_old_key_is_refused_with_its_new_name_or_the_remedy(old):
    for name in ("rollout", "judge"):
        key, said = (each.replace("<name>", name) for each in (old, OLD[old]))
        assert f"job.toml: {key} = 1: {said}" in refusal_of(key)


def _of_table(name):
    """The key itself if it is below a table that is passed through."""
    tables = {key.name for key in all_keys() if key.type == "table" and key.default == "{}"}
    return name if name.rpartition(".")[0] in tables else ""


def test_a_new_name_is_a_key_and_an_old_one_is_none():
    known = {
        key.name.replace("<name>", name).replace("<component>", component)
        for key in all_keys()
        for name in ("rollout", "heldout")
        for component in ("actor", "reference", "engines.rollout")
    }
    for old, new in MOVED.items():
        old, new = (each.replace("<name>", "rollout") for each in (old, new))
        assert old not in known
        assert any(f"{key}.".startswith(f"{new}.") for key in known | {_of_table(new)}), new
    assert not known & GONE.keys()


def test_the_names_of_other_trainers_are_answered_with_the_key_here():
    known = {key.name for key in all_keys()}
    of_any_name = {name.replace("<name>", "rollout", 1) for name in known}
    named = set(ELSEWHERE.values()) - known - of_any_name
    assert {name for name in named if name.rpartition(".")[0] not in of_any_name} == set()
    said = refusal_of("rollout.n")
    assert "rollout.n = 1: unknown key; here it is rollout.samples_per_prompt" in said
    assert not ELSEWHERE.keys() & {name.rpartition(".")[2] for name in known}, "these are keys"


@pytest.mark.parametrize("name", ABSENT)
def test_what_others_have_and_we_do_not_is_answered_with_the_reason(name):
    """And with keys that there are."""
    known = {key.name for key in all_keys()}
    key = name if "." in name else f"rollout.{name}"
    if not name.startswith("sft."):
        assert f"job.toml: {key} = 1: unknown key; {ABSENT[name]}" in refusal_of(key)
    assert name not in known and name not in {each.rpartition(".")[2] for each in known}
    for said in re.findall(r"(?:[a-z_<>]+\.)+[a-z_]+(?![a-z_/]*/)", ABSENT[name]):
        assert said in known | {"rollout.environment"} or said.endswith(".md"), said
