"""The table of roles: what follows from a row, and that nothing else lists them."""

import ast
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from role_fakes import config

from relax_hpc import schema
from relax_hpc.config.job_file import validate
from relax_hpc.config.run import JobConfig
from relax_hpc.errors import ConfigError
from relax_hpc.launch import preflight, profiles, script
from relax_hpc.launch.placement import Component, place
from relax_hpc.roles import table
from relax_hpc.roles.role import Place, Role
from relax_hpc.runtime.telemetry.event_table import EVENTS
from relax_hpc.sections import Resources

PACKAGE = Path(__file__).parents[3] / "relax_hpc"
SFT = {
    "name": "run", "model": {"path": "m"},
    "sft": {"train": "t", "num_steps": 3, "batch_size": 2},
}  # fmt: skip


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


def names(settings):
    return [(role.name, place.component) for role, place in table.places(settings)]


def test_both_kinds_of_job_come_out_of_the_table():
    rl = [("rollout", "rollout"), ("actor", "actor"), ("reference", "reference")]
    assert names(config(reference__placement="own")) == rl
    assert names(config()) == rl[:2]
    assert names(validate(SFT, source="test")) == [("sft", "actor")]


def test_a_component_beside_another_follows_it():
    beside = config(
        engines__rollout__placement="actor", schedule__max_staleness=0, reference__placement="own"
    )
    assert [component for _, component in names(beside)] == ["actor", "rollout", "reference"]


def test_the_role_of_a_component_is_found_also_of_one_that_joins_a_running_job():
    found = {name: table.role_of(config(), name).name for name in ("actor", "rollout", "extra")}
    assert found == {"actor": "actor", "rollout": "rollout", "extra": "engine"}
    assert table.role_of(validate(SFT, source="test"), "actor").name == "sft"


def test_who_adds_columns_is_a_writer_of_sidecars_and_the_producer_is_none(add):
    assert table.sidecar_writers(config()) == {}
    add(writes="critic")
    both = {"reference-0": "reference", "judge-0": "critic"}
    assert table.sidecar_writers(config(reference__placement="own")) == both


def test_a_role_that_is_added_is_placed_and_has_a_table_in_profiles(add, tmp_path):
    add()
    site = tmp_path / "site.toml"
    site.write_text('partition = "a"\n[judge]\npartition = "b"\n')
    *_, last = place(config(launch__profile=str(site)))
    assert (last.name, last.tasks, last.resources.partition) == ("judge", 2, "b")
    assert last.resources.gpus_per_node == 2
    assert table.role_of(config(), "judge").name == "judge"


def test_without_the_row_its_table_is_an_unknown_key(tmp_path):
    site = tmp_path / "site.toml"
    site.write_text('[judge]\npartition = "b"\n')
    with pytest.raises(ConfigError, match=r"judge = .*a profile takes .*rollout, actor, reference"):
        profiles.load(str(site))


@pytest.mark.parametrize("write", [script.slurm_script, script.local_script])
def test_a_role_that_is_added_is_in_the_script_with_its_environment(add, write):
    add()
    job = script.Job("run", Path("/runs/r"))
    text = write(job, place(config()))
    rest, step = text.split("component_2() {")
    assert "/runs/r judge --start" in step and 'env JUDGES="${JUDGES:-2}"' in step
    assert "judge" not in rest.split("supervise() {")[-1]


def test_nodes_beyond_its_own_are_for_a_row_that_is_scalable(add):
    add(is_scalable=True, places=lambda _: [Place("judge", 1, Resources(max_nodes=2))])
    *_, last = place(config())
    preflight.check_max_nodes(last)
    with pytest.raises(ConfigError, match="only rollout or judge can be scaled"):
        preflight.check_max_nodes(Component("actor", 1, Resources(max_nodes=2)))


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


def test_a_place_beside_nothing_is_refused(add):
    add(places=lambda _: [Place("judge", 1, Resources(), beside="critic")])
    with pytest.raises(ConfigError, match="judge: is to run beside critic"):
        place(config())


def test_the_table_is_read_without_torch_or_engines():
    heavy = ("torch", "megatron", "sglang", "transformers", "h5py")
    code = f"import sys, relax_hpc.roles.table; print([n for n in {heavy} if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_columns_and_events_name_roles_of_the_table():
    assert {role.writes for role in table.ROLES if role.writes} <= set(schema.ROLES)
    assert [role.name for role in table.ROLES if role.writes == schema.PRODUCER] == ["rollout"]
    by = {name for each in EVENTS.values() for name in each.by.split(", ")}
    assert by - {"all", "engines"} <= {role.name for role in table.ROLES} | set(table.joining())


NAMES = {role.name for role in table.ROLES} | set(table.joining())
MAY = {
    "algorithms/part.py": "policies that logprobs are of",
    "schema.py": "COLUMNS names who writes a column",
    "runtime/telemetry/event_table.py": "EVENTS names who notes an event; held to the table above",
    "runtime/telemetry/progress.py": "the actor's phase of that name, in the order of a step",
    "runtime/telemetry/timeline.py": "an event of that name; of several tasks one is shown; "
    "the colour of a phase of that name",
    "runs/report.py": "the head of a line, of the trajectories that the reference has scored",
    "config/job_file.py": "the section [sft] says which kind of job it is",
    "launch/evaluate.py": "tables of a job",
    "cli/init.py": "tables of a site profile; the section [sft] says which kind a job is",
    "runs/scale/requests.py": "heads of a table of engines",
}
"""Files that may compare with a role's name or list one, and why."""


def is_name(node):
    return isinstance(node, ast.Constant) and node.value in NAMES


def decisions(tree):
    """Lines that compare something with the name of a role, or list one.

    What is compared with a `placement` or an `anchor` is a value of the job.
    """
    for node in ast.walk(tree):
        match node:
            case ast.Compare(left=ast.Attribute(attr="placement" | "anchor")):
                continue
            case ast.Compare(left=left, comparators=others):
                found = any(map(is_name, [left, *others]))
            case ast.List(elts=parts) | ast.Tuple(elts=parts) | ast.Set(elts=parts):
                found = any(map(is_name, parts))
            case ast.MatchValue(value=value):
                found = is_name(value)
            case _:
                continue
        if found:
            yield node.lineno


def test_nothing_else_decides_by_the_name_of_a_role():
    files = {path: path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")}
    looked = {path: name for path, name in files.items()
              if not name.startswith(("roles/", "config/", "cli/bench/", "cli/demo/"))}  # fmt: skip
    found = {
        name: lines
        for path, name in looked.items()
        if name not in MAY and (lines := list(decisions(ast.parse(path.read_text()))))
    }
    assert found == {}


@pytest.mark.parametrize(
    "line", ['x == "actor"', 'y in ("rollout", "z")', 'n != "reference"', 'r = ["sft"]']
)
def test_such_a_decision_would_be_noticed(line):
    assert list(decisions(ast.parse(line)))


def test_a_placement_is_no_role():
    assert not list(decisions(ast.parse('c.rollout.placement == "actor"')))
