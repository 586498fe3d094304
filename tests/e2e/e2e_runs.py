"""A run as its user sees it: the command line, the run directory, and nothing else."""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from typer.testing import CliRunner

from relax_hpc.bus.plan import read_chain
from relax_hpc.cli.main import app
from relax_hpc.launch.states import is_over as has_ended
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.runtime.telemetry.events import read_events

REPOSITORY = Path(__file__).parents[2]
UNHURRIED = """
import asyncio, pathlib

async def score(response, answer):
    if pathlib.Path(__file__).with_name("slowly").exists():
        await asyncio.sleep(SECONDS)
    return float(answer in response)
"""
CLI = Path(sys.executable).with_name("relax-hpc")
STARTED = []
"""Run directories of what was submitted, which conftest cancels at the end of the test."""
NODE = ("pid", "engine_pid")
"""Whom the loss of a node ends."""
PATIENCE = 2
"""So many times as long is waited as a machine needs that does nothing else."""


class Submitted(NamedTuple):
    run_dir: Path
    said: str


def console(*arguments):
    """Returns what the console script printed; one that fails, fails the test in its words."""
    answer = subprocess.run(
        [CLI, *arguments], capture_output=True, text=True, timeout=120 * PATIENCE
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout


def cli(*arguments):
    """Likewise, of the same commands in this process, which has imported everything already."""
    answer = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert answer.exit_code == 0, f"{answer.output}\n{answer.exception!r}"
    return answer.output


def submit(job, model_folder, *, local, run=cli, **settings):
    """Submits jobs/<job>.toml; `schedule__num_steps=9` sets schedule.num_steps."""
    settings = {
        "model.path": model_folder / "model",
        # Each start looks at every prompt that there is.
        "prompts.train": f"{model_folder}/train.jsonl[0:512]",
        "eval.heldout.path": model_folder / "heldout.jsonl",
    } | settings
    overrides = [f"--set={key.replace('__', '.')}={value}" for key, value in settings.items()]
    said = run("submit", REPOSITORY / "jobs" / f"{job}.toml", *["--local"] * local, *overrides)
    STARTED.append(Path(re.search(r"^run directory: (.*)$", said, re.MULTILINE)[1]))
    return Submitted(STARTED[-1], said)


def sized(run_root, steps, prompts, siblings, heldout):
    """Settings of a small run that scores so many held-out prompts before it and after it."""
    return {
        "run_root": run_root,
        "schedule.num_steps": steps,
        "schedule.prompts_per_step": prompts,
        "rollout.samples_per_prompt": siblings,
        "eval.heldout.every": 0,
        "eval.heldout.num_prompts": heldout,
    }


def unhurried(folder, seconds=0.3):
    """A reward, as a job names it, that takes its time while the file `slowly` lies beside it.

    So a run lasts while something is done to it, and leaves the processor to that. Siblings have to
    differ in it, or nothing is learned (as of their lengths, which are alike in parity).
    """
    text = UNHURRIED.replace("SECONDS", str(seconds))
    (folder / "unhurried.py").write_text(text)
    (folder / "slowly").touch()
    return f"{folder}/unhurried.py:score"


def hurry(folder):
    (folder / "slowly").unlink()


def status(run_dir):
    """What `status` says; in whatever state a run is, its ledger adds up."""
    now = json.loads(cli("status", run_dir, "--json"))
    if counts := (now.get("progress") or {}).get("trajectories"):  # supervised runs have no ledger
        assert (counts["trained_twice"], counts["dropped"]["unaccounted"]) == (0, 0), counts
    return now


def wait_until(run_dir, predicate, timeout_s):
    """The first status of which `predicate` holds; a run that ended will not get there.

    `timeout_s` is of a machine that does nothing else.
    """
    deadline = time.monotonic() + PATIENCE * timeout_s
    seen = getattr(predicate, "is_seen_in", lambda run_dir: False)
    while True:
        asked = time.monotonic()
        if predicate(now := status(run_dir)):
            if now["state"] == "COMPLETED" and RunPaths(run_dir).bus.header.exists():
                cli("bus", "verify", run_dir)
            return now
        assert not has_ended(now["state"]), words_on(run_dir, now)
        assert time.monotonic() < deadline, words_on(run_dir, now)
        # Who asks takes the run's time, and Slurm's word costs six processes.
        again = time.monotonic() + max(0.4, 8 * (time.monotonic() - asked))
        time.sleep(0.2)
        while time.monotonic() < again and not seen(run_dir):
            time.sleep(0.1)


def words_on(run_dir, now):
    """A run as it stands: its status, what Slurm says of jobs and nodes, the end of its logs."""
    said = [str(now)]
    if "SLURM_CONF" in os.environ:
        for asked in (["scontrol", "show", "job"], ["scontrol", "show", "node"]):
            answer = subprocess.run(asked, capture_output=True, text=True, timeout=60)
            said.append(answer.stdout + answer.stderr)
    return "\n".join([*said, cli("logs", run_dir)[-8000:]])


def wait_for(condition, timeout_s=60):
    """Waits for what is seen without asking for a status, which may be too late for a short run."""
    deadline = time.monotonic() + PATIENCE * timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_over(now):
    return has_ended(now["state"])


def wait_until_over(run_dir, timeout_s):
    return wait_until(run_dir, is_over, timeout_s)


class has_done(NamedTuple):  # noqa: N801 - reads as the predicate that it is
    """Whether that many steps are done; the actor's events tell it sooner than a status."""

    steps: int

    def __call__(self, now):
        return now["progress"]["steps_done"] >= self.steps

    def is_seen_in(self, run_dir):
        return any(each["step"] >= self.steps for each in events_of(run_dir, "actor", "step"))


def events_of(run_dir, role=None, event=None):
    return [
        each
        for each in read_events(run_dir / "events")
        if role in (None, each["role"]) and event in (None, each["event"])
    ]


def newest(run_dir, role, event):
    return events_of(run_dir, role, event)[-1]


def kill(run_dir, role, event="start", whom=("pid",)):
    """Kills a task, its engine or both, as their newest event names them."""
    named = newest(run_dir, role, event)
    for key in whom:
        os.kill(named[key], signal.SIGKILL)


def assert_whole(run_dir, after, steps, prompts, siblings):
    """It is complete: nothing was lost, doubled or moved to another step."""
    assert after["state"] == "COMPLETED", cli("logs", run_dir)[-4000:]
    counts = after["progress"]["trajectories"]
    assert counts["committed"] == counts["trained"] == steps * prompts * siblings
    assert counts["trained_twice"] == 0 and set(counts["dropped"].values()) == {0}
    assert_every_prompt_once(run_dir, steps, prompts)


def planned(run_dir):
    """(step, guids) of the valid plan."""
    return [(step.step, step.guids) for step in read_chain(RunPaths(run_dir).bus).steps]


def next_that_teach(run_dir, num_steps, prompts_per_step):
    """The plan of a run whose batches are refilled: the groups that are not skipped, in order."""
    skipped = {group.guid for group in read_chain(RunPaths(run_dir).bus).skipped}
    guids = (guid for guid in itertools.count() if guid not in skipped)
    return [
        (step, list(itertools.islice(guids, prompts_per_step))) for step in range(1, num_steps + 1)
    ]


def assert_every_prompt_once(run_dir, num_steps, prompts_per_step):
    """Nothing was lost, doubled or moved to another step."""
    found, guids = planned(run_dir), itertools.count()
    steps = range(1, num_steps + 1)
    assert found == [(step, list(itertools.islice(guids, prompts_per_step))) for step in steps], (
        found
    )
