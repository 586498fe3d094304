import json
import os
import time

import pytest
from board_runs import event, step
from matplotlib.image import imread
from test_telemetry import write

from relax_hpc.runtime import heartbeat
from relax_hpc.runtime.telemetry import history, timeline


def timed(number, end, **spent):
    return step(number, end, 0.5, **{f"time/{name}": value for name, value in spent.items()})


def phases(number, time, *parts, role="actor"):
    fields = {"step": number} if number else {}
    return event("phases", time, role, phases=[list(part) for part in parts], **fields)


def load(id, end, seconds, num_tokens, in_flight, rank=0):
    return event("load", end, "rollout", rank, id=id, seconds=seconds, num_tokens=num_tokens,
                 in_flight=in_flight, version=1, kv_used=0.5)  # fmt: skip


def publish(version, time, members, *parts):
    return event("publish", time, step=version, members=members, phases=[list(p) for p in parts])


@pytest.fixture
def run_dir(tmp_path):
    run = tmp_path / "run"
    write(run, [
        timed(1, 10.0, step=5.0, wait=4.0, publish=1.0),
        phases(1, 10.0, ("wait", 5.0, 4.0), ("publish", 9.0, 1.0)),
        publish(1, 10.0, ["a", "b"], ("gather", 8.0, 1.0), ("pause", 9.1, 0.1),
                ("wire", 9.25, 0.5), ("resume", 9.75, 0.05)),
        timed(2, 15.0, step=5.0, wait=1.0, publish=3.0),
        phases(2, 15.0, ("wait", 14.0, 1.0)),
        timed(2, 20.0, step=10.0, wait=2.0, publish=3.0),  # trained again after a resume
        phases(2, 20.0, ("wait", 10.0, 2.0), ("train", 12.0, 5.0), ("publish", 17.0, 3.0)),
        publish(2, 20.0, ["a"], ("wire", 17.0, 1.5)),
        publish(2, 20.0, [], ("wire", 17.0, 1.5)),
        timed(3, 30.0, step=9.0, wait=6.0, publish=1.0),
        phases(3, 30.0, ("wait", 21.0, 6.0)),
        phases(None, 19.0, ("score", 18.0, 1.0), role="reference"),
        load("a", 12.0, 4.0, 400, 8),  # half of it before step 2
        load("a", 18.0, 6.0, 600, 4),
        load("b", 18.0, 10.0, 1000, 2),
        load("b", 18.0, 5.0, 50, 1, rank=1),
        load("b", 9.0, 5.0, 7777, 1),
    ])  # fmt: skip
    return run


def test_numbers_of_a_timeline_are_those_of_its_steps(run_dir):
    found = timeline.summary(timeline.read(run_dir, first=2, last=2))
    assert (found.first_step, found.last_step, found.seconds_per_step) == (2, 2, 10.0)
    assert found.phases == {"wait": 2.0, "publish": 3.0}
    assert found.engines == 2
    # Of what began before step 2 the part counts that is in it.
    assert found.tokens_per_s == pytest.approx((400 / 2 + 600 + 1000 * 8 / 10 + 50) / 10)
    assert found.in_flight == pytest.approx((8 * 2 + 4 * 6 + 2 * 8 + 1 * 5) / 10)
    assert (found.updates, found.paused_s) == (1, 1.5)
    assert found.paused_share == pytest.approx(0.15)
    whole = timeline.summary(timeline.read(run_dir))
    # Steps of 5, 10 and 9 s with waits of 4, 2 and 6; step 2 was trained once more before.
    assert (whole.seconds_per_step, whole.phases["wait"]) == (8.0, 4.0)
    assert whole.phases["publish"] == pytest.approx((1 + 3 + 1) / 3)
    assert whole.paused_s == pytest.approx((1.5 + 0.7) / 2)
    # From 5 to 30: a stood still for 0.7 and 1.5, b for 0.7 of it.
    assert whole.paused_share == pytest.approx(2.2 / 25)
    assert whole.between_s == pytest.approx(25 - 24)


def test_what_evaluations_took_is_told_by_set_over_all_tasks_and_is_a_row_of_the_picture(run_dir):
    fields = "name", "number", "tasks", "seconds", "num_tokens"
    shares = [  # end and rank; the last but one is after these steps, and the last of an older run
        (16.0, 0, "a", 1, 2, 4.0, 1000), (17.0, 1, "a", 1, 2, 3.0, 500), (24.0, 0, "a", 2, 1, 1.0,
        2500), (27.0, 0, "b", 1, 1, 9.0, 9), (33.0, 0, "b", 2, 1, 2.0, 9), (18.0, 0, "old", 1, 1),
    ]  # fmt: skip
    write(run_dir, [
        event("eval", end, "rollout", rank, when="during", **dict(zip(fields, each, strict=False)))
        for end, rank, *each in shares
    ])  # fmt: skip
    found = timeline.read(run_dir, first=2)
    assert [tuple(phase) for phase in found.phases["held-out"]] == [
        ("a", 12.0, 5.0), ("a", 23.0, 1.0), ("b", 18.0, 9.0)
    ]  # fmt: skip
    said = timeline.text(timeline.summary(found)).splitlines()
    assert "held-out a: 2 evaluations, 3.0 s and 2.0k tokens each" in said
    assert "held-out b: 1 evaluation, 9.0 s and 9 tokens each" in said


def test_what_only_some_steps_do_is_in_the_table(tmp_path):
    run = tmp_path / "run"
    write(run, [
        timed(1, 12.0, step=12.0, wait=11.0, other=1.0, save=0.0),
        timed(2, 24.0, step=12.0, wait=11.0, other=1.0, save=0.0),
        timed(3, 36.0, step=12.0, wait=2.0, other=1.0, save=9.0),
    ])  # fmt: skip
    found = timeline.summary(timeline.read(run))
    assert list(found.phases.items()) == [("wait", 8.0), ("save", 3.0), ("other", 1.0)]
    assert sum(found.phases.values()) == found.seconds_per_step and found.between_s == 0


def waits(step, rank=0, at=16.0, **seconds):
    spent = {f"time/{name}": value for name, value in seconds.items()}
    return event("waits", at + step, "rollout", rank, step=step, **spent)


def test_rollout_is_told_by_seconds_of_a_task_per_step_of_steps_trained_again_the_newest(run_dir):
    assert "rollout" not in timeline.text(timeline.summary(timeline.read(run_dir)))
    write(run_dir, [
        waits(1, sampling=99.0), waits(2, sampling=99.0),
        waits(2, at=16.5, sampling=4.0, max_staleness=1.0), waits(3, sampling=8.0),
        waits(2, 1, sampling=2.0, max_staleness=3.0), waits(3, 1, no_engine=6.0),
    ])  # fmt: skip
    found = timeline.summary(timeline.read(run_dir, first=2))
    # Two tasks, two steps: 4 + 8 + 2, 1 + 3 and 6, by 4.
    assert found.rollout == {"sampling": 3.5, "max_staleness": 1.0, "no_engine": 1.5}
    line = "rollout, s/step: sampling 3.50, max_staleness 1.00, no_engine 1.50"
    assert line in timeline.text(found).splitlines()


def test_an_engine_that_loads_by_itself_stands_still_meanwhile(tmp_path):
    run = tmp_path / "run"
    write(run, [
        timed(1, 10.0, step=5.0),
        publish(1, 6.0, [], ("write", 5.5, 0.4)),
        event("loaded", 9.0, step=1, members=["slow"], phases=[["load", 6.0, 2.5]]),
    ])  # fmt: skip
    [pause] = timeline.read(run).pauses["slow"]
    assert tuple(pause) == ("update", 6.0, 2.5)


def test_no_two_names_of_a_legend_share_a_colour(tmp_path):  # U, pictures
    names = [*timeline.COLORS, *(f"other-{n}" for n in range(8))]
    parts = [(name, 5.0 + 0.1 * n, 0.1) for n, name in enumerate(names) if name != "update"]
    write(tmp_path, [timed(n, 10.0 * n, step=9.0) for n in (1, 2)] + [phases(1, 10.0, *parts)])
    drawn = []
    found = timeline.read(tmp_path)
    timeline.plot([found], tmp_path / "t.png", lambda figure, path: drawn.append(figure))
    patches = drawn[0].axes[0].get_legend().get_patches()
    assert len({patch.get_facecolor() for patch in patches}) == len(patches) == len(names) - 1


def set_clock(run_dir, task, by):
    """Has a task have noted everything so many seconds later, by its own clock."""
    path = run_dir / "events" / f"{task}.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()]
    for each in events:
        each["time"] += by
        each["phases"] = [[name, start + by, s] for name, start, s in each.get("phases", ())]
    path.write_text("".join(json.dumps(each) + "\n" for each in events))


@pytest.mark.parametrize("by", [-600.0, 600.0])
def test_clocks_that_differ_are_told_of_and_change_no_number(run_dir, by):  # O10
    usual = timeline.summary(timeline.read(run_dir))
    assert usual.clocks == {} and "clocks" not in timeline.text(usual)
    set_clock(run_dir, "actor-0", by)
    found = timeline.summary(timeline.read(run_dir))
    assert found.clocks == {"actor-0": pytest.approx(-by, abs=30)}
    assert found.engines == 2
    assert found.tokens_per_s == pytest.approx(usual.tokens_per_s, rel=0.4)  # but for its last look
    how = "behind" if by < 0 else "ahead"
    assert f"actor-0's is 10 min {how}" in timeline.text(found).splitlines()[-1]


def test_in_a_copy_of_a_run_a_task_that_ended_early_has_no_other_clock(run_dir):  # O10
    path = run_dir / "events" / "rollout-0.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()]
    with (run_dir / "events" / "actor-0.jsonl").open("a") as file:
        file.write(json.dumps(event("resume", events[-1]["time"] + 900.0, step=3)) + "\n")
    for each in (run_dir / "events").iterdir():
        os.utime(each)
    assert history.find_late_clocks(run_dir / "events") == {}


def test_what_a_task_is_doing_is_seen_whatever_its_clock_says(tmp_path):  # O10
    for rank, by in enumerate((0.0, -600.0, 600.0)):
        now = heartbeat.Doing("actor", rank, "n1", "update", 4, 1.0, time.time() + by)
        heartbeat.DoingFile(tmp_path / f"actor-{rank}.json").write(now)
    seen = heartbeat.read_doing(tmp_path)
    assert [each.rank for each in seen] == [0, 1, 2]
    assert all(abs(each.time - time.time()) < 60 for each in seen)
    for path in tmp_path.iterdir():
        os.utime(path, (0, time.time() - 300))
    (tmp_path / "actor-0.json").unlink()
    assert heartbeat.read_doing(tmp_path) == [], "these have ended"


def task(time, role="actor", rank=0, attempt="7.0", start=1):
    return event("start", time, role, rank, attempt=attempt, start=start, node="n")


def start_phases(time, *parts, role="actor", rank=0):
    return event("phases", time, role, rank, step=0, phases=[list(part) for part in parts])


def engine(id, time, start_s):
    return event("engine", time, "rollout", id=id, start="1", start_s=start_s)


def first_start():
    """Tasks begin at 100; the trainer is ready at 125, engines at 160 and 170, and step 1, which
    begins at 130 and is there for its batch, computes from 180 to 182."""
    return [
        task(100.0, "rollout"), task(101.0), task(102.0, "rollout", 1),
        engine("a", 160.0, 50.0), engine("b", 170.0, 55.0),
        start_phases(125.0, ("model", 110.0, 12.0), ("warm_up", 123.0, 2.0)),
        start_phases(161.0, ("prompts", 104.0, 3.0), ("engines", 108.0, 52.0), role="rollout"),
        start_phases(171.0, ("prompts", 105.0, 3.0), ("engines", 109.0, 61.0), role="rollout",
                     rank=1),
        publish(0, 129.0, [], ("gather", 126.0, 1.0), ("wire", 128.0, 0.5)),
        publish(0, 172.0, ["a", "b"], ("gather", 170.5, 0.5), ("wire", 171.0, 1.0)),
        phases(1, 182.0, ("wait", 130.0, 40.5), ("publish", 170.5, 1.5), ("wait", 172.0, 8.0),
               ("train", 180.0, 2.0)),
        timed(1, 182.0, step=52.0, wait=48.5, publish=1.5),
        phases(2, 185.0, ("wait", 182.0, 1.0), ("train", 183.0, 2.0)),
        timed(2, 185.0, step=3.0, wait=1.0),
        load("a", 184.0, 10.0, 400, 8),
    ]  # fmt: skip


@pytest.fixture
def started(tmp_path):
    write(tmp_path / "run", first_start())
    return tmp_path / "run"


def test_a_start_is_told_part_by_part(started):
    found = timeline.summary(timeline.read(started))
    assert found.start_s == 80.0, "from the first task's beginning until the batch was there"
    assert [tuple(part) for part in found.start] == [
        ("actor", "import", 1.0, 9.0),
        ("actor", "model", 10.0, 12.0),
        ("actor", "warm_up", 23.0, 2.0),
        ("actor", "publish", 26.0, 2.5 + 1.5),
        ("actor", "wait", 30.0, 48.5),
        ("actor", "other", 0.0, 80 - 9 - 4 - 12 - 2 - 48.5),
        ("rollout 1", "import", 2.0, 3.0),  # it was ready after rollout 0
        ("rollout 1", "prompts", 5.0, 3.0),
        ("rollout 1", "engines", 9.0, 61.0),
        ("engine a", "start", 10.0, 50.0),
        ("engine a", "update", 71.0, 1.0),
        ("engine b", "start", 15.0, 55.0),
        ("engine b", "update", 71.0, 1.0),
    ]
    lines = timeline.text(found).splitlines()
    assert lines[2].split() == ["actor", "import", "1.0", "9.0"]
    assert "steps 1 to 2: 27.50 s each (means)" in lines, "a step has its wait, as before"
    assert timeline.read(started, first=2).start is None


def test_a_resume_and_a_trainer_that_starts_in_place_have_starts_of_their_own(tmp_path):
    again = [
        task(300.0, attempt="7.1"), task(310.0, "rollout", attempt="7.1"),
        start_phases(330.0, ("load", 320.0, 10.0)),
        timed(3, 350.0, step=15.0, wait=5.0),
        phases(3, 350.0, ("wait", 335.0, 5.0), ("train", 340.0, 10.0)),
        task(400.0, attempt="7.1", start=2),
        timed(4, 430.0, step=10.0),
    ]  # fmt: skip
    write(tmp_path / "run", [*first_start(), *again])
    [third, fourth] = [timeline.read(tmp_path / "run", first=n).start for n in (3, 4)]
    assert (third.begin, third.end) == (300.0, 340.0)
    assert {p.name for p in third.phases["actor"]} == {"import", "load", "wait"}
    assert (fourth.begin, fourth.end) == (400.0, 420.0), "its step has not noted its phases"
    assert third.engines == fourth.engines == {}
    whole = timeline.read(tmp_path / "run")
    assert whole.start.begin == 100.0
    assert ("load", 320.0, 10.0) in [tuple(p) for p in whole.phases["actor"]]
    assert {p.name for p in whole.start.phases["actor"]} >= {"model", "warm_up"}


def test_a_start_is_drawn_beside_its_steps_on_a_scale_of_its_own(started, tmp_path):
    path = timeline.plot([timeline.read(started)], tmp_path / "t.png")
    pixels = (imread(path)[:-150, :, :3] * 255).round().astype(int)  # without the legend
    width = pixels.shape[1]

    def share(name, panel):
        """Of the panel's columns, those with this colour."""
        colour = [int(timeline.COLORS[name][i : i + 2], 16) for i in (1, 3, 5)]
        return (panel == colour).all(axis=-1).any(axis=0).mean()

    left, right = pixels[:, : 3 * width // 8], pixels[:, width // 2 :]
    assert all(share(name, left) for name in ("import", "model", "wait", "update"))
    assert share("train", left) == share("model", right) == 0
    assert share("train", right) > 0.6, "4 of the 5 seconds behind the start"
