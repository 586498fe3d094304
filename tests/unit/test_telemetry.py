"""Events, figures and curves of a run; files are strict JSON, as other readers know no NaN."""

import json
import math
import os

import board_runs
import numpy as np
import pytest
from board_runs import event, step
from job_trees import job_of
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from relax_hpc.config import job_file
from relax_hpc.runs import summary
from relax_hpc.runs.boards import finish
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.runtime.telemetry import curve, events, history
from relax_hpc.runtime.telemetry.events import FREQUENT, EventWriter, events_of_state, read_events
from relax_hpc.runtime.telemetry.history import Point, Points
from relax_hpc.runtime.telemetry.progress import PaceMeter, account
from relax_hpc.runtime.telemetry.timers import Timers


def evaluation(when, version, rank, correct, num_samples, time=0.0, number=0, **fields):
    policies = {"version": version, "version_max": version}
    fields = {"name": "heldout", "headline": True} | policies | fields
    return event("eval", time, "rollout", rank, when=when, number=number, correct=correct,
                 num_samples=num_samples, **fields)  # fmt: skip


def write(run_dir, events):
    board_runs.write(RunPaths(run_dir), *events)


@pytest.fixture
def run_dir(tmp_path):
    run = tmp_path / "run"
    write(run, [
        evaluation("before", 0, 0, 10.0, 50, 1.0),
        evaluation("before", 0, 1, 20.0, 50, 1.5),
        step(1, 2.0, 0.25, loss=-0.5),
        step(2, 3.0, 0.9, loss=9.0),
        step(2, 5.0, 0.5, loss=-0.25),  # trained again after a resume
        step(3, 6.0, 0.75, loss=0.0, note="text", good=True),
        evaluation("after", 3, 0, 60.0, 100, 7.0),
    ])  # fmt: skip
    return run


def test_an_event_is_one_line_with_time_role_rank_and_pid(tmp_path):
    path = tmp_path / "events" / "actor-3.jsonl"
    with EventWriter(path, "actor", 3) as events:
        events.emit("step", step=1, loss=np.float32(0.5), num_tokens=np.int64(4))
        events.emit("export", step=1, path=tmp_path)
    first, second = read_events(path.parent)
    assert first.pop("time") <= second.pop("time")
    same = {"role": "actor", "rank": 3, "pid": os.getpid()}
    assert first == same | {"event": "step", "step": 1, "loss": 0.5, "num_tokens": 4}
    assert second == same | {"event": "export", "step": 1, "path": str(tmp_path)}
    assert path.read_bytes().count(b"\n") == 2


@pytest.mark.parametrize(
    ("event", "fields"), [("stepp", {}), ("step", {"stepp": 1}), ("checkpoint", {"time/x": 1})]
)
def test_nothing_is_written_that_is_not_declared(tmp_path, event, fields):
    with EventWriter(tmp_path / "a.jsonl", "actor", 0) as events:
        events.emit("step", step=1, **{"loss/of_a_users_own": 2.0})
        with pytest.raises(ValueError, match=f"does not declare {event}: {', '.join(fields)}"):
            events.emit(event, **fields)
    assert (tmp_path / "a.jsonl").read_bytes().count(b"\n") == 1


def test_half_a_line_of_a_killed_attempt_costs_that_line_only(tmp_path):
    path = tmp_path / "a.jsonl"
    with EventWriter(path, "actor", 0) as events:
        events.emit("start")
        events.emit("step", step=1)
    path.write_bytes(path.read_bytes()[:-10])
    assert [e["event"] for e in read_events(tmp_path)] == ["start"]
    with EventWriter(path, "actor", 0) as events:
        events.emit("resume", step=0)
        events.emit("end")
    assert [e["event"] for e in read_events(tmp_path)] == ["start", "resume", "end"]


def test_a_step_trained_again_counts_once_with_its_newest_values(run_dir):
    done = history.steps(read_events(run_dir / "events"))
    assert [(e["step"], e["reward/mean"]) for e in done] == [(1, 0.25), (2, 0.5), (3, 0.75)]
    losses = [event("heldout", n, step=2, loss=float(n), num_tokens=1) for n in (1, 2)]
    assert [e["loss"] for e in history.heldout_losses(losses)] == [2.0]


def test_steps_behind_the_one_that_was_resumed_from_count_once_they_are_trained_again(run_dir):
    write(run_dir, [event("resume", 7.0, step=1)])
    assert [e["step"] for e in history.steps(read_events(run_dir / "events"))] == [1]
    write(run_dir, [step(2, 8.0, 0.125)])
    done = history.steps(read_events(run_dir / "events"))
    assert [(e["step"], e["reward/mean"]) for e in done] == [(1, 0.25), (2, 0.125)]


def test_held_out_scores_add_up_over_ranks_and_a_repetition_replaces(run_dir):
    write(run_dir, [evaluation("after", 3, 0, 80.0, 100, 8.0)])
    points = history.heldout(read_events(run_dir / "events"))
    assert [(p.when, p.version, p.reward) for p in points] == [
        ("before", 0, 0.3),
        ("after", 3, 0.8),
    ]


def test_a_score_is_that_of_the_whole_set_or_there_is_none_yet():
    half = evaluation("after", 9, 0, 12.0, 16, tasks=2)
    whole = [evaluation("before", 0, rank, 4.0, 8, tasks=2) for rank in (0, 1)]
    assert [(p.when, p.reward) for p in history.heldout([*whole, half])] == [("before", 0.5)]
    other = evaluation("after", 9, 1, 0.0, 8, tasks=2)
    assert [p.reward for p in history.heldout([*whole, half, other])] == [0.5, 0.5]
    drawn = curve.drawn_of([*whole, half])
    assert [p.when for p in history.heldout(drawn)] == ["before"], "a picture, too"


def test_an_evaluation_that_other_tasks_began_is_of_those_who_completed_it():
    half = evaluation("after", 9, 1, 8.0, 8, tasks=2)
    whole = evaluation("after", 9, 0, 4.0, 16, tasks=1)
    [after] = history.heldout([half, whole])
    assert (after.reward, after.num_samples) == (0.25, 16)
    points = [p for p in Points().take([half, whole, half]) if isinstance(p, Point)]
    assert [(p.tag, p.step, p.value) for p in points] == [("eval/heldout/reward", 9, 0.25)]


def timed(number, time, seconds, tokens=1, eta_s=1.0, pid=7):
    return step(number, time, 0.0, eta_s=eta_s, num_tokens=tokens, pid=pid) | {"time/step": seconds}


def test_a_pause_between_two_starts_does_not_count_as_pace():
    first = timed(1, 100.0, 90.0, 500, eta_s=None)
    assert history.seconds_per_step([first]) is None
    before = [first, timed(2, 104.0, 4.0, 60), timed(3, 106.0, 2.0, 60)]
    assert history.seconds_per_step(before) == 3.0
    after = [timed(4, 3806.0, 30.0, 60, eta_s=None), timed(5, 3809.0, 3.0, 60)]
    assert history.seconds_per_step(before + after) == 3.0
    assert history.seconds_per_step([]) is None


def test_the_speed_is_the_tokens_by_the_seconds_and_no_mean_of_rates():
    first = timed(1, 100.0, 50.0, 500, eta_s=None)
    assert history.tokens_per_s([first]) == 10.0  # there is nothing better
    done = [first, timed(2, 101.0, 1.0, 1000), timed(3, 110.0, 9.0, 1000)]
    assert history.tokens_per_s(done) == 200.0  # and not (1000 + 111) / 2
    assert history.tokens_per_s([]) is None
    later = [timed(n, 0.0, 2.0, 10) for n in range(4, 24)]
    assert history.tokens_per_s(done + later) == 5.0  # of the newest 20


def test_the_time_left_is_that_of_the_steps_left_at_the_pace_of_the_newest():
    meter = PaceMeter()
    assert meter.end_step(100.0, 15) is None  # the first step is not like the others
    assert meter.end_step(3.0, 14) == 14 * 3.0
    assert meter.end_step(6.0, 13) == 13 * 4.5
    for _ in range(20):
        left = meter.end_step(2.0, 7)
    assert left == 7 * 2.0


def test_the_parts_of_a_step_are_the_step(monkeypatch):
    clock = iter([0.0, 1.0, 3.0, 7.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    timers = Timers()
    with timers("wait"):
        pass
    spent = {"num_tokens": 5, "time/update": 4.5} | timers.seconds
    assert account(timers.elapsed, spent) == {"time/other": 0.5, "time/step": 7.0}
    # A GPU's clock and the host's differ a little.
    assert account(1.0, {"time/update": 1.001}) == {"time/other": 0.0, "time/step": 1.0}


def test_who_looks_at_a_run_reads_no_more_of_what_comes_all_the_time(tmp_path, monkeypatch):
    monkeypatch.setattr(events, "_NEWEST_BYTES", 2000)
    parse, read = events.parse, []
    monkeypatch.setattr(events, "parse", lambda data: read.append(len(data)) or parse(data))
    folder, numbers = RunPaths(tmp_path).events_folder, []
    for last in (100, 1000):
        for kind in FREQUENT:
            write(tmp_path, [event(kind, n, "rollout", id="e") for n in range(last)])
        write(tmp_path, [event("load", last, "rollout", id="e"), step(last, last + 0.5, 0.5)])
        read.clear()
        found = events_of_state(folder)
        numbers.append(sum(read))
        assert {each["event"] for each in found} == {"load", "step"} and found[-1]["step"] == last
        assert [each["time"] for each in history.loads(found)][-1] == last
        assert read_events(folder, but=FREQUENT) == [e for e in found if e["event"] == "step"]
        assert {each["event"] for each in read_events(folder)} == {*FREQUENT, "step"}
    assert numbers[1] - numbers[0] < 1000


def test_a_smoothed_curve_stays_with_a_loss_that_falls_and_is_calm_where_it_only_trembles():  # U7
    falls = [4 * math.exp(-step / 3) + 1.5 for step in range(60)]
    noise = [0.05 * (-1) ** step for step in range(60)]
    there = [a + b for a, b in zip(falls, noise, strict=True)]
    smoothed = curve.smooth(there)
    assert max(abs(a - b) for a, b in zip(smoothed, falls, strict=True)) < 0.2
    assert max(abs(a - b) for a, b in zip(smoothed[20:], falls[20:], strict=True)) < 0.025
    drop = curve.smooth([5.0] * 10 + [1.5] * 50)
    assert drop == pytest.approx([5.0] * 10 + [1.5] * 50, abs=0.01)
    assert curve.smooth(there[::-1]) == pytest.approx(smoothed[::-1]), "past and future are alike"


def drawn_by(monkeypatch, plot, run_dir):
    """The figure that is drawn of a run."""
    drawn = []
    monkeypatch.setattr(curve.picture, "save", lambda figure, path: drawn.append(figure))
    plot(run_dir)
    return drawn[0]


def names_in(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_every_held_out_set_is_drawn_and_named_and_none_that_there_is_not(
    tmp_path, monkeypatch
):  # U7, U10
    sets = {f"set-{n}": [0.575 - n / 20, 0.1 + n / 20] for n in range(9)}
    evaluated = [
        event(
            "eval", 10 + number, "rollout", name=name, headline=name == "set-0", when="during",
            number=number, version=number, version_max=number, correct=100 * values[number],
            num_samples=100,
        )
        for name, values in sets.items() for number in (0, 1)
    ]  # fmt: skip
    write(tmp_path, [*(step(n, n, 0.5) for n in (1, 2, 3)), *evaluated])
    upper = drawn_by(monkeypatch, curve.plot, tmp_path).axes[0]
    lines = {line.get_label(): line for line in upper.get_lines()}
    assert {name for name in lines if name.startswith("held-out")} == {
        f"held-out: {name}" for name in sets
    }
    for name, values in sets.items():
        assert lines[f"held-out: {name}"].get_ydata() == pytest.approx(values)
    assert len({(line.get_color(), line.get_marker()) for line in lines.values()}) >= 10
    assert names_in(upper) == list(lines)


@pytest.mark.parametrize("plot", [curve.plot, curve.plot_loss])
def test_a_run_without_a_held_out_set_names_none(tmp_path, monkeypatch, plot):  # U7
    write(tmp_path, [step(n, n, 0.5) | {"loss": 1.0} for n in (1, 2, 3)])
    named = names_in(drawn_by(monkeypatch, plot, tmp_path).axes[0])
    assert named == ["training, per step", "training, smoothed"]


def test_a_stage_entered_twice_adds_up_and_one_that_failed_counts(monkeypatch):
    clock = iter([0.0, 0.0, 1.0, 5.0, 7.0, 7.0, 11.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    timers = Timers()
    for _ in range(2):
        with timers("wait"):
            pass
    with pytest.raises(KeyError), timers("train"):
        raise KeyError
    assert timers.seconds == {"time/wait": 3.0, "time/train": 4.0}
    assert str(timers) == "wait 3.0 train 4.0"


NAN, INF = float("nan"), float("inf")


def strict(text):
    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_a_figure_that_is_not_finite_is_null_and_named(tmp_path):
    path = tmp_path / "events" / "actor-0.jsonl"
    with EventWriter(path, "actor", 0) as events:
        events.emit(
            "step", step=3, loss=NAN, grad_norm=np.float32(INF), lr=0.5,
            num_tokens=[["a", 1.0], ["b", -INF]], num_documents="NaN",
        )  # fmt: skip
        events.emit("end")
    first, second = map(strict, path.read_text().splitlines())
    assert (first["step"], first["loss"], first["grad_norm"], first["lr"]) == (3, None, None, 0.5)
    assert (first["num_tokens"], first["num_documents"]) == ([["a", 1.0], ["b", None]], "NaN")
    wrong = {"loss": "NaN", "grad_norm": "Infinity", "num_tokens": "-Infinity"}
    assert first["not_finite"] == wrong
    assert "not_finite" not in second


@pytest.mark.parametrize("kind", ["rl", "sft"])
def test_a_run_with_such_figures_has_its_summary_its_picture_and_its_tensorboard(tmp_path, kind):
    paths = RunPaths(tmp_path / "run")
    sft = {"train": "t", "batch_size": 1, "num_steps": 9}
    tables = {"prompts": None, "schedule": None, "sft": sft} if kind == "sft" else {}
    paths.root.mkdir()
    paths.config.write_text(job_of(**tables).model_dump_json())
    with EventWriter(paths.events("actor", 0), "actor", 0) as events:
        events.emit("step", step=1, loss=1.0, **{"reward/mean": 0.25})
        events.emit("step", step=2, loss=NAN, grad_norm=INF, **{"reward/mean": NAN})
        events.emit("heldout", step=2, loss=NAN, num_tokens=5)
    with EventWriter(paths.events("rollout", 0), "rollout", 0) as events:
        events.emit(
            "eval", name="h", headline=True, when="before", number=0, version=0, version_max=0,
            correct=NAN, num_samples=4,
        )  # fmt: skip
        events.emit("shard", num_trajectories=2, **{"reward/mean": NAN})
    found = summary.write(paths.root)
    assert strict(paths.summary.read_text()) == found
    assert found["steps_done"] == 2
    finish.complete(paths, job_file.read_resolved(paths.config), failed=False)
    drawn = EventAccumulator(str(paths.tensorboard)).Reload()
    losses = [scalar.value for scalar in drawn.Scalars("loss/total")]
    assert losses[0] == 1.0 and math.isnan(losses[1])
    assert [scalar.value for scalar in drawn.Scalars("trainer/grad_norm")] == [INF]
    (curve.plot_loss if kind == "sft" else curve.plot)(paths.root)
