"""The table of roles: what follows from a row, and that nothing else lists them."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from role_fakes import config

from relax_hpc.config.run import JobConfig
from relax_hpc.launch import preflight, script
from relax_hpc.launch.placement import place
from relax_hpc.roles import table
from relax_hpc.roles.role import Place, Role
from relax_hpc.sections import Resources


def judge(**fields):
    """A row that no folder declares, with a component of its own."""
    row = {
        "places": lambda _: [Place("judge", 2, Resources(gpus_per_node=2))],
        "profile": "judge",
        "environment": {"JUDGES": "2"},
    }
    return Role("judge", JobConfig, lambda *_: None, **(row | fields))


@pytest.fixture
def add(monkeypatch):
    def add(**fields):
        monkeypatch.setattr(table, "ROLES", (*table.ROLES, judge(**fields)))

    return add


def test_who_adds_columns_is_a_writer_of_sidecars_and_the_producer_is_none(add):
    assert table.sidecar_writers(config()) == {}
    add(writes="critic")
    both = {"reference-0": "reference", "judge-0": "critic"}
    assert table.sidecar_writers(config(reference__placement="own")) == both


def test_a_role_that_is_added_is_placed_and_has_a_table_in_profiles(add, tmp_path):
    assert table.role_of(config(), "extra").name == "engine", "that joins a running job"
    add()
    site = tmp_path / "site.toml"
    site.write_text('partition = "a"\n[judge]\npartition = "b"\n')
    *_, last = place(config(launch__profile=str(site)))
    assert (last.name, last.tasks, last.resources.partition) == ("judge", 2, "b")
    assert last.resources.gpus_per_node == 2
    assert table.role_of(config(), "judge").name == "judge"


@pytest.mark.parametrize("write", [script.slurm_script, script.local_script])
def test_a_role_that_is_added_is_in_the_script_with_its_environment(add, write):
    add()
    job = script.Job("run", Path("/runs/r"))
    text = write(job, place(config()))
    rest, step = text.split("component_2() {")
    assert "/runs/r judge --start" in step and 'env JUDGES="${JUDGES:-2}"' in step
    assert "judge" not in rest.split("supervise() {")[-1]


def test_preflight_asks_every_row_and_goes_on_with_what_it_returns(monkeypatch):
    facts = SimpleNamespace(shape="shape", check_weights=lambda _: None)
    monkeypatch.setattr(preflight, "Facts", lambda _: facts)
    for name in ("check_model", "check_first_weights"):
        monkeypatch.setattr(preflight, name, lambda *_: None)
    asked = []

    def check(name):
        def note(given, facts, _say):
            asked.append((name, given, facts.shape))
            return after[name]

        return note

    settings = config()
    after = {name: settings.model_copy(update={"name": f"after-{name}"}) for name in "ab"}
    rows = (judge(check=check("a")), judge(check=check("b")))
    monkeypatch.setattr(table, "ROLES", rows)
    assert preflight.check(settings, [], use_slurm=False) == after["b"]
    assert asked == [("a", settings, "shape"), ("b", after["a"], "shape")]


def test_the_table_is_read_without_torch_or_engines():
    heavy = ("torch", "megatron", "sglang", "transformers", "h5py")
    code = f"import sys, relax_hpc.roles.table; print([n for n in {heavy} if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
