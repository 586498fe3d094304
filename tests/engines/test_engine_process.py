"""Engines as processes: they tell why they fail, and end with their owner."""

import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from sglang_under_test import SGLANG_PYTHON

from relax_hpc.errors import ConfigError, EngineError
from relax_hpc.inference import leash
from relax_hpc.inference.client import EngineClient
from relax_hpc.inference.embedded import launch as embedded
from relax_hpc.inference.process import spawn, start_engine
from relax_hpc.inference.sglang import launch as sglang
from relax_hpc.inference.spec import EngineSpec

pytestmark = pytest.mark.long

OWNER = """
    import sys, time
    from pathlib import Path
    from relax_hpc.inference.process import start_engine
    from relax_hpc.inference.spec import EngineSpec
    kind, model, log, python = sys.argv[1:]
    engine = start_engine(
        EngineSpec(kind, Path(model), start_timeout_s=240), host="127.0.0.1", token="t",
        log_path=Path(log), python=python,
    )
    print(engine.pid, engine.url, "torch" in sys.modules, flush=True)
    time.sleep(600)
"""


def start(checkpoint, tmp_path, *, dtype="float32", start_timeout_s=60, **how):
    return start_engine(
        EngineSpec("embedded", checkpoint, dtype, start_timeout_s=start_timeout_s),
        host="127.0.0.1", token="secret", log_path=tmp_path / "logs" / "engine.log", **how,
    )  # fmt: skip


def runs(process):
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(condition, timeout_s=30):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("kind", ["embedded", "sglang"])
def test_killing_the_owner_ends_the_engine_and_its_children(kind, checkpoints, tmp_path):
    python = SGLANG_PYTHON if kind == "sglang" else sys.executable
    arguments = [kind, str(checkpoints[0]), str(tmp_path / "log"), python]
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(OWNER), *arguments],
        stdout=subprocess.PIPE,
        text=True,
    ) as owner:
        pid, url, imported_torch = owner.stdout.readline().split()
        engine = psutil.Process(int(pid))
        tree = [engine, *engine.children(recursive=True)]
        assert EngineClient(url, "t").health(5.0)
        owner.kill()
        assert kind == "sglang" or imported_torch == "False", "seconds before the engine's own"
    wait_until(lambda: not any(map(runs, tree)))


def test_a_child_that_was_still_starting_when_the_owner_died_is_ended_too(tmp_path):
    """It has not yet asked the kernel to die with its parent."""
    script = (
        "import subprocess, sys, time\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "time.sleep(600)\n"
    )
    owner = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from relax_hpc.inference.process import spawn\n"
        "engine = spawn([sys.executable, '-c', sys.argv[1]], Path(sys.argv[2]), {})\n"
        "print(engine.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", owner, script, str(tmp_path / "log")],
        stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        engine = psutil.Process(int(process.stdout.readline()))
        wait_until(engine.children)
        tree = [engine, *engine.children(), *psutil.Process(process.pid).children()]
        process.kill()
    wait_until(lambda: not any(map(runs, tree)))


def test_a_reaper_ends_a_session_only_if_nobody_says_that_all_is_well():
    def reap(said):
        argv = [sys.executable, leash.__file__, "reap", str(engine.pid)]
        subprocess.run(argv, input=said, check=True)

    engine = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True
    )
    reap(b".")
    assert engine.poll() is None
    reap(b"")
    assert engine.wait(10) == -signal.SIGKILL


def test_stop_ends_the_whole_tree_even_if_it_ignores_sigterm(tmp_path):
    script = (
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    log = tmp_path / "log"
    engine = spawn([sys.executable, "-c", script], log, {})
    wait_until(lambda: log.read_text().strip())
    child = psutil.Process(int(log.read_text()))
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    engine.stop(grace_s=0.5)
    assert not engine.alive
    assert not runs(child)
    assert bystander.poll() is None
    bystander.send_signal(signal.SIGKILL)
    bystander.wait()
    engine.stop()  # a second time is no error


def test_an_engine_that_dies_while_loading_says_why(checkpoints, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(
        EngineError, match=r"(?s)loading the model.*engine\.log.*'gpt2': only llama"
    ):
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


def test_neither_the_command_line_nor_a_left_file_shows_the_token(checkpoints, tmp_path):
    with start(checkpoints[0], tmp_path) as engine:
        command_line = psutil.Process(engine.pid).cmdline()
        assert not any("secret" in word for word in command_line)
        options = command_line[command_line.index("--options") + 1]
        assert not Path(options).exists()
        assert engine.log_path.stat().st_mode & 0o077 == 0


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


def test_misspelt_embedded_arguments_are_answered_with_the_nearest():
    with pytest.raises(ConfigError, match=r"num_thread: .*did you mean num_threads\?"):
        embedded.check({"num_thread": 2})
    with pytest.raises(ConfigError, match="expected int"):
        embedded.check({"num_threads": "2"})
    embedded.check({"num_threads": 2})


def test_arguments_that_the_run_decides_are_refused_with_the_key_that_decides():
    with pytest.raises(ConfigError, match=r"args\.dtype: .*set model\.dtype"):
        sglang.check({"dtype": "bfloat16"})
    with pytest.raises(ConfigError, match=r"args\.port: .*leave it out"):
        sglang.check({"port": 30000})


def test_passed_through_arguments_become_flags_and_override_defaults(checkpoints):
    args = {
        "max_total_tokens": 99,
        "tp_size": 2,
        "enable_metrics": True,
        "disable_overlap_schedule": False,
        "cuda_graph_bs": [1, 2],
    }
    spec = EngineSpec("sglang", checkpoints[0], args=args, seed=3, max_running_requests=64)
    argv = sglang.arguments(spec, host="127.0.0.1", port=1, device="cpu")
    text = " ".join(argv)
    assert "--max-total-tokens 99" in text and "32768" not in text
    assert "--tp-size 2" in text and "--cuda-graph-bs 1 2" in text
    assert "--enable-metrics" in argv and "--disable-overlap-schedule" not in argv
    assert "--weight-version 0" in text and "--random-seed 3" in text


CHECK = """
    import sys
    from relax_hpc.inference.sglang.launch import check
    from relax_hpc.errors import ConfigError
    for args in ({"tp_size": 2, "mem_fraction_static": 0.5}, {"mem_fraction_statik": 0.5},
                 {"tp_size": "two"}, {"disable_overlap_schedule": False}, {"dllm_fdfo": False},
                 {"enable_multimodal": False}, {"tp_size": False}, {"no_dllm_fdfo": True}):
        try:
            print("fine" if check(args) is None else "")
        except ConfigError as error:
            print(error)
"""


@pytest.mark.sglang
def test_sglangs_own_parser_checks_the_arguments():
    answer = subprocess.run(
        [SGLANG_PYTHON, "-c", textwrap.dedent(CHECK)], capture_output=True, text=True, check=True
    )
    lines = answer.stdout.splitlines()
    fine = lines.index("fine")
    assert "did you mean mem_fraction_static?" in lines[fine + 1]
    assert "'two'" in lines[fine + 2]
    assert lines[fine + 3 :] == [
        "fine",
        "engines.rollout.args.dllm_fdfo = false: set no_dllm_fdfo = true",  # on unless that is said
        "engines.rollout.args.enable_multimodal = false: SGLang can only be told to turn it on; "
        "leave it out",
        "engines.rollout.args.tp_size = False: expected 1, 2, ...",
        "fine",
    ]


def test_two_engines_of_one_node_take_different_ports(checkpoints, tmp_path):
    with start(checkpoints[0], tmp_path) as one, start(checkpoints[0], tmp_path) as two:
        assert one.url != two.url
        assert one.client().health(5.0) and two.client().health(5.0)
