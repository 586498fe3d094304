"""Words on the held-out prompts: the whole set's figure, and of which policy it is."""

import json
import logging
from dataclasses import replace

import pytest
from matplotlib.figure import Figure

from relax_hpc import job_file, permissions
from relax_hpc.paths import RunPaths
from relax_hpc.roles.rollout.heldout import Begun, Board, Due, Row, Share
from relax_hpc.runs import report, status, summary
from relax_hpc.telemetry import curve
from relax_hpc.telemetry.events import EventWriter


def share(version, correct, num_samples):
    return Share(version, version, correct, num_samples)


def said(caplog):
    lines = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return lines


def test_the_last_task_of_an_evaluation_says_what_all_scored(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    boards = [Board(RunPaths(tmp_path), rank, 3) for rank in range(3)]
    boards[2].add(Due("h", "before", 0), share(0, 2.0, 4), [])
    boards[0].add(Due("h", "before", 0), share(0, 3.0, 4), [])
    assert said(caplog) == []
    boards[1].add(Due("h", "before", 0), share(0, 1.0, 2), [])
    assert said(caplog) == ["held-out before, policy 0: 0.600 (h)"]
    for rank, version in enumerate((25, 27, 26)):
        boards[rank].add(Due("h", "during", 1), share(version, 1.0, 4), [])
    assert said(caplog) == ["held-out during, policies 25 to 27: 0.250 (h)"]
    again = Board(RunPaths(tmp_path), 1, 3)  # its task was killed meanwhile
    again.add(Due("h", "after", 0), share(30, 4.0, 4), [])
    boards[0].add(Due("h", "after", 0), share(30, 4.0, 4), [])
    boards[2].add(Due("h", "after", 0), share(30, 4.0, 4), [])
    assert said(caplog) == ["held-out after, policy 30: 1.000 (h)"]


def test_an_evaluation_in_which_nothing_was_sampled_is_of_no_policy(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    Board(RunPaths(tmp_path), 0, 1).add(Due("h", "before", 0), Share.of([]), [])
    assert said(caplog) == ["held-out before, no policy: no score (h)"]


def test_a_task_that_is_ahead_of_the_others_keeps_its_shares_of_each_evaluation(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    ahead, behind = (Board(RunPaths(tmp_path), rank, 2) for rank in range(2))
    ahead.add(Due("h", "during", 0), share(10, 1.0, 4), [])
    ahead.add(Due("h", "during", 1), share(20, 3.0, 4), [])
    assert said(caplog) == []
    behind.add(Due("h", "during", 0), share(10, 1.0, 4), [])
    assert said(caplog) == ["held-out during, policy 10: 0.250 (h)"]
    behind.add(Due("h", "during", 1), share(20, 3.0, 4), [])
    assert said(caplog) == ["held-out during, policy 20: 0.750 (h)"]


def test_samples_without_a_score_are_left_out_and_counted(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    boards = [Board(RunPaths(tmp_path), rank, 2) for rank in range(2)]
    boards[0].add(Due("h", "before", 0), Share(0, 0, 1.0, 1, 3), [])
    boards[1].add(Due("h", "before", 0), Share(0, 0, 1.0, 3, 0), [])
    assert said(caplog) == ["held-out before, policy 0: 0.500 (h, 3 left out whose reward failed)"]
    alone = Board(RunPaths(tmp_path / "alone"), 0, 1)
    alone.add(Due("h", "before", 0), Share(0, 0, 0.0, 0, 2), [])
    [line] = said(caplog)
    assert line == "held-out before, policy 0: no score (h, 2 left out whose reward failed)"


def test_a_task_alone_says_its_own(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    Board(RunPaths(tmp_path), 0, 1).add(Due("h", "before", 0), share(0, 1.0, 2), [])
    assert said(caplog) == ["held-out before, policy 0: 0.500 (h)"]


def test_what_all_tasks_have_scored_stays_so_when_they_are_others_and_the_rest_is_begun_anew(
    tmp_path,
):
    rows = [Row(p, 0, 1.0, {"a": 1.0}, 4, 4, "stop", 1, ["7"], "s") for p in range(2)]
    before, once, twice = Due("h", "before", 0), Due("h", "during", 1), Due("h", "during", 2)
    two = [Board(RunPaths(tmp_path), rank, 2) for rank in range(2)]
    for rank, board in enumerate(two):
        board.add(before, Share.of(rows[rank:]), rows[rank:])
    two[0].add(once, Share.of(rows[:1]), rows[:1])
    two[1].begin(twice)
    two[1].keep(twice, rows[1:])
    for size in (1, 3):
        for rank in range(size):
            other = Board(RunPaths(tmp_path), rank, size)
            assert other.begun("h") == Begun([before], [once, twice])
            assert other.begun("other") == Begun([], [])
            assert other.kept_last([before]) is None and other.kept_last([once]) == 0
            assert other.begin(twice) == []
    Board(RunPaths(tmp_path), 0, 1).add(once, Share.of(rows), rows)
    assert Board(RunPaths(tmp_path), 2, 3).begun("h") == Begun([before, once], [twice])
    assert Board(RunPaths(tmp_path), 1, 2).begun("h") == Begun([before, once], [twice])
    assert Board(RunPaths(tmp_path), 1, 2).begin(twice) == rows[1:], "it is of so many tasks"


def test_a_board_knows_what_its_task_began_and_completed_in_earlier_starts(tmp_path):
    rows = [Row(p, 0, 1.0, {"a": 1.0}, 4, 4, "stop", 1, ["7"], "s") for p in range(3)]
    before, during = Due("h", "before", 0), Due("h", "during", 12)
    first, other = Board(RunPaths(tmp_path), 0, 2), Board(RunPaths(tmp_path), 1, 2)
    assert first.begin(before) == first.begin(during) == other.begin(during) == []
    first.keep(before, rows[:1])
    first.add(before, Share.of(rows[:1]), rows[:1])
    first.keep(during, rows[:2])
    first.keep(during, rows[2:])
    part = RunPaths(tmp_path).eval_part("h", "during", 12, 0, 2)
    part.write_text(part.read_text()[:-9])  # killed while it wrote
    again = Board(RunPaths(tmp_path), 0, 2)
    assert again.begun("h") == Begun([before], [during])
    assert again.begun("hard") == Begun([], [])
    assert other.begun("h") == Begun([], [])  # nothing is kept of it
    assert again.begin(during) == rows[:2]
    again.keep(during, rows[2:])
    assert again.begin(during) == rows
    again.add(during, Share.of(rows), rows)
    assert again.begun("h") == Begun([before, during], []) and not part.exists()
    first.begin(during)  # killed between the two: the share counts
    assert again.begun("h").left == []


def test_sets_are_told_apart_and_a_share_may_be_of_several_policies_or_of_none(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    first, second = (Board(RunPaths(tmp_path), rank, 2) for rank in range(2))
    first.add(Due("easy", "during", 1), Share(20, 21, 3.0, 4), [])
    second.add(Due("hard", "during", 1), Share(20, 20, 1.0, 4), [])
    assert said(caplog) == []
    second.add(Due("easy", "during", 1), Share(19, 20, 3.0, 4), [])
    first.add(Due("hard", "during", 1), Share(-1, -1, 0.0, 0), [])
    assert said(caplog) == [
        "held-out during, policies 19 to 21: 0.750 (easy)",
        "held-out during, policy 20: 0.250 (hard)",
    ]


def test_every_sample_is_kept_in_a_file_of_the_evaluation_for_the_runs_owner(tmp_path):
    """Two prompts of two samples each: pass@1 is 0.25, pass@2 is 0.5."""
    scores = {(0, 0): 0.0, (0, 1): 1.0, (3, 0): 0.0, (3, 1): 0.0}
    rows = [
        Row(
            prompt,
            sample,
            score,
            {"boxed_number": score},
            7 + sample,
            8,
            "stop",
            3,
            ["75"],
            "algebra",
        )
        for (prompt, sample), score in scores.items()
    ]
    with permissions.masked(permissions.UMASKS["none"]):
        Board(RunPaths(tmp_path), 1, 2).add(Due("hard", "during", 2), Share.of(rows), rows)
        Board(RunPaths(tmp_path), 1, 2).add(Due("hard", "during", 3), Share.of(rows), rows[:2])
    path, next_of_the_same_policy = sorted((tmp_path / "eval").rglob("*.jsonl"))
    assert len(next_of_the_same_policy.read_text().splitlines()) == 2
    assert path == tmp_path / "eval" / "hard" / "000007-during-2.1.jsonl"
    assert path.stat().st_mode & 0o077 == 0
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert {(row["prompt"], row["sample"]): row["score"] for row in found} == scores
    best = {prompt: max(s for (p, _), s in scores.items() if p == prompt) for prompt in (0, 3)}
    assert sum(best.values()) / len(best) == 0.5
    assert found[1] == {
        "prompt": 0, "sample": 1, "score": 1.0, "parts": {"boxed_number": 1.0}, "version": 8,
        "in_thought": False,
        "version_max": 8, "finish": "stop", "num_tokens": 3, "texts": ["75"],
        "source": "algebra", "failed": False,
    }  # fmt: skip
    assert Share.of(rows) == Share(7, 8, 1.0, 4)


LONG = "teacher-of-mathematics"
RUNS = {
    "rl": {"prompts": {"train": "t"}, "schedule": {"num_steps": 30}},
    "sft": {"sft": {"train": "t", "batch_size": 1, "num_steps": 30}},
}


@pytest.fixture
def text(tmp_path):
    """`status` of a run of 30 steps that did some and was evaluated after others."""

    def of(kind, steps, evaluated, failed=(), empty=(), sets=("h",)):
        paths = RunPaths(tmp_path / kind)
        paths.root.mkdir(exist_ok=True)
        tree = {"name": kind, "model": {"path": "m"}} | RUNS[kind]
        paths.config.write_text(job_file.validate(tree, source="test").model_dump_json())
        paths.events("actor", 0).unlink(missing_ok=True)
        with EventWriter(paths.events("actor", 0), "actor", 0) as events:
            for step in range(1, steps + 1):
                events.emit("step", step=step, loss=2.0, num_trajectories=1, num_documents=1)
            for step in empty:
                none = {"num_documents": 0, "num_trained_tokens": 0, "data/left_out": 4}
                events.emit("step", step=step, **none)
            for step, value in evaluated.items():
                when = {0: "before", 30: "after"}.get(step, "during")
                if kind == "rl":
                    share = {"correct": 10 * value, "num_samples": 10}
                    share |= {"number": step, "version": step, "version_max": step}
                    for name in sets:
                        events.emit("eval", when=when, name=name, headline=name == "h", **share)
                else:
                    events.emit("heldout", step=step, loss=value)
            for errors, samples, first in failed:
                fields = {"num_errors": errors, "num_samples": samples, "first": first}
                events.emit("reward_errors", heldout=first.startswith("held-out"), **fields)
        found = summary.write(paths.root)
        run = status.RunStatus(
            **{name: None for name in status.RunStatus.__dataclass_fields__}
            | {"run_dir": paths.root, "name": kind, "state": "CANCELLED", "progress": found}
            | {"components": (), "engines": (), "doing": (), "reason": ""}
            | ({"earlier": {}} if "earlier" in status.RunStatus.__dataclass_fields__ else {})
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
    assert "0.500 before, 1.000 after\n" in text("rl", 30, {0: 0.5, 30: 1.0})


@pytest.mark.parametrize(("mode", "option"), [("local", " --local"), ("slurm", "")])
def test_a_run_of_this_machine_is_resumed_on_it_wherever_slurm_is(text, mode, option):
    text("rl", 1, {})
    run = replace(text.run, state="FAILED", mode=mode)
    assert f"  to go on      relax-hpc resume {run.run_dir}{option}\n" in report.text(run)


def test_status_counts_rewards_that_failed_and_says_why_the_first_did(text):
    """2 of 100 and 1 of 50, then 300 that did not fail."""
    said = text("rl", 5, {}, failed=[(2, 100, "a bug"), (1, 50, "another"), (0, 300, "")])
    assert "  reward errors 3 of 450 (first: a bug)\n" in said
    assert "reward errors" not in text("rl", 5, {})
    told = text("rl", 5, {}, failed=[(2, 100, "a bug"), (7, 8, "held-out bug")])
    assert [" ".join(line.split()) for line in told.splitlines() if "errors" in line] == [
        "reward errors 2 of 100 (first: a bug)",
        "reward errors 7 of 8 held-out (first: held-out bug)",
    ]


def test_a_long_name_of_a_component_moves_what_stands_beside_it(text):
    text("rl", 5, {})
    of = [status.ComponentStatus(name, "7", 1, 0, "RUNNING", "n1") for name in ("actor", LONG)]
    run = replace(text.run, components=of, progress=text.run.progress | {"scored": {LONG: 3}})
    rows = report.text(run).splitlines()
    assert [row.index(" 7  running") for row in rows[1:3]] == [2 + len(LONG)] * 2
    [scored] = [row for row in rows if "3 trajectories scored" in row]
    [steps] = [row for row in rows if "5 of 30" in row]
    assert scored.index("3 traj") == steps.index("5 of 30") == 3 + len(LONG)


@pytest.mark.parametrize("kind", RUNS)
def test_a_run_without_a_step_does_not_advertise_its_curve(text, kind):
    assert "curve" in text(kind, 1, {})
    assert "curve" not in text(kind, 0, {0: 0.5})


@pytest.mark.parametrize("kind", RUNS)
@pytest.mark.parametrize("ends", [0.0, 1.0])
def test_no_legend_lies_on_a_curve(tmp_path, monkeypatch, kind, ends):
    drawn = []
    monkeypatch.setattr(curve.picture, "save", lambda figure, path: drawn.append(figure))
    with EventWriter(RunPaths(tmp_path).events("actor", 0), "actor", 0) as events:
        for step in range(1, 21):
            value = 0.5 + (ends - 0.5) * step / 20
            events.emit(
                "step", step=step, loss=value,
                **{"reward/mean": value, "staleness/mean": 1, "staleness/max": 1},
            )  # fmt: skip
    (curve.plot if kind == "rl" else curve.plot_loss)(tmp_path)
    [figure] = drawn
    assert isinstance(figure, Figure)
    figure.draw_without_rendering()
    for axes in figure.axes:
        legend, inside = axes.get_legend().get_window_extent(), axes.get_window_extent()
        assert not legend.overlaps(inside)
        assert figure.bbox.contains(*legend.min) and figure.bbox.contains(*legend.max)


def test_status_of_a_fine_tuning_counts_steps_that_had_nothing_to_train_on(text):
    said = " ".join(text("sft", 5, {}, empty=(6, 7)).split())
    assert "documents 5 trained on, 8 left out, their prompts alone are too long, 2 steps" in said
    assert "2 steps without any, which updated nothing" in said
    assert "updated nothing" not in text("sft", 5, {})
