"""What `timeline` tells of the time before the first step; seconds are worked out by hand."""

import json

import pytest
from matplotlib.image import imread
from test_telemetry import event, write
from test_timeline import load, phases, publish, timed
from typer.testing import CliRunner

from relax_hpc.cli.runs import runs
from relax_hpc.paths import RunPaths
from relax_hpc.telemetry import starts, timeline, timeline_plot


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
def run_dir(tmp_path):
    write(tmp_path / "run", first_start())
    return tmp_path / "run"


def test_a_start_is_told_part_by_part(run_dir):
    found = timeline.summary(timeline.read(run_dir))
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
    assert lines[0] == "seconds from the start of the tasks to the first step: 80.0; of them"
    assert lines[1].split() == ["part", "phase", "after", "s"]
    assert lines[2].split() == ["actor", "import", "1.0", "9.0"]
    assert "steps 1 to 2: 27.50 s each (means)" in lines, "a step has its wait, as before"


def test_only_the_first_step_of_a_start_has_one(run_dir):
    assert timeline.read(run_dir, first=2).start is None
    assert timeline.summary(timeline.read(run_dir, first=2)).start_s is None
    assert not timeline.text(timeline.summary(timeline.read(run_dir, first=2))).startswith("sec")


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


def test_of_many_engines_the_last_is_told_and_drawn_are_all(run_dir, tmp_path):
    many = [engine(f"e{number:02}", 140.0 + number, 20.0) for number in range(17)]
    write(tmp_path / "many", [*first_start()[:3], *many, *first_start()[5:]])
    found = timeline.read(tmp_path / "many")
    assert [p.who for p in starts.parts(found.start) if p.what == "start"] == [
        "engine e16 (last of 17)"
    ]
    few, more = (
        imread(timeline_plot.plot([each], tmp_path / "t.png")).shape[0]
        for each in (timeline.read(run_dir), found)
    )
    assert more < few


def colours(path):
    """Colours of the start's panel and of the steps', without the legend."""
    pixels = (imread(path)[:-150, :, :3] * 255).round().astype(int)
    width = pixels.shape[1]
    panels = pixels[:, : 3 * width // 8], pixels[:, width // 2 :]
    return [{f"#{r:02x}{g:02x}{b:02x}" for r, g, b in p.reshape(-1, 3).tolist()} for p in panels]


def test_a_start_is_drawn_beside_its_steps_on_a_scale_of_its_own(run_dir, tmp_path):
    found = timeline.read(run_dir)
    left, right = colours(timeline_plot.plot([found], tmp_path / "t.png"))
    shown = timeline_plot.COLORS
    assert {shown["import"], shown["model"], shown["wait"], shown["update"]} <= left
    assert shown["train"] in right and shown["train"] not in left
    assert shown["model"] not in right
    pixels = (imread(tmp_path / "t.png")[..., :3] * 255).round().astype(int)
    blue = [int(shown["train"][i : i + 2], 16) for i in (1, 3, 5)]
    trained = (pixels == blue).all(axis=-1).any(axis=0)[pixels.shape[1] // 2 :]
    assert trained.mean() > 0.6, "4 of the 5 seconds behind the start"
    without = timeline_plot.plot([found._replace(start=None)], tmp_path / "t.png")
    assert not any(shown["model"] in half for half in colours(without))


def test_the_start_is_left_out_if_nobody_wants_it(run_dir):
    RunPaths(run_dir).config.write_text("{}")

    def told(*more):
        answer = CliRunner().invoke(runs, ["timeline", str(run_dir), "--json", *more])
        assert answer.exit_code == 0, answer.output
        return json.loads(answer.stdout.splitlines()[0])

    assert told()["start"][0] == {"who": "actor", "what": "import", "after_s": 1.0, "seconds": 9.0}
    assert (told("--no-start")["start_s"], told("--no-start")["start"]) == (None, [])
