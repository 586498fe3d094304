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
from relax_hpc.launch import preflight
from relax_hpc.launch.submit import resolve
from relax_hpc.roles.training import check as training_check
from relax_hpc.runtime.files.records import write_text
from relax_hpc.trainer.checkpoints import convert

NOBODY = 65534


@pytest.fixture
def as_another(job, monkeypatch):
    """The job in a folder of another user's, as whom the test goes on: root may read all."""
    folder = Path(tempfile.mkdtemp())
    shutil.copytree(job, folder, dirs_exist_ok=True)
    monkeypatch.chdir(folder)
    is_root = os.geteuid() == 0
    if is_root:
        for path in (folder, *folder.rglob("*")):
            os.chown(path, NOBODY, NOBODY)
        os.seteuid(NOBODY)
    yield folder
    if is_root:
        os.seteuid(0)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o700)
    shutil.rmtree(folder)


def said_by_main(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main()
    output, said = capsys.readouterr()
    assert end.value.code == 2 and output == "" and said.count("\n") == 1
    return said


@pytest.mark.parametrize(
    "name",
    ["job.toml", "train.jsonl", "model", "model/model.safetensors", "model/tokenizer.json"],
)
def test_what_may_not_be_read_is_said_to_be_so(as_another, name, monkeypatch, capsys):
    Path(name).chmod(0)
    monkeypatch.setattr(sys, "argv", ["relax-hpc", "submit", "job.toml", "--local"])
    said = said_by_main(capsys)
    assert name in said and "may not be read by you; ask its owner" in said
    assert not Path("runs").exists()


def test_a_run_root_below_a_folder_that_cannot_be_entered_is_refused(as_another):
    Path("closed").mkdir(mode=0)
    with pytest.raises(ConfigError, match=r"run_root = .*: Permission denied; choose a folder"):
        preflight.check_run_dir(as_another / "closed" / "deep" / "run", "run")
    Path("closed").chmod(0o500)
    with pytest.raises(ConfigError, match=r"run_root = .*cannot be written to; choose a folder"):
        preflight.check_run_dir(as_another / "closed" / "deep" / "run", "run")


OBJECTS = ["tokenizer_config.json", "tokenizer.json"]


@pytest.mark.parametrize("name", OBJECTS)
@pytest.mark.parametrize("content", ["[1]", "5", "{", "", "[" * 100_000])
def test_a_tokenizers_file_of_another_shape_is_named(refused, name, content):
    Path("model", name).write_text(content, encoding="utf-8")
    said = refused("submit", "job.toml", "--local")
    assert f"model/{name}: is " in said and "download it again" in said and "\n" not in said


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


@pytest.fixture
def anothers_run():
    """Makes a run of a mode; root goes on as another user, who is not its owner."""
    folder, is_root = Path(tempfile.mkdtemp()), os.geteuid() == 0

    def make(mode):
        run = folder / "run"
        run.mkdir()
        (run / "run.json").write_text("{}")
        run.chmod(mode)
        folder.chmod(0o755)
        if is_root:
            os.seteuid(NOBODY)
        return run

    yield make
    if is_root:
        os.seteuid(0)
    (folder / "run").chmod(0o700)
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    "command",
    [["status"], ["peek"], ["view"], ["logs"], ["eval"], ["cancel"], ["resume"], ["scale", "list"],
     ["bus", "ls"]],
    ids=" ".join,
)  # fmt: skip
def test_a_run_that_may_not_be_looked_into_is_not_said_to_be_none(
    anothers_run, monkeypatch, capsys, command
):
    run = anothers_run(0)
    monkeypatch.setattr(sys, "argv", ["relax-hpc", *command, str(run)])
    said = said_by_main(capsys)
    assert said.startswith(f"{run}: is of user ") and ", mode 0000: may not be read" in said
    assert "no such run" not in said


def test_a_run_that_may_not_be_written_to_is_named_with_its_owner(
    anothers_run, monkeypatch, capsys
):
    run = anothers_run(0o555)
    monkeypatch.setattr(cli, "app", lambda **_: write_text(run / "summary.json", "{}"))
    said = said_by_main(capsys)
    assert said.startswith(f"{run}: is of user ") and "mode 0555" in said
    assert "ask its owner" in said or os.geteuid() != 0
