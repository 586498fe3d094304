"""Engines as processes: they tell why they fail, and end with their owner."""

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest
from engine_fixtures import runs, started, wait_until
from sglang_under_test import SGLANG_PYTHON

from relax_hpc.errors import EngineError
from relax_hpc.inference.client import EngineClient
from relax_hpc.inference.process import spawn

pytestmark = pytest.mark.long

OWNER = """
import sys, time
from pathlib import Path
from relax_hpc.inference.process import start_engine
from relax_hpc.inference.spec import EngineSpec
kind, model, log, python = sys.argv[1:]
spec = EngineSpec(kind, Path(model), start_timeout_s=240)
engine = start_engine(spec, host="127.0.0.1", token="t", log_path=Path(log), python=python)
print(engine.pid, engine.url, "torch" in sys.modules, flush=True)
time.sleep(600)
"""
SLEEP = "import time; time.sleep(600)"
SPAWNER = f"""
import sys
from pathlib import Path
from relax_hpc.inference.process import spawn
print(spawn([sys.executable, "-c", sys.argv[1]], Path(sys.argv[2]), {{}}).pid, flush=True)
{SLEEP}
"""
PARENT = f"""
import signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(subprocess.Popen([sys.executable, "-c", "{SLEEP}"]).pid, flush=True)
{SLEEP}
"""


def start(checkpoint, folder, **spec):
    return started("embedded", checkpoint, folder / "logs" / "engine.log", token="secret", **spec)


def owner_of(script, *arguments):
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("kind", ["embedded", "sglang"])
def test_killing_the_owner_ends_the_engine_and_its_children(kind, checkpoints, tmp_path):
    python = SGLANG_PYTHON if kind == "sglang" else sys.executable
    with owner_of(OWNER, kind, checkpoints[0], tmp_path / "log", python) as owner:
        pid, url, imported_torch = owner.stdout.readline().split()
        engine = psutil.Process(int(pid))
        tree = [engine, *engine.children(recursive=True)]
        assert EngineClient(url, "t").health(5.0)
        owner.kill()
        assert kind == "sglang" or imported_torch == "False", "seconds before the engine's own"
    wait_until(lambda: not any(map(runs, tree)))


def test_a_child_that_was_still_starting_when_the_owner_died_is_ended_too(tmp_path):
    with owner_of(SPAWNER, PARENT, tmp_path / "log") as process:
        engine = psutil.Process(int(process.stdout.readline()))
        wait_until(engine.children)
        tree = [engine, *engine.children(), *psutil.Process(process.pid).children()]
        process.kill()
    wait_until(lambda: not any(map(runs, tree)))


def test_stop_ends_the_whole_tree_even_if_it_ignores_sigterm(tmp_path):
    log = tmp_path / "log"
    engine = spawn([sys.executable, "-c", PARENT], log, {})
    wait_until(lambda: log.read_text().strip())
    child = psutil.Process(int(log.read_text()))
    with owner_of(SLEEP) as bystander:
        engine.stop(grace_s=0.5)
        assert not engine.alive
        assert not runs(child)
        assert bystander.poll() is None
        bystander.kill()
    engine.stop()  # a second time is no error


def test_an_engine_that_dies_while_loading_says_why(checkpoints, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    said = r"(?s)loading the model.*engine\.log.*'gpt2': only llama"
    with pytest.raises(EngineError, match=said):
        start(tmp_path, tmp_path)


def test_an_engine_that_takes_too_long_is_stopped_and_named(checkpoints, tmp_path):
    with pytest.raises(EngineError, match=r"pid (\d+)\) ran out of time while loading") as error:
        start(checkpoints[0], tmp_path, start_timeout_s=0.1)
    pid = int(str(error.value).split("(pid ")[1].split(")")[0])
    assert not psutil.pid_exists(pid)


def test_an_engine_that_is_told_to_end_does_not_wait_for_what_it_is_paused_in(
    checkpoints, tmp_path
):
    """Slurm tells all that runs in a step, in the midst of an update, too; whose trainer waits."""
    with start(checkpoints[0], tmp_path) as engine:
        engine.client().pause()
        body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 4}}
        head = {"Authorization": "Bearer secret"}
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(
                httpx.post, f"{engine.url}/generate", json=body, headers=head, timeout=60
            )
            time.sleep(1)
            assert not asked.done()
            psutil.Process(engine.pid).terminate()
            wait_until(lambda: not engine.alive, 10)
            assert asked.exception() or asked.result().is_error
        assert engine.end() == "was killed by SIGTERM"


def test_an_engine_does_not_see_its_owners_mpi_rank(tmp_path, monkeypatch):
    for name in ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_FD", "SLURM_MPI_TYPE"):
        monkeypatch.setenv(name, "3")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    script = (
        "import os; print(sorted(k for k in os.environ"
        " if ('MPI' in k or 'PMI' in k or k == 'SLURM_JOB_ID') and '_MCA_' not in k))"
    )
    engine = spawn([sys.executable, "-c", script], tmp_path / "log", {})
    wait_until(lambda: not engine.alive)
    assert (tmp_path / "log").read_text().strip() == "['SLURM_JOB_ID']"


CHECK = """
from relax_hpc.inference.sglang.launch import check
from relax_hpc.errors import ConfigError
for args in ({"tp_size": 2, "mem_fraction_static": 0.5}, {"mem_fraction_statik": 0.5},
             {"tp_size": "two"}, {"dllm_fdfo": False}, {"enable_multimodal": False}):
    try:
        print("fine" if check(args) is None else "")
    except ConfigError as error:
        print(error)
"""


@pytest.mark.sglang
def test_sglangs_own_parser_checks_the_arguments():
    command = [SGLANG_PYTHON, "-c", CHECK]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = answer.stdout.splitlines()
    fine = lines.index("fine")
    assert "did you mean mem_fraction_static?" in lines[fine + 1]
    assert "'two'" in lines[fine + 2]
    # On unless that is said; and one that SGLang can only be told to turn on.
    assert "dllm_fdfo = false: set no_dllm_fdfo = true" in lines[fine + 3]
    assert "enable_multimodal = false: SGLang can only be told" in lines[fine + 4]
