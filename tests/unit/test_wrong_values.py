"""Wrong values of a job, a profile and a part of an algorithm: no word of pydantic is left."""

import datetime
import math
import re
from typing import get_args, get_origin

import pytest
from pydantic import BaseModel, ValidationError
from pydantic_core.core_schema import ErrorType

from relax_hpc.algorithms.table import PARTS
from relax_hpc.config import job_file
from relax_hpc.config.run import RunConfig, SftRunConfig
from relax_hpc.errors import ConfigError
from relax_hpc.launch import profiles
from relax_hpc.runtime.text import wrong

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
    job = {
        "name": "t", "model": {"path": "m"}, "prompts": {"train": "x"}, "schedule": {"num_steps": 1}
    }  # fmt: skip
    with pytest.raises(ConfigError) as refused:
        job_file.with_overrides(job, [setting], source="job.toml")
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


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("check", "jbo.toml"), "jbo.toml: no such file; did you mean job.toml?"),
        (("check", "zzz"), "zzz: no such file; name a TOML file; relax-hpc init NAME makes one"),
        (("bench", "train", "--documents", "mxi"), "is none of one, mix; did you mean mix?"),
        (("schema", "--out", "no/x"), "--out no/x: cannot be written: No such file or directory"),
    ],
)
def test_a_name_that_is_not_there_is_answered_without_an_errno(refused, command, said):  # U12
    answer = refused(*command)
    assert said in answer and "Errno" not in answer and "\n" not in answer
