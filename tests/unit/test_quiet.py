"""A run that is followed and tells nothing for a while: a line on what it is at."""

from types import SimpleNamespace

import fake_slurm
import pytest
from bus_fixtures import produce
from bus_steps import plan
from job_trees import job_of
from test_first_hour import write_steps

from relax_hpc.bus import layout
from relax_hpc.inference import members
from relax_hpc.inference.members import Member, Roster, RosterEntry
from relax_hpc.launch import states
from relax_hpc.runs import report, status
from relax_hpc.runs.status import Watch
from relax_hpc.runtime.paths import RunPaths


@pytest.fixture
def run(tmp_path, monkeypatch):
    yield fake_slurm.make(tmp_path, monkeypatch)
    states.has_accounting.cache_clear()


def job(run, count=1, **sections):
    """Makes it a job of that many engines, and of batches of 4 x 2 responses."""
    made = job_of(
        run_root=str(run.run_dir.parent), schedule={"num_steps": 30, "prompts_per_step": 4},
        rollout__samples_per_prompt=2, engines__rollout__count=count, **sections,
    )  # fmt: skip
    paths = RunPaths(run.run_dir)
    paths.config.write_text(made.model_dump_json())
    layout.create(paths.bus, [f"rollout-{rank}" for rank in range(count)], {})
    run.says("7+0|RUNNING", "7+1|RUNNING")
    return paths


def said(paths):
    return report.at_work(paths.root, Watch(paths.root))


def announce(paths, name, state="STARTING", reason=""):
    members.announce(paths, Member(name, "7.0-1-1", "", 1, "sglang", state, reason))


def test_engines_that_are_not_there_yet_are_named_or_counted(run):
    paths = job(run, count=5)
    batch = "; batch 1: 0 of 8 responses"
    assert said(paths) == f"of 5 engines 5 starting{batch}"
    for rank in range(3):
        announce(paths, f"rollout-{rank}", "HEALTHY")
    announce(paths, "rollout-3", reason="importing")
    assert said(paths) == (
        f"engine rollout-3 starting (importing); engine rollout-4 starting{batch}"
    )
    announce(paths, "rollout-2", reason="importing")
    announce(paths, "rollout-4", "WAITING", "for the trainer to lend its GPUs")
    waits = "1 waiting (for the trainer to lend its GPUs)"
    assert said(paths) == f"of 5 engines 2 starting (importing), {waits}{batch}"
    assert "rollout-2 engine of rollout, starting: importing\n" in report.text(
        status.collect(paths.root)
    )
    run.says("7+0|PENDING", "7+1|PENDING")
    assert "importing" not in report.text(status.collect(paths.root)), "of an earlier attempt"


def test_status_says_why_an_engine_is_fenced_or_has_failed(run):
    paths = job(run, count=3)
    announce(paths, "rollout-0", "HEALTHY")
    announce(paths, "rollout-1", "FAILED", "it ended 3 times")
    announce(paths, "rollout-2", "HEALTHY")  # started again since
    why = "no answer to an update for 120 s"
    entries = {f"rollout-{n}": RosterEntry(f"7.0-1-{start}", None, "FENCED", why)
               for n, start in ((0, 1), (2, 0))}  # fmt: skip
    Roster(3, entries).write(paths)
    text = report.text(status.collect(paths.root))
    assert f"rollout-0 engine of rollout, fenced: {why}\n" in text
    assert "rollout-1 engine of rollout, failed: it ended 3 times\n" in text
    assert "rollout-2 engine of rollout, healthy\n" in text
    assert said(paths).startswith(f"engine rollout-0 fenced ({why});")


def test_the_next_batch_is_what_is_committed_and_not_trained_on(run):
    paths = job(run, count=2)
    for rank in range(2):
        announce(paths, f"rollout-{rank}", "HEALTHY")
    produce(paths.bus, "rollout-0", [0, 2, 4])
    assert said(paths) == "batch 1: 6 of 8 responses"
    produce(paths.bus, "rollout-1", [1, 3, 5])
    assert said(paths) == "batch 1: 8 of 8 responses"
    plan(paths.bus, 1)
    write_steps(paths.root, {"step": 1, "num_trajectories": 8})
    assert said(paths) == "batch 2: 4 of 8 responses"


def test_what_is_said_again_and_again_comes_after_pauses_that_double(run, monkeypatch):  # U13
    paths, now = job(run), [0.0]
    monkeypatch.setattr(report, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(report, "at_work", lambda *_: "0 of 150 steps")
    following, said = report.Quiet(paths.root, Watch(paths.root)), []
    for now[0] in range(400):
        said += [now[0]] * bool(following.line())
        if now[0] == 300:
            following.end()  # there was news
    assert said == [25, 50, 100, 200, 325, 350]
