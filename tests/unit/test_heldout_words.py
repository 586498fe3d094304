"""What is said of the held-out prompts: the whole set's figure, and of which policy it is."""

import logging

import pytest
from matplotlib.figure import Figure

from relax_hpc import job_file
from relax_hpc.paths import RunPaths
from relax_hpc.roles.rollout.heldout import Board, Share
from relax_hpc.runs import report, status, summary
from relax_hpc.telemetry import curve
from relax_hpc.telemetry.events import EventWriter


def said(caplog):
    lines = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return lines


def test_the_last_task_of_an_evaluation_says_what_all_scored(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    boards = [Board(RunPaths(tmp_path), rank, 3) for rank in range(3)]
    boards[2].add("before", 0, Share(0, 2.0, 4))
    boards[0].add("before", 0, Share(0, 3.0, 4))
    assert said(caplog) == []
    boards[1].add("before", 0, Share(0, 1.0, 2))
    assert said(caplog) == ["held-out before, policy 0: 0.600"]
    for rank, version in enumerate((25, 27, 26)):
        boards[rank].add("during", 1, Share(version, 1.0, 4))
    assert said(caplog) == ["held-out during, policies 25 to 27: 0.250"]
    again = Board(RunPaths(tmp_path), 1, 3)  # its task was killed meanwhile
    again.add("after", 0, Share(30, 4.0, 4))
    boards[0].add("after", 0, Share(30, 4.0, 4))
    boards[2].add("after", 0, Share(30, 4.0, 4))
    assert said(caplog) == ["held-out after, policy 30: 1.000"]


def test_a_task_that_is_ahead_of_the_others_keeps_its_shares_of_each_evaluation(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    ahead, behind = (Board(RunPaths(tmp_path), rank, 2) for rank in range(2))
    ahead.add("during", 0, Share(10, 1.0, 4))
    ahead.add("during", 1, Share(20, 3.0, 4))
    assert said(caplog) == []
    behind.add("during", 0, Share(10, 1.0, 4))
    assert said(caplog) == ["held-out during, policy 10: 0.250"]
    behind.add("during", 1, Share(20, 3.0, 4))
    assert said(caplog) == ["held-out during, policy 20: 0.750"]


def test_a_task_alone_says_its_own(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    Board(RunPaths(tmp_path), 0, 1).add("before", 0, Share(0, 1.0, 2))
    assert said(caplog) == ["held-out before, policy 0: 0.500"]
    assert not RunPaths(tmp_path).control.exists()


RUNS = {
    "rl": {"prompts": {"train": "t", "heldout": "h"}, "schedule": {"num_steps": 30}},
    "sft": {"sft": {"train": "t", "batch_size": 1, "num_steps": 30}},
}


@pytest.fixture
def text(tmp_path):
    """What `status` says of a run of 30 steps that did some and was evaluated after others."""

    def of(kind, steps, evaluated):
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
                    correct = {"correct": 10 * value, "count": 10}
                    events.emit("eval", when=when, version=step, **correct)
                else:
                    events.emit("heldout", step=step, loss=value)
        found = summary.write(paths.root)
        run = status.RunStatus(
            **{name: None for name in status.RunStatus.__dataclass_fields__}
            | {"run_dir": paths.root, "name": kind, "state": "CANCELLED", "progress": found}
            | {"components": (), "extras": ()}
            | ({"earlier": {}} if "earlier" in status.RunStatus.__dataclass_fields__ else {})
        )
        return report.text(run)

    return of


@pytest.mark.parametrize("kind", RUNS)
def test_the_newest_evaluation_is_after_only_what_the_run_ends_with(text, kind):
    assert "0.500 before, 0.750 at step 20" in text(kind, 25, {0: 0.5, 10: 0.6, 20: 0.75})
    assert "0.500 before, - after" in text(kind, 5, {0: 0.5})
    assert "0.500 before, 1.000 after" in text(kind, 30, {0: 0.5, 20: 0.75, 30: 1.0})


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
