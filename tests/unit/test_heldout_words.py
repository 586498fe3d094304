"""Words on the held-out prompts, and on what announced ends of a job took and wasted."""

import logging
from dataclasses import replace

import pytest
from board_runs import event
from test_telemetry import timed

from relax_hpc.config import job_file
from relax_hpc.roles.rollout.heldout import Begun, Due, HeldoutRow, ScoreBoard, TaskScore
from relax_hpc.runs import report, screen, status, summary
from relax_hpc.runs.scale.records import Extra, ScaleState
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.runtime.telemetry import history
from relax_hpc.runtime.telemetry.events import EventWriter


def share(version, correct, num_samples):
    return TaskScore(version, version, correct, num_samples)


def board_of(folder, rank, size):
    return ScoreBoard(RunPaths(folder), rank, size)


BEFORE, SECOND, AFTER = Due("h", "before", 0), Due("h", "during", 1), Due("h", "after", 0)
EASY, HARD = Due("easy", "during", 1), Due("hard", "during", 1)
LATE = [  # the task of rank 1 is killed and starts again
    (2, BEFORE, share(0, 2.0, 4), ""),
    (0, BEFORE, share(0, 3.0, 4), ""),
    (1, BEFORE, share(0, 1.0, 2), "before, policy 0: 0.600 (h)"),
    (0, SECOND, share(25, 1.0, 4), ""),
    (1, SECOND, share(27, 1.0, 4), ""),
    (2, SECOND, TaskScore(26, 26, 1.0, 4, 0, 99, 3),
     "during, policies 25 to 27: 0.250 (h, 25.0% cut off)"),
    ("1 again", AFTER, share(30, 4.0, 4), ""),
    (0, AFTER, share(30, 4.0, 4), ""),
    (2, AFTER, share(30, 4.0, 4), "after, policy 30: 1.000 (h)"),
]  # fmt: skip
UNSCORED = [
    (0, BEFORE, TaskScore(0, 0, 1.0, 1, 3), ""),
    (1, BEFORE, TaskScore(0, 0, 1.0, 3, 0),
     "before, policy 0: 0.500 (h, 3 left out whose reward failed)"),
]  # fmt: skip
SETS = [
    (0, EASY, TaskScore(20, 21, 3.0, 4), ""),
    (1, HARD, TaskScore(20, 20, 1.0, 4), ""),
    (1, EASY, TaskScore(19, 20, 3.0, 4), "during, policies 19 to 21: 0.750 (easy)"),
    (0, HARD, TaskScore(-1, -1, 0.0, 0), "during, policy 20: 0.250 (hard)"),
]
NOTHING = [(0, BEFORE, TaskScore.of([]), "before, no policy: no score (h)")]


@pytest.mark.parametrize(
    ("size", "added"),
    [(3, LATE), (2, UNSCORED), (2, SETS), (1, NOTHING)],
    ids=["killed", "no scores", "sets", "nothing sampled"],
)
def test_the_last_task_of_an_evaluation_says_what_all_scored(tmp_path, caplog, size, added):
    """(task, evaluation, its share, what is said then)."""
    caplog.set_level(logging.INFO)
    boards = {}
    for task, due, share, said in added:
        board = boards.setdefault(task, board_of(tmp_path, int(str(task)[0]), size))
        board.add(due, share, [])
        lines = [record.getMessage() for record in caplog.records]
        assert lines == ([f"held-out {said}"] if said else [])
        caplog.clear()


def test_what_all_tasks_have_scored_stays_so_when_they_are_others_and_the_rest_is_begun_anew(
    tmp_path,
):
    rows = [HeldoutRow(p, 0, 1.0, {"a": 1.0}, 4, 4, "stop", 1, ["7"], "s") for p in range(2)]
    before, once, twice = Due("h", "before", 0), Due("h", "during", 1), Due("h", "during", 2)
    two = [board_of(tmp_path, rank, 2) for rank in range(2)]
    for rank, board in enumerate(two):
        board.add(before, TaskScore.of(rows[rank:]), rows[rank:])
    two[0].add(once, TaskScore.of(rows[:1]), rows[:1])
    two[1].begin(twice)
    two[1].keep(twice, rows[1:])
    for size in (1, 3):
        for rank in range(size):
            other = board_of(tmp_path, rank, size)
            assert other.list_begun("h") == Begun([before], [once, twice])
            assert other.count_kept_bytes([before]) is None and other.count_kept_bytes([once]) == 0
            assert other.begin(twice) == []
    board_of(tmp_path, 0, 1).add(once, TaskScore.of(rows), rows)
    assert board_of(tmp_path, 2, 3).list_begun("h") == Begun([before, once], [twice])
    assert board_of(tmp_path, 1, 2).list_begun("h") == Begun([before, once], [twice])
    assert board_of(tmp_path, 1, 2).begin(twice) == rows[1:], "it is of so many tasks"


RUNS = {
    "rl": {"prompts": {"train": "t"}, "schedule": {"num_steps": 30}},
    "sft": {"sft": {"train": "t", "batch_size": 1, "num_steps": 30}},
}


@pytest.fixture
def text(tmp_path):
    """`status` of a run of 30 steps that did some and was evaluated after others."""

    def of(kind, steps, evaluated, failed=(), sets=("h",), wide=0, cut=None):
        paths = RunPaths(tmp_path / kind)
        paths.root.mkdir(exist_ok=True)
        tree = {"name": kind, "model": {"path": "m"}} | RUNS[kind]
        paths.config.write_text(job_file.validate(tree, source="test").model_dump_json())
        paths.events("actor", 0).unlink(missing_ok=True)
        with EventWriter(paths.events("actor", 0), "actor", 0) as events:
            for step in range(1, steps + 1):
                events.emit("step", step=step, loss=2.0, num_trajectories=1, num_documents=1)
            for step, value in evaluated.items():
                when = {0: "before", 30: "after"}.get(step, "during")
                if kind == "rl":
                    share = {"correct": 10 * value, "num_samples": 10}
                    share |= {"number": step, "version": step, "version_max": step + wide}
                    share |= {} if cut is None else {"num_truncated": cut}
                    for name in sets:
                        events.emit("eval", when=when, name=name, headline=name == "h", **share)
                else:
                    events.emit("heldout", step=step, loss=value)
            for errors, samples, first in failed:
                fields = {"num_errors": errors, "num_samples": samples, "first": first}
                events.emit("reward_errors", heldout=first.startswith("held-out"), **fields)
        found = summary.write(paths.root)
        run = status.RunStatus(
            **dict.fromkeys(status.RunStatus.__dataclass_fields__)
            | {"run_dir": paths.root, "name": kind, "state": "CANCELLED", "progress": found}
            | {"components": (), "engines": (), "doing": (), "reason": "", "earlier": {}}
        )
        of.run = run
        return report.text(run)

    return of


@pytest.mark.parametrize("kind", RUNS)
def test_the_newest_evaluation_is_after_only_what_the_run_ends_with(text, kind):
    assert "0.500 before, 0.750 at step 20" in text(kind, 25, {0: 0.5, 10: 0.6, 20: 0.75})
    assert "0.500 before, - after" in text(kind, 5, {0: 0.5})
    assert "0.500 before, 1.000 after" in text(kind, 30, {0: 0.5, 20: 0.75, 30: 1.0})


def test_status_tells_each_of_several_held_out_sets_by_its_name_the_first_one_first(text):
    said = text("rl", 30, {0: 0.5, 30: 1.0}, sets=("a", "h"))
    assert [" ".join(line.split()) for line in said.splitlines() if "held-out" in line] == [
        "held-out 0.500 before, 1.000 after (h)",
        "held-out 0.500 before, 1.000 after (a)",
    ]


def test_status_says_which_policies_a_score_is_of_unless_it_is_of_one_and_how_much_was_cut_off(
    text,
):
    def told(*args, **more):
        lines = text("rl", *args, **more).splitlines()
        return [" ".join(line.split()) for line in lines if "held-out" in line]

    assert told(30, {0: 0.5, 30: 1.0}, cut=0) == ["held-out 0.500 before, 1.000 after"]
    assert told(25, {0: 0.5, 20: 0.75}, wide=2, cut=1) == [
        "held-out 0.500 before (policies 0 to 2, 10.0% cut off), 0.750 at step 20 "
        "(policies 20 to 22, 10.0% cut off)"
    ]
    assert "held-out 0.500 (0 to 2) -> 0.750 (20 to 22)" in screen._results(text.run.progress)


def test_status_counts_rewards_that_failed_and_says_why_the_first_did(text):
    """2 of 100 and 1 of 50, then 300 that did not fail."""
    failed = [(2, 100, "a bug"), (1, 50, "another"), (0, 300, ""), (7, 8, "held-out bug")]
    told = text("rl", 5, {}, failed=failed)
    assert [" ".join(line.split()) for line in told.splitlines() if "errors" in line] == [
        "reward errors 3 of 450 (first: a bug)",
        "reward errors 7 of 8 held-out (first: held-out bug)",
    ]


def test_an_engine_that_was_removed_stands_apart_from_the_versions_that_there_are(text):  # U9
    """rollout-0 is of the job, extra-2 was added and stays, extra-3 ended with the run; extra-1
    was removed, rollout-7 is of an earlier start with more engines."""
    text("rl", 5, {})
    paths = RunPaths(text.run.run_dir)
    extras = [
        Extra("extra-1", 1, "n1", 0, "GONE", 0.0, "removed on request"),
        Extra("extra-2", 1, "n1", 1, "ACTIVE", 0.0),
        Extra("extra-3", 1, "n1", 2, "GONE", 0.0, "the run ended"),
    ]
    ScaleState("7.0", 3, ["n1"], 3, extras={each.id: each for each in extras}).write(paths)
    with EventWriter(paths.events("actor", 0), "actor", 0) as events:
        for version, gone in ((74, ["extra-1", "rollout-7"]), (84, [])):
            held = ["rollout-0", "extra-2", "extra-3", *gone]
            events.emit("publish", version=version, members=held)
    run = replace(text.run, progress=summary.summarize(paths.root))
    [weights] = [line for line in report.text(run).splitlines() if line.startswith("  weights")]
    assert " ".join(weights.split()) == (
        "weights trainer v84, rollout-0 v84, extra-2 v84, extra-3 v84; "
        "extra-1 removed at v74, rollout-7 removed at v74"
    )


RUN = [
    event("start", 1000, attempt="7.0"), timed(1, 1300, 200.0), timed(2, 1900, 500.0),
    event("start", 2100, attempt="7.1"), timed(3, 2200, 90.0), timed(4, 2290, 80.0),
    event("start", 2400, attempt="7.2"), timed(4, 2500, 90.0),
]  # fmt: skip


def test_what_was_drained_and_what_is_trained_again_is_waste_of_the_last_ten_minutes():
    records = {
        "7.1": {"time": 2291.0, "asked": 2300.0, "limit": 2380.0},
        "7.0": {"time": 1901.0, "asked": 1904.0, "limit": None},
    }
    first, second = history.sum_up_ends(records, RUN)
    assert first == ("7.0", 3.0, 600.0, 3.0)  # it ran for longer than 10 minutes
    assert second == ("7.1", 9.0, 200.0, 9.0 + 80.0)  # and this one 200 s
    [(_, said)] = report._describe_announced_ends([first._asdict(), second._asdict()])
    assert said.startswith("2 announced: requeued 9.0 s after that at most; 11.5% of the last 10 ")
