"""Folders that cannot be read or written to, weights that are none, and what convert leaves."""

import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from relax_hpc.cli import main as cli
from relax_hpc.config.job_file import load
from relax_hpc.config.run import RunConfig
from relax_hpc.errors import ConfigError
from relax_hpc.launch.submit import resolve
from relax_hpc.roles.training import check as training_check
from relax_hpc.runtime.files.records import write_text
from relax_hpc.trainer.checkpoints import convert

NOBODY = 65534


@pytest.fixture
def elsewhere():
    """A folder for everybody, and a function: root, who may read all, goes on as nobody."""
    folder, is_root = Path(tempfile.mkdtemp()), os.geteuid() == 0
    (folder / "run").mkdir()

    def step_down(*given):
        folder.chmod(0o755)
        if is_root:
            for path in given:
                os.chown(path, NOBODY, NOBODY)
            os.seteuid(NOBODY)

    yield folder, step_down
    if is_root:
        os.seteuid(0)
    for path in folder.iterdir():
        path.chmod(0o700)
    shutil.rmtree(folder)


def said_by_main(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main()
    output, said = capsys.readouterr()
    assert end.value.code == 2 and output == "" and said.count("\n") == 1
    return said


@pytest.mark.parametrize("name", ["job.toml", "train.jsonl", "model", "model/model.safetensors"])
def test_what_may_not_be_read_is_said_to_be_so(job, elsewhere, name, monkeypatch, capsys):
    folder, step_down = elsewhere
    shutil.copytree(job, folder, dirs_exist_ok=True)
    monkeypatch.chdir(folder)
    step_down(folder, *folder.rglob("*"))
    Path(name).chmod(0)
    monkeypatch.setattr(sys, "argv", ["relax-hpc", "submit", "job.toml", "--local"])
    said = said_by_main(capsys)
    assert name in said and "may not be read by you; ask its owner" in said
    assert not Path("runs").exists()


def test_weights_to_begin_with_become_absolute_and_are_checked(refused, job):
    def said(folder):
        return refused("submit", "job.toml", "--local", "--set", f"model.weights={folder}")

    known, _ = resolve(load(Path("job.toml"), ["model.weights=mg"]))
    assert isinstance(known, RunConfig) and known.model.weights == job / "mg"
    assert said("nowhere").startswith(f"model.weights = '{job}/nowhere': no such folder; name a ch")
    Path("run/checkpoints/step_00000012").mkdir(parents=True)
    assert said("run/checkpoints/step_12").endswith(": no such folder; there are step_00000012")
    assert "is a Hugging Face folder; name a checkpoint" in said("model")
    convert.convert(Path("model"), "megatron", out=Path("mg"), step=None, model=None)
    small = ("--set", "prompts.max_prompt_tokens=2", "--set", "model.weights=mg")
    assert "prompts.max_prompt_tokens" in refused("submit", "job.toml", "--local", *small)
    shape = training_check.check_model(Path("model"), load(Path("job.toml")).actor)
    other = dataclasses.replace(shape, ffn_hidden_size=shape.ffn_hidden_size * 2)
    with pytest.raises(ConfigError, match=r"model.weights = 'mg': .*of another model"):
        training_check.check_first_weights(Path("mg"), other)
    next(Path("mg").glob("*.distcp")).write_bytes(b"")
    assert "has 0 bytes of" in said("mg")


def test_a_conversion_prints_where_it_is_and_none_of_megatrons_warnings(job):
    """Nor does it import what Megatron-core would import for nothing, for seconds."""
    code = """
import atexit, sys
from relax_hpc.cli.main import main
sys.argv[:1] = ["relax-hpc"]
atexit.register(lambda: print([n for n in ("torch._inductor", "wandb") if n in sys.modules]))
main()
"""
    command = [sys.executable, "-c", code, "convert", "model", "--to", "megatron", "--out", "mg"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("mg\n[]\n", "")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["engines.rollout.placement=actor", "schedule.max_staleness=0", "engines.rollout.count=2"],
         "engines.rollout.count = 2: engines have 2 ranks, the actor has 1"),
        (["weights.quantize=fp8"], "weights.quantize = 'fp8': the embedded engine takes plain"),
        (["reference.placement=own", "reference.path=other"], "has neither model.safetensors"),
    ],
    ids=["lanes", "quantized", "reference"],
)  # fmt: skip
def test_the_whole_check_asks_about_engines_in_turn_quantized_ones_and_the_reference(
    refused, settings, message
):
    """Each job is wrong in one way, which nothing else looks for."""
    Path("other").mkdir()
    shutil.copy("model/config.json", "other")
    said = refused("submit", "job.toml", "--local", *(w for s in settings for w in ("--set", s)))
    assert message in said and "\n" not in said


def anothers_run(mode, folder, step_down):
    run = folder / "run"
    (run / "run.json").write_text("{}")
    run.chmod(mode)
    step_down()
    return run


@pytest.mark.parametrize("command", [["status"], ["eval"], ["cancel"], ["bus", "ls"]], ids=" ".join)
def test_a_run_that_may_not_be_looked_into_is_not_said_to_be_none(
    elsewhere, monkeypatch, capsys, command
):
    run = anothers_run(0, *elsewhere)
    monkeypatch.setattr(sys, "argv", ["relax-hpc", *command, str(run)])
    said = said_by_main(capsys)
    assert said.startswith(f"{run}: is of user ") and ", mode 0000: may not be read" in said
    assert "no such run" not in said


def test_a_run_that_may_not_be_written_to_is_named_with_its_owner(elsewhere, monkeypatch, capsys):
    run = anothers_run(0o555, *elsewhere)
    monkeypatch.setattr(cli, "app", lambda **_: write_text(run / "summary.json", "{}"))
    said = said_by_main(capsys)
    assert said.startswith(f"{run}: is of user ") and "mode 0555" in said
    assert "ask its owner" in said or os.geteuid() != 0
