"""Keys of older jobs are refused with the name that they have now."""

import re

import pytest

from relax_hpc.cli.keys import all_keys
from relax_hpc.config import job_file
from relax_hpc.config.moved import ABSENT, ELSEWHERE, GONE, MOVED
from relax_hpc.errors import ConfigError

TREE = {"name": "n", "model": {"path": "m"}, "prompts": {"train": "t", "heldout": "h"}}


def refusal_of(old):
    """Returns the message about a job that has the key."""
    *path, key = old.split(".")
    tree = {
        name: dict(inside) if isinstance(inside, dict) else inside for name, inside in TREE.items()
    }
    tree["schedule"] = {"num_steps": 1}
    section = tree
    for name in path:
        section = section.setdefault(name, {})
    section[key] = 1
    with pytest.raises(ConfigError) as error:
        job_file.validate(tree, source="job.toml")
    return str(error.value)


@pytest.mark.parametrize("old", MOVED)
def test_an_old_key_is_refused_with_its_new_name(old):
    for name in ("rollout", "judge"):
        key, new = (each.replace("<name>", name) for each in (old, MOVED[old]))
        assert f"job.toml: {key} = 1: is {new} now; use that" in refusal_of(key)


@pytest.mark.parametrize("key", [key.name for key in all_keys() if ".advanced." in key.name])
def test_an_advanced_key_is_found_without_that_word(key):
    key = key.replace("<name>", "rollout")
    assert f" = 1: is {key} now; use that" in refusal_of(key.replace(".advanced", ""))


@pytest.mark.parametrize("old", GONE)
def test_a_key_that_is_gone_is_refused_with_the_remedy(old):
    for name in ("rollout", "judge"):
        key = old.replace("<name>", name)
        assert f"job.toml: {key} = 1: is gone, {GONE[old]}" in refusal_of(key)


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
    assert "rollout.n = 1: unknown key; here it is rollout.samples_per_prompt" in refusal_of(
        "rollout.n"
    )
    assert "train_batch_size = 1: unknown key; here it is schedule.prompts_per_step" in refusal_of(
        "train_batch_size"
    )
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


def test_a_table_of_others_is_answered_by_what_is_in_it():
    said = refusal_of("trainer.total_epochs")
    assert "job.toml: trainer = {'total_epochs': 1}: unknown key; total_epochs: a run has" in said
    said = refusal_of("data.overlong.max_prompt_length")
    assert "overlong: max_prompt_length: here it is prompts.max_prompt_tokens" in said
    assert "unknown key; a job takes name, " in refusal_of("trainer.nobody_knows")
