"""Events, figures, curves and the summary of a run; files are strict JSON, without a NaN."""

import json
import math
import re

import board_runs
import numpy as np
import pytest
from board_runs import event, step
from job_trees import job_of
from roles.role_fakes import row
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from relax_hpc.bus import layout
from relax_hpc.bus.plan import SkippedGroup
from relax_hpc.bus.producer import Producer
from relax_hpc.bus.sequencer import Sequencer
from relax_hpc.config import job_file
from relax_hpc.roles.training import unlearned
from relax_hpc.runs import summary
from relax_hpc.runs.boards import finish
from relax_hpc.runs.boards.run_board import CHARTS
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.runtime.telemetry import curve, events, history
from relax_hpc.runtime.telemetry.event_table import tag
from relax_hpc.runtime.telemetry.events import FREQUENT, EventWriter, events_of_state, read_events
from relax_hpc.runtime.telemetry.history import Point, Points
from relax_hpc.runtime.telemetry.progress import PaceMeter, account
from relax_hpc.runtime.telemetry.timers import Timers
from relax_hpc.schema import PromptGroup


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
    scores = [("before", 0, 0.3), ("after", 3, 0.8)]
    assert [(p.when, p.version, p.reward) for p in points] == scores


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


def test_the_speed_is_the_tokens_by_the_seconds_and_no_mean_of_rates():
    first = timed(1, 100.0, 50.0, 500, eta_s=None)
    assert history.tokens_per_s([first]) == 10.0  # there is nothing better
    done = [first, timed(2, 101.0, 1.0, 1000), timed(3, 110.0, 9.0, 1000)]
    assert history.tokens_per_s(done) == 200.0  # and not (1000 + 111) / 2
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
        evaluation(
            "during", n, 0, 100 * values[n], 100, 10.0 + n, n, name=name, headline=name == "set-0"
        )
        | {"version_max": 2 * n, "num_truncated": 25 * n}
        for name, values in sets.items()
        for n in (0, 1)
    ]
    steps = [step(n, n, 0.5) | {"response/truncated": n / 8} for n in (1, 2, 3)]
    write(tmp_path, [*steps, *evaluated])
    upper, cut, _ = drawn_by(monkeypatch, curve.plot, tmp_path).axes
    assert [list(line.get_ydata()) for line in cut.get_lines()] == [[0.125, 0.25, 0.375]] + [
        [0.0, 0.25]
    ] * len(sets)
    bars = [bar.get_segments()[0][:, 0].tolist() for bar in upper.collections]
    assert bars == [[1.0, 2.0]] * len(sets), "over the policies of what is not of one"
    lines = {line.get_label(): line for line in upper.get_lines()}
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
    assert (first["loss"], first["grad_norm"], first["lr"]) == (None, None, 0.5)
    assert (first["num_tokens"], first["num_documents"]) == ([["a", 1.0], ["b", None]], "NaN")
    wrong = {"loss": "NaN", "grad_norm": "Infinity", "num_tokens": "-Infinity"}
    assert first["not_finite"] == wrong and "not_finite" not in second


def test_a_run_with_such_figures_has_its_summary_its_pictures_and_its_tensorboard(paths):
    emit(
        paths, "actor",
        ("step", {"step": 1, "loss": 1.0, "reward/mean": 0.25}),
        ("step", {"step": 2, "loss": NAN, "grad_norm": INF, "reward/mean": NAN}),
        ("heldout", {"step": 2, "loss": NAN, "num_tokens": 5}),
    )  # fmt: skip
    score = HELDOUT | {"when": "before", "number": 0, "version": 0, "correct": NAN}
    emit(paths, "rollout", ("eval", score), ("shard", {"num_trajectories": 2, "reward/mean": NAN}))
    found = summary.write(paths.root)
    assert strict(paths.summary.read_text()) == found
    assert found["steps_done"] == 2
    finish.complete(paths, job_file.read_resolved(paths.config), failed=False)
    drawn = EventAccumulator(str(paths.tensorboard)).Reload()
    losses = [scalar.value for scalar in drawn.Scalars("loss/total")]
    assert losses[0] == 1.0 and math.isnan(losses[1])
    assert [scalar.value for scalar in drawn.Scalars("trainer/grad_norm")] == [INF]
    curve.plot(paths.root)
    curve.plot_loss(paths.root)


def group(guid):
    return PromptGroup(guid, [row(guid, sibling, prompt=1, response=2) for sibling in range(2)])


@pytest.fixture
def paths(tmp_path):
    """A run of 10 steps of one prompt group, nothing done yet."""
    paths = RunPaths(tmp_path / "run")
    schedule = {"num_steps": 10, "prompts_per_step": 1}
    job = job_of(schedule=schedule, rollout__samples_per_prompt=2)
    paths.root.mkdir()
    paths.config.write_text(job.model_dump_json())
    return paths


def emit(paths, role, *events, rank=0):
    with EventWriter(paths.events(role, rank), role, rank) as writer:
        for name, fields in events:
            writer.emit(name, **fields)


def test_trajectories_are_counted_from_the_bus_and_the_steps(paths):
    layout.create(paths.bus, ["rollout-0"], {})
    with Producer(paths.bus, "rollout-0", {}) as producer:
        producer.put([group(0), group(1), group(2)])
    with Sequencer(paths.bus, prompts_per_step=1, position=None) as sequencer:
        for step in (1, 2):
            sequencer.next_portion(step, timeout_s=5)
    emit(paths, "actor", ("step", {"step": 1, "num_trajectories": 2}))
    found = summary.summarize(paths.root)
    counts = found["trajectories"]
    assert (counts["committed"], counts["trained"], counts["trained_twice"]) == (6, 2, 0)
    assert set(counts["dropped"].values()) == {0}
    assert found["max_staleness_seen"] == 1  # step 2 trains on policy 0; one step is its due lag


def test_what_ends_have_cost_is_counted_and_shown(paths):
    emit(
        paths, "actor",
        *[("step", {"step": step, "num_tokens": 10 * step}) for step in (1, 2, 3, 2, 3, 4, 3)],
    )  # fmt: skip
    emit(
        paths, "rollout",
        ("continued", {"num_groups": 2, "num_tokens": 700, "num_dropped": 0}),
        ("unfinished", {"num_groups": 1, "num_tokens": 58, "num_lost": 3}),
        ("continued", {"num_groups": 1, "num_tokens": 50, "num_dropped": 8, "num_damaged": 9}),
    )  # fmt: skip
    assert summary.summarize(paths.root)["redone"] == {
        "steps": 3, "tokens_trained_again": 20 + 30 + 30,
        "tokens_continued": 750, "tokens_sampled_again": 8, "tokens_lost": 3 + 9,
    }  # fmt: skip


HELDOUT = {"name": "h", "headline": True, "num_samples": 8, "version_max": 0}


def test_events_say_how_far_a_run_is(paths):
    emit(
        paths, "rollout",
        ("eval", HELDOUT | {"when": "before", "number": 0, "version": 0, "correct": 2.0}),
        ("eval", HELDOUT | {"when": "during", "number": 1, "version": 1, "version_max": 3,
                            "correct": 4.0, "num_masked": 2, "num_truncated": 1}),
        ("eval", HELDOUT | {"when": "before", "number": 0, "version": 0, "correct": 8.0}
         | {"name": "other", "headline": False}),
    )  # fmt: skip
    emit(
        paths, "actor",
        ("publish", {"version": 0, "members": ["a", "b"]}),
        ("step", {"step": 1, "reward/mean": 0.25, "num_tokens": 30, "time/step": 3.0,
                  "eta_s": None, "staleness/max": 3}),
        ("publish", {"version": 1, "members": ["a"], "fenced": ["b"]}),
        ("step", {"step": 2, "reward/mean": 0.5, "num_tokens": 40, "time/step": 2.0,
                  "eta_s": 16.0, "staleness/max": 1, "response/truncated": 0.125}),
    )  # fmt: skip
    found = summary.summarize(paths.root)
    assert (found["steps_done"], found["last_reward"], found["tokens_per_s"]) == (2, 0.5, 20.0)
    assert (found["heldout_before"], found["heldout_after"]) == (0.25, None)
    assert found["heldout_newest"] == {"step": 1, "value": 0.5}
    assert found["heldout_policies"] == {"before": [0, 0], "newest": [1, 3]}
    assert found["heldout_truncated"] == {"before": None, "newest": 0.1}
    assert found["last_truncated"] == 0.125
    assert found["max_staleness_seen"] == 3
    assert found["weight_versions"] == {"trainer": 1, "a": 1, "b": 0}
    assert found["checksums_equal"] is None
    more = HELDOUT | {"when": "during", "number": 2, "version": 2, "correct": 6.0}
    last = more | {"when": "after", "number": 0, "version": 10}
    emit(paths, "rollout", ("eval", more), ("eval", last))
    found = summary.summarize(paths.root)
    assert found["heldout_newest"] == {"step": 10, "value": 0.75}
    assert (found["heldout_before"], found["heldout_after"]) == (0.25, 0.75)
    sets = {name: (each["before"], each["after"]) for name, each in found["heldout_sets"].items()}
    assert sets == {"h": (0.25, 0.75), "other": (1.0, None)}


def test_what_was_scored_is_told_by_who_did(paths):
    told = {"num_shards": 1, "num_tokens": 9, "first_guid": 0}
    emit(paths, "critic", *[("scored", told | {"num_trajectories": n}) for n in (2, 4)])
    emit(paths, "reference", ("scored", told | {"num_trajectories": 2}))
    assert summary.summarize(paths.root)["scored"] == {"critic": 6, "reference": 2}


def test_the_last_score_of_a_run_that_was_given_more_steps_is_that_of_its_new_end(paths):
    num_steps = job_file.read_resolved(paths.config).num_steps
    last = HELDOUT | {"when": "after", "number": num_steps - 1, "version": num_steps - 1,
                      "correct": 4.0}  # fmt: skip
    emit(paths, "rollout", ("eval", last))
    found = summary.summarize(paths.root)
    assert found["heldout_after"] is None and found["heldout_newest"]["step"] == num_steps - 1
    emit(paths, "rollout", ("eval", last | {"number": num_steps, "correct": 6.0}))
    assert summary.summarize(paths.root)["heldout_after"] == 0.75


def test_the_time_left_is_the_pace_times_the_steps_left(paths):
    for n, seconds, eta_s in ((1, 50.0, None), (2, 2.0, 16.0), (3, 4.0, 21.0)):
        emit(paths, "actor", ("step", {"step": n, "time/step": seconds, "eta_s": eta_s}))
    assert summary.summarize(paths.root)["eta_s"] == 21.0  # 7 steps of 3 s


@pytest.mark.parametrize(
    ("members", "told", "equal"),
    [
        ({"a": "x", "b": "x"}, {}, True),
        ({"a": "x", "b": "y"}, {}, False),
        ({"a": "own way to digest"}, {"equal": True}, True),
        ({"a": "x"}, {"equal": False}, False),
    ],
)
def test_the_last_comparison_of_weights_counts(paths, members, told, equal):
    last = {"version": 2, "trainer": "x", "members": members} | told
    emit(
        paths, "actor",
        ("verify", {"version": 1, "trainer": "x", "members": {"a": "z" if equal else "x"}}),
        ("verify", last),
    )  # fmt: skip
    assert summary.summarize(paths.root)["checksums_equal"] is equal


def test_every_engine_counts_that_loads_by_itself_and_a_late_one_does_not_turn_the_trainer_back(
    paths,
):
    def loaded(version, member, equal):
        told = {"version": version, "trainer": "x", "members": {member: "x" if equal else "y"}}
        return ("loaded", {"version": version, "members": [member]}), ("verify", told)

    emit(
        paths, "actor",
        ("publish", {"version": 1, "members": [], "loading": ["fast", "slow"]}),
        *loaded(1, "fast", True),
        ("publish", {"version": 2, "members": [], "loading": ["fast"]}),
        *loaded(2, "fast", True),
        *loaded(1, "slow", False),
    )  # fmt: skip
    found = summary.summarize(paths.root)
    assert found["weight_versions"] == {"trainer": 2, "fast": 2, "slow": 1}
    assert found["checksums_equal"] is False
    emit(paths, "actor", *loaded(2, "slow", True))
    assert summary.summarize(paths.root)["checksums_equal"] is True


def job(**settings):
    """10 groups a step; 10.5 % of what the loss sees is 10.5 % of the trained tokens."""
    tree = {"schedule__prompts_per_step": 10, "algorithm__preset": "grpo", "run_root": "/r"}
    return job_of(**tree | {"rollout__max_new_tokens": 512} | settings)


def groups(teaching, solved, *skipped):
    names = ("skipped", "skipped_solved", "skipped_retired")
    return {"groups/teaching": teaching, "groups/solved": solved} | {
        f"groups/{name}": number for name, number in zip(names, skipped, strict=False)
    }


@pytest.mark.parametrize(
    ("fields", "preset", "expected"),
    [
        (groups(0.6, 0.3), "grpo", {"no_spread": 0.4, "all_solved": 0.3}),
        # 12 were skipped, of which 2 were not sampled; 8 - 2 of them and no other are solved.
        (groups(1.0, 0.5, 12, 8, 2), "async", {"no_spread": 10 / 20, "all_solved": 6 / 20}),
        (groups(0.6, 0.3), "reinforce_pp", {}),  # it learns from every group
        ({"loss/clip_fraction": 0.25}, "grpo", {"clipped": 0.25}),
        ({"loss/clip_fraction": 0.25}, "cispo", {}),  # it still teaches
        ({"response/truncated": 0.5, "reward/errors": None}, "grpo", {"cut_off": 0.5}),
    ],
)
def test_shares_of_a_step_are_of_the_groups_that_were_sampled_for_it(fields, preset, expected):
    found = unlearned.shares(fields, job(algorithm__preset=preset))
    assert found == pytest.approx(expected)


def told(*steps, **settings):
    return [each.line for each in unlearned.find(steps, job(**settings))]


MASK, DROP = {"algorithm__groups__truncated": "mask"}, {"schedule__over_age": "drop"}
DISTILL = {"algorithm__preset": "distill", "teachers": {"t": {"path": "m"}}}
CUT = "of the responses are cut off and"
ENDS = "rollout.max_new_tokens = 512 ends them; algorithm.groups.truncated ="
NONE = "solved by all siblings, 20 % by none"
SAID = [
    ({"response/truncated": 0.23}, MASK, f'not learned from: 23 % {CUT} masked: {ENDS} "mask"'),
    ({"response/truncated": 0.23}, {}, f'cut off: 23 % {CUT} kept: {ENDS} "keep" learns'),
    ({"response/truncated": 0.1}, MASK, None),
    (groups(0.5, 0.3), {}, f"not learned from: 50 % of the groups have no spread: 30 % {NONE};"),
    (groups(0.9, 0.1), {}, None),
    ({"reward/errors": 0.11}, {}, "rewards fail: 11 % of the responses have a reward that failed"),
    ({"reward/errors": 0.11}, {"reward__on_error": "mask"}, "not learned from: 11 % of the resp"),
    ({"staleness/over_age": 0.2}, DROP, "not learned from: 20 % of the groups are dropped, since"),
    ({"loss/masked_fraction": 0.11}, {}, 'not learned from: 11 % of the tokens are left out by '
     'the loss: algorithm.loss.name = "ppo_clip"'),
    ({"loss/importance_rejected": 0.11}, {"algorithm__correction": {"name": "opsm", "delta": 0.1}},
     "not learned from: 11 % of the tokens are left out by the correction"),
    (groups(0.0, 0.0) | {"reward/mean": -1.0}, {}, "not learned from: all responses, since nobody "
     "solves the task: each response of the newest step has the reward -1; reward.name = "
     '"boxed_number" does not know what is right, or prompts.train is too hard; read some: '
     "relax-hpc peek /r/run"),
    (groups(0.0, 1.0) | {"reward/mean": 1.0}, {}, "not learned from: all responses, since everyb"),
    (groups(0.0, 1.0) | {"reward/mean": 1.0}, DISTILL, None),
    (groups(0.1, 0.0) | {"reward/mean": 0.5}, {}, "not learned from: 90 % of the groups have no"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "settings", "said"), SAID)
def test_a_share_above_a_tenth_is_said_with_the_key_that_decides(fields, settings, said):
    lines = told(fields, **settings)
    assert len(lines) == (said is not None) and all(line.startswith(said) for line in lines)


def test_each_share_is_said_by_itself_and_a_task_that_nobody_solves_in_place_of_its_groups():
    cut = {"response/truncated": 0.2}
    [_, second] = told(cut | groups(0.5, 0.3))
    assert "50 % of the groups" in second
    [first, _] = told(cut | groups(0.0, 0.0) | {"reward/mean": 0.0})
    assert "nobody" in first


def test_a_share_that_has_doubled_and_risen_by_five_points_within_twenty_steps_is_said():
    def cut(*parts):
        return told(*[{"response/truncated": part} for part in parts])

    assert cut(*[0.04] * 15, *[0.09] * 5)[0].startswith(
        f"cut off: 9 % {CUT} kept (rising from 4 %)"
    )
    assert not cut(*[0.04] * 15, *[0.085] * 5), "doubled, and risen by less"
    assert not cut(*[0.045] * 15, *[0.085] * 5) and not cut(*[0.04] * 5, *[0.09] * 20)
    assert "rising from 4 %" in cut(*[0.04] * 18, *[0.23] * 2)[0], "11.6 % on average of five"
    assert not cut(0.04, 0.04, 0.04, 0.04, 0.23), "7.8 %, and nothing to compare with"


def test_what_is_not_learned_from_is_said_once_until_it_has_been_away_for_twenty_steps():
    teller, parts = unlearned.Teller(job()), [0.0, *[0.2] * 30, *[0.0] * 30, *[0.2] * 30]
    noted = [{"step": n, "response/truncated": part} for n, part in enumerate(parts)]
    assert [step["step"] for step in noted if teller.note(step)] == [2, 62]


def test_a_first_batch_that_is_not_full_says_whether_nobody_solves_what_was_skipped_for_it():
    def skipped(number, **kind):
        made = {"solved": False, "reward": 0.0} | kind
        return [SkippedGroup(n, "u", 8, 1, n, **made) for n in range(number)]

    teller = unlearned.Teller(job(**MASK))
    assert not teller.note_skipped(1, [*skipped(19), *skipped(9, solved=True, retired=True)])
    assert not teller.note_skipped(1, [*skipped(19), *skipped(1, solved=True)])
    [line] = teller.note_skipped(1, skipped(20))
    assert line.startswith("not learned from: 20 prompt groups, skipped for step 1 so far: nobody ")
    assert not teller.note_skipped(1, skipped(21)), "once"
    assert "everybody solves them; " in teller.note_skipped(1, skipped(20, solved=True))[0]
    assert "all of the responses are cut" in teller.note_skipped(1, skipped(20, truncated=True))[0]


def test_the_summary_has_the_shares_of_the_newest_steps_as_numbers(paths):
    emit(
        paths, "actor", *[("step", {"step": n, "response/truncated": n / 40}) for n in range(1, 8)]
    )
    found = summary.summarize(paths.root)["not_learned_from"]
    assert found["shares"] == {"cut_off": pytest.approx(5 / 40)} and len(found["said"]) == 1


def test_the_chart_of_what_is_not_learned_from_has_a_line_of_each_share():
    fields = (
        "response/truncated", "groups/no_spread", "reward/errors", "staleness/over_age",
        "loss/masked_fraction", "loss/clip_fraction", "loss/importance_rejected",
    )  # fmt: skip
    [chart] = [each for each in CHARTS["The run"] if each.title == "not learned from"]
    lines = re.compile("|".join(chart.tags))
    assert [name for name in fields if not lines.fullmatch(tag("step", name))] == []
    assert not lines.fullmatch(tag("step", "loss/ratio"))
