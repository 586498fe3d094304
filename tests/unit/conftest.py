"""What many tests begin with: a job that would run, a command line that must refuse what a test
made of it, a Slurm; and a loop for tests that are coroutines."""

import asyncio
import inspect
import json
import shutil
import sys
from pathlib import Path

import fake_slurm
import pytest

from relax_hpc.cli import main as cli
from relax_hpc.cli.demo import models
from relax_hpc.launch import states
from relax_hpc.runs.cancel import cancel

JOB = """
name = "run"
run_root = "runs"

[model]
path = "model"
dtype = "float32"

[prompts]
train = "train.jsonl"

[eval.heldout]
path = "heldout.jsonl"

[schedule]
num_steps = 5
prompts_per_step = 4
"""
PROMPTS = {
    "train": [{"prompt": f"1+{n}=", "answer": f"{1 + n}"} for n in (1, 3, 4, 5)],
    "heldout": [{"prompt": "1+2=", "answer": "3"}],
}


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Runs a test that is a coroutine in a loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """A Slurm that says what a test has written down, and a run that was submitted to it."""
    yield fake_slurm.make(tmp_path, monkeypatch)
    states.has_accounting.cache_clear()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tokens = models.tokenizer()
    models.save(folder, models.model(tokens, seed=0), tokens)
    return folder


@pytest.fixture
def job(tmp_path, tiny_model, monkeypatch):
    """A job that would run, in the current directory; each test breaks one thing."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_model, "model")
    Path("job.toml").write_text(JOB, encoding="utf-8")
    for name, rows in PROMPTS.items():
        Path(f"{name}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
        )
    return tmp_path


@pytest.fixture
def ran(job, monkeypatch, capsys):
    """Runs a command line that must succeed; what it printed, and what it said on stderr."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["relax-hpc", *arguments])
        with pytest.raises(SystemExit) as end:
            cli.main()
        assert not end.value.code
        return capsys.readouterr()

    return run


@pytest.fixture
def remarked(ran):
    """Runs a command line that must succeed; what it said on stderr."""
    return lambda *arguments: ran(*arguments).err


@pytest.fixture
def refused(job, monkeypatch, capsys):
    """Runs a command line that must be refused; what it said on stderr."""

    def files():
        """All there are, but for what Python keeps of a file of the user's that it imports."""
        return [path for path in sorted(Path().rglob("*")) if "__pycache__" not in path.parts]

    def run(*arguments):
        before = files()
        monkeypatch.setattr(sys, "argv", ["relax-hpc", *arguments])
        with pytest.raises(SystemExit) as end:
            cli.main()
        output, said = capsys.readouterr()
        if end.value.code == 0 and arguments[0] == "submit":
            cancel(job / "runs" / "run")
        assert end.value.code == 2
        assert output == ""
        assert files() == before, "something was created"
        return said.removesuffix("\n")

    return run
