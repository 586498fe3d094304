"""A model scored without a trainer, by a real engine: through the command line."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from engine_fixtures import runs, wait_until
from typer.testing import CliRunner

from relax_hpc.cli.demo import models
from relax_hpc.cli.main import app
from relax_hpc.runtime.telemetry.events import read_events

pytestmark = pytest.mark.long

EVEN = """
def score(response, prompt):
    return 1.0 - len(response) % 2
"""
PROMPTS, SAMPLES = 24, 3


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    tokens = models.tokenizer()
    models.save(folder / "model", models.model(tokens, seed=0), tokens)
    for name, first in (("easy", 0), ("hard", 30)):
        rows = [
            {"prompt": f"{first + n}+1=", "answer": f"{first + n + 1}", "source": "ab"[n % 2]}
            for n in range(PROMPTS)
        ]
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "even.py").write_text(EVEN)
    return folder


def arguments(place, name, *more, prompts=("easy", "hard")):
    sets = [f"--set={each}={place}/{each}.jsonl" for each in prompts]
    keys = ["model.dtype=float32", "rollout.max_new_tokens=8", f"run_root={place}/runs"]
    return [
        "eval", f"{place}/model", *sets, f"--samples={SAMPLES}", "--temperature=0.8",
        f"--reward={place}/even.py:score", f"--name={name}", *(f"--key={key}" for key in keys),
        *more,
    ]  # fmt: skip


def invoke(*asked):
    answer = CliRunner().invoke(app, [str(each) for each in asked])
    assert answer.exit_code == 0, f"{answer.output}\n{answer.exception!r}"
    return answer.stdout


def rows_of(run_dir, name):
    [path] = (run_dir / "eval" / name).glob("*")
    return [json.loads(line) for line in path.read_text().splitlines()]


def assert_ended(run_dir):
    """That of a task that was killed is ended by the kernel."""
    started = [e for e in read_events(run_dir / "events") if e["event"] == "engine"]
    wait_until(lambda: not any(is_alive(engine["engine_pid"]) for engine in started))


def is_alive(pid):
    return psutil.pid_exists(pid) and runs(psutil.Process(pid))


def test_a_model_is_scored_on_two_sets_and_all_can_be_read_again(place):
    said = invoke(*arguments(place, "first", "--top-p=0.95", "--k=1,3", "--json"))
    run_dir = place / "runs" / "first"
    assert_ended(run_dir)
    found = {each["name"]: each for each in json.loads(said)}
    for name in ("easy", "hard"):
        rows = rows_of(run_dir, name)
        wanted = [(p, s) for p in range(PROMPTS) for s in range(SAMPLES)]
        assert [(row["prompt"], row["sample"]) for row in rows] == wanted
        assert [row["score"] for row in rows] == [1.0 - len(row["texts"][0]) % 2 for row in rows]
        assert {row["version"] for row in rows} == {0}
        assert len({row["texts"][0] for row in rows}) > PROMPTS
        mean = sum(row["score"] for row in rows) / len(rows)
        assert found[name]["all"]["mean"]["value"] == pytest.approx(mean)
        assert set(found[name]["all"]["pass_at"]) == {"1", "3"}
        assert set(found[name]["subsets"]) == {"a", "b"}
    assert json.loads(invoke("eval", run_dir, "--k=1,3", "--json")) == list(found.values())
    table = invoke("eval", run_dir, "--set=hard")
    assert table.startswith("hard\n") and "easy" not in table
    shown = invoke("view", run_dir, "--text", "--groups=100")
    assert "30+1=" in shown and "53+1=" in shown
    # It is done: nothing is sampled again.
    again = invoke(*arguments(place, "first", "--top-p=0.95", "--k=1,3", "--json"))
    assert json.loads(again) == list(found.values())
    shards = [e for e in read_events(run_dir / "events") if e["event"] == "shard"]
    assert sum(e["num_trajectories"] for e in shards) == 2 * PROMPTS * SAMPLES


SLOW = ("--key=engines.rollout.max_running_requests=3", "--key=rollout.max_new_tokens=150")
"""A group at a time, and many tokens."""


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_one_that_is_interrupted_ends_its_engine_and_is_completed_by_the_same_command(place, end):
    """Killed, it says at the end that what it had for a shard is not on the bus."""
    command = arguments(place, f"slow-{end.name}", *SLOW, prompts=["easy"])
    program = Path(sys.executable).with_name("relax-hpc")
    process = subprocess.Popen(
        [program, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    run_dir = place / "runs" / f"slow-{end.name}"
    part = run_dir / "eval" / "easy" / "before-0.0-of-1.part"
    deadline = time.monotonic() + 120
    while not (part.exists() and len(part.read_text().splitlines()) > 1):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.02)
    os.kill(process.pid, end)
    process.communicate(timeout=30)
    assert process.returncode not in (0, 1) and part.exists()
    assert_ended(run_dir)
    kept = [row for line in part.read_text().splitlines() for row in json.loads(line)]
    assert 0 < len(kept) < PROMPTS * SAMPLES
    invoke(*command)
    rows = rows_of(run_dir, "easy")
    assert len({(row["prompt"], row["sample"]) for row in rows}) == len(rows) == PROMPTS * SAMPLES
    assert all(row in rows for row in kept)
    assert_ended(run_dir)
    shards = [e for e in read_events(run_dir / "events") if e["event"] == "shard"]
    missing = len(kept) // SAMPLES if end is signal.SIGKILL else 0
    assert sum(e["num_trajectories"] for e in shards) == (PROMPTS - missing) * SAMPLES
    said = "".join(path.read_text() for path in (run_dir / "logs").glob("*") if path.is_file())
    assert (f"{missing} prompts are scored and not among" in said) == (missing > 0)
