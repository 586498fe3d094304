import json
import logging
import os
import socket

import numpy as np
import pytest

from relax_hpc.paths import RunPaths
from relax_hpc.roles.rollout.heldout import Board, Due, Share
from relax_hpc.telemetry import curve, events, history, logs, progress
from relax_hpc.telemetry.events import FREQUENT, EventWriter, events_of_state, read_events
from relax_hpc.telemetry.pace import PaceMeter, accounted
from relax_hpc.telemetry.points import Point, Points
from relax_hpc.telemetry.timers import Timers


def event(kind, time, role="actor", rank=0, **fields):
    return {"time": time, "role": role, "rank": rank, "pid": 1, "event": kind} | fields


def step(number, time, reward, **fields):
    ages = {"staleness/mean": 0.5, "staleness/max": 1}
    return event("step", time, step=number, **({"reward/mean": reward} | ages | fields))


def evaluation(when, version, rank, correct, num_samples, time=0.0, number=0, **fields):
    policies = {"version": version, "version_max": version}
    fields = {"name": "heldout", "headline": True} | policies | fields
    return event("eval", time, "rollout", rank, when=when, number=number, correct=correct,
                 num_samples=num_samples, **fields)  # fmt: skip


def write(run_dir, events):
    for record in events:
        path = RunPaths(run_dir).events(record["role"], record["rank"])
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(json.dumps(record) + "\n")


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


def test_a_run_without_events_has_none(tmp_path):
    assert read_events(tmp_path / "none") == []


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
    assert accounted(timers.elapsed, spent) == {"time/other": 0.5, "time/step": 7.0}
    # A GPU's clock and the host's differ a little.
    assert accounted(1.0, {"time/update": 1.001}) == {"time/other": 0.0, "time/step": 1.0}


def test_the_curve_is_a_picture_that_changes_with_the_run(run_dir):
    path = curve.plot(run_dir)
    assert path == RunPaths(run_dir).reward_curve
    before = path.read_bytes()
    assert before.startswith(b"\x89PNG")
    assert len(before) > 20_000
    assert curve.plot(run_dir).read_bytes() == before
    write(run_dir, [step(4, 9.0, 0.9)])
    assert curve.plot(run_dir).read_bytes() != before


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


def test_smoothing_starts_at_the_first_value_and_weighs_the_newest_most():
    # After two values the weights are keep and 1, over keep + 1.
    assert curve.smooth([1.0, 0.0, 0.0], keep=0.5) == pytest.approx([1.0, 1 / 3, 1 / 7])
    assert curve.smooth([0.4] * 5, keep=0.9) == pytest.approx([0.4] * 5)


FIELDS = {
    "step": 12, "reward/mean": 0.5341, "staleness/mean": 1.0, "staleness/max": 1, "loss": -0.0123,
    "tokens_per_s": 5123.0, "time/step": 1.3, "time/wait": 0.1, "time/train": 0.9,
    "time/publish": 0.2,
}  # fmt: skip


def test_a_step_is_one_readable_line():
    assert progress.step_line(FIELDS, 200, 250.0) == (
        "step  12/200 | reward 0.534 | staleness 1.0 (max 1) | loss -0.012 | 5.1k tok/s"
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
    Board(RunPaths(tmp_path), 0, 2).add(Due("h", "before", 0), Share(0, 0, 1.0, 4), [])
    Board(RunPaths(tmp_path), 1, 2).add(Due("h", "before", 0), Share(0, 0, 3.0, 4), [])
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith("relax_hpc.roles.rollout.heldout: held-out before, policy 0: 0.500 (h)")
