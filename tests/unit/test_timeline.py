import json
import time

import pytest
from matplotlib.image import imread
from test_telemetry import event, step, write

from relax_hpc.engines.pool_engine import EngineLoad
from relax_hpc.engines.response import Counts
from relax_hpc.errors import ConfigError
from relax_hpc.sampling.load import LoadMeter
from relax_hpc.telemetry import timeline, timeline_plot
from relax_hpc.telemetry.events import EventWriter, read_events
from relax_hpc.telemetry.timers import Timers


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
    lines = timeline.text(found).splitlines()
    assert lines[0] == "steps 2 to 2: 10.00 s each (means)"
    assert lines[2].split() == ["wait", "2.00", "20.0%"]
    assert lines[-1].endswith("engines paused 1500 ms each, 15.00% of the time")
    assert not any(line.startswith("between") for line in lines)
    lines = timeline.text(whole).splitlines()
    assert "between steps: 1 s of starts, pauses, and what was lost" in lines


def test_what_only_some_steps_do_is_in_the_table(tmp_path):
    """A checkpoint of 12 s every third step is a third of the time where the others take 12 s."""
    run = tmp_path / "run"
    write(run, [
        timed(1, 12.0, step=12.0, wait=12.0, save=0.0),
        timed(2, 24.0, step=12.0, wait=12.0, save=0.0),
        timed(3, 36.0, step=12.0, wait=0.0, save=12.0),
    ])  # fmt: skip
    found = timeline.summary(timeline.read(run))
    assert found.phases == {"wait": 8.0, "save": 4.0}
    assert sum(found.phases.values()) == found.seconds_per_step and found.between_s == 0


def test_of_a_step_that_was_trained_again_the_newest_phases_count(run_dir):
    found = timeline.read(run_dir, first=2, last=2)
    assert [tuple(phase) for phase in found.phases["actor"]] == [
        ("wait", 10.0, 2.0), ("train", 12.0, 5.0), ("publish", 17.0, 3.0),
    ]  # fmt: skip
    assert list(found.phases) == ["actor", "reference"]
    whole = timeline.read(run_dir)
    assert [tuple(pause) for pause in whole.pauses["b"]] == [("update", 9.1, pytest.approx(0.7))]


def test_an_engine_that_loads_by_itself_stands_still_meanwhile(tmp_path):
    run = tmp_path / "run"
    write(run, [
        timed(1, 10.0, step=5.0),
        publish(1, 6.0, [], ("write", 5.5, 0.4)),
        event("loaded", 9.0, step=1, members=["slow"], phases=[["load", 6.0, 2.5]]),
    ])  # fmt: skip
    [pause] = timeline.read(run).pauses["slow"]
    assert tuple(pause) == ("update", 6.0, 2.5)


def test_steps_that_are_not_there_are_named_with_those_that_are(run_dir, tmp_path):
    with pytest.raises(ConfigError, match="no steps from 7 to the newest; steps 1 to 3 are done"):
        timeline.read(run_dir, first=7)
    with pytest.raises(ConfigError, match="no step is done"):
        timeline.read(tmp_path)
    assert timeline.parse_steps("2:") == (2, None) and timeline.parse_steps(":5") == (None, 5)
    for wrong in ("3", "a:b", "1:2:3", "-1:"):
        with pytest.raises(ConfigError, match="use FIRST:LAST"):
            timeline.parse_steps(wrong)


def test_the_rates_of_all_tasks_at_an_engine_add_up(run_dir):
    found = timeline.read(run_dir, first=2, last=2)
    times, rates = timeline_plot._curve(found.engines["b"], found)
    assert times == [-2.0, 3.0, 8.0]
    assert rates == [pytest.approx(100), pytest.approx(110), pytest.approx(0)]


def test_the_picture_shows_phases_in_their_colours(run_dir, tmp_path):
    found = timeline.read(run_dir)
    path = timeline_plot.plot([found], tmp_path / "t.png")
    pixels = (imread(path)[..., :3] * 255).round().astype(int).reshape(-1, 3).tolist()
    shown = {f"#{r:02x}{g:02x}{b:02x}" for r, g, b in pixels}
    names = {"wait", "publish", "score", "train"}
    assert {timeline_plot.COLORS[name] for name in names} | {timeline_plot.PAUSE} <= shown
    assert timeline_plot.COLORS["save"] not in shown
    assert [p.name for p in tmp_path.iterdir() if "t.png" in p.name] == ["t.png"]


def test_many_engines_are_drawn_as_one(run_dir, tmp_path):
    few = timeline.read(run_dir)
    rates = few.engines["a"]
    many = few._replace(engines={f"e{number}": rates for number in range(17)})
    heights = [
        imread(timeline_plot.plot([each], tmp_path / "t.png")).shape[0] for each in (few, many)
    ]
    assert heights[1] < heights[0]


def test_timers_note_when_phases_were_and_leave_out_what_nobody_sees():
    timers, before = Timers(), time.time()
    with timers("wait"):
        time.sleep(0.01)
    with timers("read"):
        pass
    with timers.phase("train"):
        time.sleep(0.01)
    assert [phase.name for phase in timers.phases] == ["wait", "train"]
    assert set(timers.seconds) == {"time/wait", "time/read"}
    wait, train = timers.phases
    assert before <= wait.start <= wait.start + wait.seconds <= train.start + 1e-3
    assert wait.seconds == timers.seconds["time/wait"]


def test_the_load_of_an_engine_is_what_came_since_the_last_note(tmp_path):
    def states(tokens, id="rollout-0"):
        return [EngineLoad(id, Counts(tokens), 3, 2, None)]

    with EventWriter(tmp_path / "rollout-0.jsonl", "rollout", 0) as events:
        meter = LoadMeter(events, every_s=1e-9)
        for tokens in (10, 25, 7):  # it was started again before the last
            meter.note(states(tokens))
        rare = LoadMeter(events, every_s=1000)
        rare.note(states(1))
        rare.note(states(4), last=True)
    noted = read_events(tmp_path)
    assert [e["num_tokens"] for e in noted] == [10, 15, 7, 4]
    fields = {"id", "seconds", "num_tokens", "in_flight", "version", "kv_used", "num_media_cached"}
    assert fields <= set(json.loads((tmp_path / "rollout-0.jsonl").read_text().splitlines()[0]))
