"""`import relax_hpc`: the names of users' files, and runs from a script or a notebook."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import board_runs
import pytest
from bus_steps import plan
from viewer_runs import empty_run, put, said

import relax_hpc
from relax_hpc import ConfigError, Run, submit
from relax_hpc.launch import record
from relax_hpc.launch.script import exit_code_file
from relax_hpc.runs import api
from relax_hpc.runtime.process import ProcessId

SOURCE = Path(relax_hpc.__file__).read_text(encoding="utf-8")


def test_the_names_are_the_same_for_python_and_for_type_checkers_and_each_is_there():
    [types] = [node for node in ast.parse(SOURCE).body if isinstance(node, ast.If)]
    typed = {name.name: each.module for each in types.body for name in each.names}
    assert typed == relax_hpc._MODULES and set(relax_hpc.__all__) == set(typed)
    for name, module in typed.items():
        assert getattr(relax_hpc, name) is getattr(importlib.import_module(module), name)


@pytest.mark.parametrize(
    ("statement", "heavy"),
    [
        ("import relax_hpc", ["torch", "h5py", "numpy", "pydantic", "relax_hpc.errors"]),
        ("from relax_hpc import Loss, Outcome, submit", ["torch", "h5py", "transformers"]),
        ("import relax_hpc.cli.main", ["torch", "numpy", "pydantic", "httpx", "rich.console"]),
        ("import relax_hpc.runs.report", ["torch", "h5py", "httpx", "aiohttp"]),
    ],
)
def test_a_name_costs_no_more_than_its_own_module(statement, heavy):
    program = f"import sys; {statement}; print([name for name in {heavy} if name in sys.modules])"
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert out.stdout == "[]\n", out.stderr


@pytest.fixture
def run(tmp_path, tiny_model):
    """A run that has done two steps, the second twice, and is over; only step 1 is on disk."""
    paths = empty_run(tmp_path / "run", tiny_model)
    put(paths, *([said("2", guid, reward=1.0), said("no", guid, 1, reward=-guid / 2)]
                 for guid in range(4)))  # fmt: skip
    plan(paths.bus, 1)
    board_runs.write(
        paths,
        board_runs.evaluation(0, 1, 1.0, number=0, when="before"),
        board_runs.step(1, 2.0, 0.25),
        board_runs.step(2, 3.0, 0.5),
        board_runs.event("resume", 4.0, step=1),
        board_runs.step(2, 5.0, 0.75),
        board_runs.evaluation(2, 3, 6.0, number=0, when="after"),
    )
    folder = paths.component("actor")
    folder.mkdir(parents=True)
    part = record.LaunchedComponent("actor", "local-1", 1, folder)
    gone = ProcessId(2**22 + 1, 0.0, 0, "another boot")
    record.write(paths, record.LaunchRecord("local", "local-1", (part,), 1.0, gone), {})
    exit_code_file(folder.parent, "local-1").write_text("0")
    return Run(paths.root)


def test_a_run_tells_its_state_and_each_step_once(run, tmp_path, monkeypatch):
    assert run.wait(timeout=0).state == run.status().state == "COMPLETED"
    monkeypatch.setenv("RELAX_RUN_ROOT", str(tmp_path))
    assert Run("run").run_dir == run.run_dir
    found = run.history()
    assert [row["step"] for row in found] == [0, 1, 2]
    assert [row.get("reward/mean") for row in found] == [None, 0.25, 0.75]
    assert [row.get("eval/heldout/reward") for row in found] == [0.25, None, 0.75]
    with pytest.raises(ConfigError, match="runn: no such run; did you mean run"):
        Run("runn")


def test_samples_are_texts_with_rewards_and_each_has_its_prompt(run):
    found = run.samples(n=3)
    told = [[each[key] for key in ("guid", "sibling", "response", "reward")] for each in found]
    assert told == [[3, 0, "2", 1.0], [3, 1, "no", -1.5], [2, 0, "2", 1.0]]
    assert {(each["prompt"], each["step"]) for each in found} == {("1+1=", 1)}
    assert found[0]["advantage"] == 1.25 and found[0]["finish"] == "stop"
    assert len(run.samples(1)) == 8 and run.samples(n=0) == []


@pytest.fixture
def submitted(monkeypatch, job):
    """The job that was submitted."""
    given = []

    def note(config, *, local, say):
        given.append(config)
        Path(config.run_dir).mkdir(parents=True)
        api.RunPaths(config.run_dir).config.write_text("{}")
        return SimpleNamespace(run_dir=config.run_dir)

    monkeypatch.setattr(api.launching, "submit", note)
    return given


def test_changes_are_keys_of_the_job_and_values_of_python(submitted, tmp_path):
    run = submit("job.toml", local=True, name="one", schedule__num_steps=7, model__path=tmp_path,
                 reward={"name": "math", "deadline_s": 2.5}, run_root="elsewhere",
                 **{"rollout.stop": ["a \"b\"\n", "ü"], 
                    "weights.advanced.kv_cache": "keep"})  # fmt: skip
    [config] = submitted
    assert run.run_dir == Path("elsewhere/one").absolute() and config.schedule.num_steps == 7
    assert config.model.path == tmp_path and config.rollout.stop == ['a "b"\n', "ü"]
    assert (config.reward.name, config.reward.deadline_s) == ("math", 2.5)
