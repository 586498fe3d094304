"""Events, figures and curves of a run; files are strict JSON, as other readers know no NaN."""

import json
import logging
import math
import os
import socket

import board_runs
import numpy as np
import pytest
from board_runs import event, step
from job_trees import job_of
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from relax_hpc.bus.frames import encode
from relax_hpc.config import job_file
from relax_hpc.roles.rollout.heldout import Due, ScoreBoard, TaskScore
from relax_hpc.runs import summary
from relax_hpc.runs.boards import finish
from relax_hpc.runtime.files.records import finite, write_json
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.runtime.telemetry import curve, events, history, logs, progress
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
    ("event", "fields"),
    [
        ("stepp", {}),
        ("step", {"stepp": 1}),
        ("step", {"losses/x": 1}),
        ("checkpoint", {"time/x": 1}),
    ],
)
def test_nothing_is_written_that_is_not_declared(tmp_path, event, fields):
    with EventWriter(tmp_path / "a.jsonl", "actor", 0) as events:
        events.emit("step", step=1, **{"loss/of_a_users_own": 2.0})
        with pytest.raises(ValueError, match=f"does not declare {event}: {', '.join(fields)}"):
            events.emit(event, **fields)
    assert (tmp_path / "a.jsonl").read_bytes().count(b"\n") == 1


def test_an_event_is_readable_before_its_writer_closes(tmp_path):
    with EventWriter(tmp_path / "a.jsonl", "actor", 0) as events:
        events.emit("start")
        assert [e["event"] for e in read_events(tmp_path)] == ["start"]


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


def test_garbage_between_lines_is_left_out(tmp_path):
    good = json.dumps(event("end", 1.0)).encode()
    (tmp_path / "a.jsonl").write_bytes(b'[1]\n{"time": 1}\n\xff\x00\n' + good + b"\n7\n")
    assert [e["event"] for e in read_events(tmp_path)] == ["end"]


def test_events_of_all_ranks_come_in_order_of_time(tmp_path):
    write(tmp_path, [event("b", 2.0), event("d", 4.0), event("c", 3.0, "rollout", 1),
                     event("a", 1.0, "rollout", 0)])  # fmt: skip
    assert "".join(e["event"] for e in read_events(tmp_path / "events")) == "abcd"


def test_a_step_trained_again_counts_once_with_its_newest_values(run_dir):
    done = history.steps(read_events(run_dir / "events"))
    assert [(e["step"], e["reward/mean"]) for e in done] == [(1, 0.25), (2, 0.5), (3, 0.75)]


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


def test_an_evaluation_of_no_prompts_is_no_point():
    assert history.heldout([evaluation("before", 0, 1, 0.0, 0)]) == []


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
    """Also where both have the same process id, as in a container that is started again."""
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
    """Of loads the newest: a run of weeks has millions of them, all its steps are a few."""
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


def test_a_run_without_steps_can_be_drawn(tmp_path):
    assert curve.plot(tmp_path).stat().st_size > 5_000


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


def test_smoothing_of_equal_values_and_of_less_than_three_changes_nothing():  # U7
    assert curve.smooth([0.4] * 5) == pytest.approx([0.4] * 5)
    assert curve.smooth([1.0, 0.0]) == [1.0, 0.0] and curve.smooth([]) == []


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


FIELDS = {
    "step": 12, "reward/mean": 0.5341, "staleness/mean": 1.0, "staleness/max": 1, "loss": -0.0123,
    "tokens_per_s": 5123.0, "time/step": 1.3, "time/wait": 0.1, "time/train": 0.9,
    "time/publish": 0.2,
}  # fmt: skip


def test_a_step_is_one_readable_line():
    assert progress.step_line(FIELDS, 200, 250.0) == (
        "step  12/200 | reward 0.534 | staleness 1.0 (max 1) | loss -0.012 | trained 5.1k tok/s"
        " | 1.3 s (wait 0.1 train 0.9 publish 0.2) | ETA 4 min"
    )


def test_a_step_without_a_total_adds_its_stages_up_and_leaves_out_what_is_absent():
    fields = {"step": 3, "time/update": 1.0, "time/wait": 0.25}
    assert progress.step_line(fields, 9, None) == "step 3/9 | 1.2 s (wait 0.2 update 1.0)"
    fields = {"step": 3, "train/mfu": 0.434, "memory/peak_gib": 70.8}
    assert progress.step_line(fields, 9, None) == "step 3/9 | MFU 43% | 71 GiB"
    for skipped, said in ((0, ""), (1, " | 1 group skipped"), (2, " | 2 groups skipped")):
        fields = {"step": 3, "groups/skipped": skipped}
        assert progress.step_line(fields, 9, None) == f"step 3/9{said}"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (99, "99 s"), (100, "2 min"), (5969, "99 min"), (5970, "1.7 h"), (86400, "24.0 h"),
     (200_000, "2.3 d")],
)  # fmt: skip
def test_durations_come_in_the_unit_a_person_would_use(seconds, text):
    assert progress.duration(seconds) == text


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


@pytest.fixture
def package_log():
    log = logging.getLogger("relax_hpc")
    before = log.handlers[:], log.level, log.propagate
    yield log
    for handler in log.handlers:
        handler.close()
    log.handlers[:], log.level, log.propagate = before


@pytest.mark.parametrize(("rank", "on_stderr"), [(0, ["hello", "beware"]), (3, ["beware"])])
def test_rank_0_tells_the_story_and_the_others_only_warn(
    tmp_path, capsys, package_log, rank, on_stderr
):
    for _ in range(2):  # set up twice, logged once
        logs.setup("actor", rank, tmp_path / "logs" / "a.log")
    room = logging.getLogger("relax_hpc.roles.actor.loop")
    room.info("hello")
    room.warning("beware")
    seen = capsys.readouterr().err.splitlines()
    assert [line.rsplit(" ", 1)[1] for line in seen] == on_stderr
    assert (
        f"{socket.gethostname()} actor-{rank} WARNING relax_hpc.roles.actor.loop: beware"
        in seen[-1]
    )
    filed = (tmp_path / "logs" / "a.log").read_text().splitlines()
    assert [line.rsplit(" ", 1)[1] for line in filed] == ["hello", "beware"]


def test_what_a_rank_says_for_all_of_them_is_part_of_the_story(tmp_path, capsys, package_log):
    logs.setup("rollout", 1, None)
    logging.getLogger("relax_hpc.roles.rollout.loop").info("mine")
    ScoreBoard(RunPaths(tmp_path), 0, 2).add(Due("h", "before", 0), TaskScore(0, 0, 1.0, 4), [])
    ScoreBoard(RunPaths(tmp_path), 1, 2).add(Due("h", "before", 0), TaskScore(0, 0, 3.0, 4), [])
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith("relax_hpc.roles.rollout.heldout: held-out before, policy 0: 0.500 (h)")


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


def test_what_an_older_writer_left_is_read_as_null(tmp_path):
    line = '{"time": 1.0, "event": "step", "step": 1, "loss": NaN}\n'
    (tmp_path / "actor-0.jsonl").write_text(line)
    assert read_events(tmp_path) == [{"time": 1.0, "event": "step", "step": 1, "loss": None}]


@pytest.mark.parametrize("number", [NAN, INF, -INF])
def test_records_hold_no_such_numbers(tmp_path, number):
    for write in (lambda record: write_json(tmp_path / "a.json", record), encode):
        with pytest.raises(ValueError, match="not JSON compliant"):
            write({"value": number})
    assert not (tmp_path / "a.json").exists()
    assert finite({"a": [1, {"b": number}]})[0] == {"a": [1, {"b": None}]}
