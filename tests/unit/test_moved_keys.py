"""Keys of older jobs are refused with the name that they have now."""

import pytest

from relax_hpc import job_file
from relax_hpc.cli.keys import all_keys
from relax_hpc.config.moved import MOVED
from relax_hpc.errors import ConfigError

TREE = {"name": "n", "model": {"path": "m"}, "prompts": {"train": "t", "heldout": "h"}}


@pytest.mark.parametrize("old", MOVED)
def test_an_old_key_is_refused_with_its_new_name(old):
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
    assert f"job.toml: {old} = 1: is {MOVED[old]} now; use that" in str(error.value)


def test_a_new_name_is_a_key_and_an_old_one_is_none():
    known = {
        key.name.replace("<name>", name) for key in all_keys() for name in ("rollout", "heldout")
    }
    known |= {"engines.rollout.resources"}  # told once for all components
    for old, new in MOVED.items():
        assert old not in known
        assert any(f"{key}.".startswith(f"{new}.") for key in known), new
