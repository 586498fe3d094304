"""Runs that are many: compared (seeds make a group, what a score cost, tables of others), swept,
tagged and deleted."""

import json
import math
from types import SimpleNamespace

import pytest
from job_trees import job_of
from typer.testing import CliRunner

from relax_hpc.cli.main import app
from relax_hpc.errors import ConfigError
from relax_hpc.runs import compare, overview, summary, sweep
from relax_hpc.runtime.paths import RunPaths


@pytest.fixture
def run(tmp_path):
    def make(name, scores, *, at=0.0, gap=0.0, **sections):
        """A run on two GPUs: a step a minute, with 100 tokens; after the first step another
        attempt, `gap` seconds later."""
        paths = RunPaths(tmp_path / name)
        paths.root.mkdir(mode=0o700)
        gpus = {"actor__resources": {"gpus_per_node": 1}}
        gpus["engines__rollout"] = {"kind": "sglang", "resources": {"gpus_per_node": 1}}
        job = job_of(name=name, run_root=str(tmp_path), **gpus, **sections)
        paths.config.write_text(job.model_dump_json())
        lines = [(at, {"event": "start", "attempt": "1.0"})]
        for step, score in enumerate(scores):
            late = gap if step > 1 else 0.0
            if step == 2:
                lines.append((at + late + 60, {"event": "start", "attempt": "1.1"}))
            if step:
                done = {"step": step, "reward/mean": 0.5, "num_tokens": 100}
                lines.append((at + late + 60 * step, {"event": "step", **done}))
            share = {"name": "h", "when": "during", "number": step, "headline": True}
            share |= {"version": step, "correct": 100 * score, "num_samples": 100}
            lines.append((at + late + 60 * step, {"event": "eval", "num_truncated": 10, **share}))
        paths.events("actor", 0).parent.mkdir(parents=True, exist_ok=True)
        task = {"role": "actor", "rank": 0, "pid": 1}
        text = "".join(json.dumps({"time": time, **task, **line}) + "\n" for time, line in lines)
        paths.events("actor", 0).write_text(text)
        return paths.root

    return make


def test_seeds_are_one_group_with_their_mean_band_and_error(run, tmp_path):
    copy = "programs/1234/mine.py:score"  # of the same program, in each run
    one = run("a", [0.1, 0.3, 0.6], seed=1, reward__name=f"{tmp_path}/a/{copy}")
    after = {"dependency": "afterany:7"}  # as a sweep has it
    other = run(
        "b",
        [0.1, 0.5, 0.7],
        seed=2,
        at=5000.0,
        resources=after,
        reward__name=f"{tmp_path}/b/{copy}",
    )
    third = run("c", [0.2, 0.2, 0.2], algorithm={"preset": "grpo"})
    groups = compare.collect([one, third, other])
    assert [group.label for group in groups] == ["a and 1 more", "c"]
    assert groups[0].curve(lambda point: point.step)[1:] == [
        (1, pytest.approx(0.4), 0.3, 0.5), (2, pytest.approx(0.65), 0.6, 0.7),
    ]  # fmt: skip
    assert groups[0].error() == pytest.approx(math.sqrt(0.005) / math.sqrt(2))
    assert groups[1].error() == pytest.approx(math.sqrt(0.2 * 0.8 / 100))
    differing = compare.differences([group.members[0] for group in groups])
    assert differing["algorithm.loss.name"] == ["ipo", "ppo_clip"] and "seed" not in differing


def test_minutes_and_gpu_hours_do_not_count_the_queue_between_two_attempts(run):
    gone = {"profile": "gone"}  # since it was submitted
    path = run("a", [0.1, 0.2, 0.9, 0.9], gap=86400.0, launch=gone)
    [group] = compare.collect([path])
    minutes = [point.minutes for point in group.members[0].points]
    assert minutes == pytest.approx([0, 1, 2, 3])
    assert [p.tokens for p in group.members[0].points] == [0, 100, 200, 300]
    [there] = group.reached(0.5)
    assert (there.step, there.gpu_hours) == (2, pytest.approx(4 / 60))  # two GPUs, two minutes
    assert group.reached(0.95) == [None]
    used = summary.summarize(path)["gpu_hours"]["used"]
    assert used == pytest.approx(6 / 60)


def test_a_table_that_it_wrote_stands_beside_runs_again(run, tmp_path):
    groups = compare.collect([run("a", [0.1, 0.3])])
    table = tmp_path / "t.csv"
    table.write_text(compare.to_csv(groups))
    again = compare.collect([tmp_path / "a", table])
    assert again[0].members[0].points == again[1].members[0].points == groups[0].members[0].points
    table.write_text("run,step\nx,1\n")
    with pytest.raises(ConfigError, match=r"t.csv: lacks minutes, score; a table has run, group"):
        compare.collect([table])
    table.write_text("run,step,minutes,score\nx,one,2,3\n")
    with pytest.raises(ConfigError, match=r"t.csv: .*'one'"):
        compare.collect([table])


def test_the_command_tells_when_a_score_was_reached_and_draws(run, tmp_path):
    other = run("b", [0.1, 0.1, 0.1], rollout__temperature=0.7)
    picture = ["--score", "0.5", "--out", str(tmp_path / "c.png")]
    runs = [str(run("a", [0.1, 0.3, 0.6])), str(other)]
    out = CliRunner().invoke(app, ["compare", *runs, *picture]).output
    assert "0.100 → 0.600 ± 0.049" in out and "2.0 min, step 2" in out and "not reached" in out
    assert "rollout.temperature" in out and (tmp_path / "c.png").stat().st_size > 10_000
    with pytest.raises(ConfigError, match="--heldout is none of h"):
        compare.collect([tmp_path / "a"], heldout="other")


def test_a_sweep_is_a_grid_whose_names_say_its_values():
    points = sweep.plan("sort", 5, ["a.lr=1e-6, 3e-6", "b.c=[1,2]", 'd="x,y"'], seeds=2)
    assert [point.name for point in points] == [
        "sort-lr_1e-6-s5", "sort-lr_1e-6-s6", "sort-lr_3e-6-s5", "sort-lr_3e-6-s6",
    ]  # fmt: skip
    assert points[3].overrides == ("a.lr=3e-6", "b.c=[1,2]", 'd="x,y"', "seed=6")
    with pytest.raises(ConfigError, match="two runs would be called sort-lr_1;"):
        sweep.plan("sort", 0, ["a.lr=1,1"], seeds=1)


def test_each_further_run_of_a_sweep_begins_after_one_that_so_many_places_before_it_ended(
    tmp_path, monkeypatch
):
    begun = []

    def submit(job, *, local, dry_run=False, say=None):
        if job.name == "bad":
            raise ConfigError("bad")
        if not dry_run:
            (tmp_path / job.name / "control").mkdir(parents=True)
            begun.append((job.name, job.resources.dependency))
        return SimpleNamespace(run_dir=tmp_path / job.name)

    monkeypatch.setattr(sweep.launching, "submit", submit)
    monkeypatch.setattr(sweep.launching, "mode_of", lambda *, local: "slurm")
    leaders = {"a": ("1",), "b": ("2", "3"), "c": ("4",), "d": ("5",)}
    read = lambda run_dir: SimpleNamespace(leaders=leaders[run_dir.name])  # noqa: E731
    monkeypatch.setattr(sweep.record, "read", read)
    jobs = [job_of(name=name, run_root=str(tmp_path)) for name in "abcd"]
    jobs[3] = job_of(name="d", run_root=str(tmp_path), resources={"dependency": "singleton"})
    with pytest.raises(ConfigError, match="bad"):
        list(sweep.submit([*jobs, job_of(name="bad")], at_once=2, tag="t", local=False))
    assert not begun, "all are checked before the first"
    list(sweep.submit(jobs, at_once=2, tag="t", local=False))
    waits = [None, None, "afterany:1", "singleton,afterany:2:3"]
    assert begun == list(zip("abcd", waits, strict=True))
    assert overview.tags_of(tmp_path / "d") == ["t"]


def test_a_run_is_deleted_once_it_is_over_and_the_user_agrees(run, monkeypatch):
    state = SimpleNamespace(state="RUNNING")
    monkeypatch.setattr(overview.status, "of_run", lambda run_dir: [state])
    monkeypatch.setattr(overview.status, "decisive", lambda found: found[0])
    path = run("a", [0.1])
    (path / "control").mkdir()
    (path / "big").write_bytes(b"x" * 100_000)

    def ask(command, *words, **more):
        return CliRunner().invoke(app, [command, str(path), *words], **more)

    assert "paper" in ask("tag", "paper", "old").output
    assert ask("tag", "old", "--remove").output == "a: paper\n"
    with pytest.raises(ConfigError, match="a: is RUNNING, and is not deleted; end it first"):
        overview.remove(path)
    state.state = "CANCELLED"
    assert "KiB" in ask("rm", input="n\n").output and path.exists()
    assert ask("rm", "--yes").exit_code == 0 and not path.exists()
