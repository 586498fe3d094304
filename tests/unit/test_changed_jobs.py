"""What a resume changes of a job: what may, what not and why, what is said of it afterwards."""

import json
import os

import fake_slurm
import pytest
from bus_fixtures import produce
from job_trees import job_of

from relax_hpc.bus import layout
from relax_hpc.config.job_file import read_resolved
from relax_hpc.errors import ConfigError, LaunchError
from relax_hpc.launch import states
from relax_hpc.runs import replay, report, resume, status, summary
from relax_hpc.runs.changes import change
from relax_hpc.runtime.files.records import write_json
from relax_hpc.runtime.paths import RunPaths

HOW = [
    "actor.layout.data_parallel=2", "actor.tokens_per_micro_batch=4096",
    "actor.transformer.recompute_granularity=full", "engines.rollout.args.mem_fraction_static=0.7",
]  # fmt: skip
WHERE = ["actor.resources.time=30", "boards.project=x"]


@pytest.mark.parametrize("setting", [*HOW, *WHERE])
def test_where_the_same_is_computed_may_change_and_how_if_it_is_looked_at_as_of_a_new_run(setting):
    _, [line], otherwise = change(job_of(), [setting])
    assert line.startswith(f"{setting.partition('=')[0]}: ") and " -> " in line
    assert otherwise == (setting in HOW)


@pytest.mark.parametrize(("setting", "why"), [
    ("name=x", "is where the run is; move or rename its folder"),
    ("launch.profile=x", "was read when the run was submitted; set resources"),
    ("engines.rollout.kind=sglang", "a run has the components that its bus was made for"),
    ("eval.h.every=3", "points of a curve would be of different evaluations"),
    ("actor.optimizer.moments=bfloat16", "would change what is trained, and a run has one job"),
])  # fmt: skip
def test_what_stays_says_why(setting, why):
    with pytest.raises(ConfigError, match=why):
        change(job_of(eval={"h": {"path": "e"}}), [setting])


def test_a_layout_is_checked_before_anything_is_queued(slurm, monkeypatch):
    slurm.leaves(1)
    looked = []

    def check(config, components, **_):
        looked.append((config.actor.layout.world_size, [each.tasks for each in components]))
        raise ConfigError("does not divide the heads")

    monkeypatch.setattr(resume.preflight, "check", check)
    monkeypatch.setattr(resume, "check_resources", lambda *_: None)
    paths = RunPaths(slurm.run_dir)
    before = paths.config.read_bytes()
    with pytest.raises(ConfigError, match="does not divide the heads"):
        resume.resume(slurm.run_dir, overrides=["actor.layout.data_parallel=2"])
    assert looked == [(2, [1, 2])]
    assert paths.config.read_bytes() == before and not paths.launch_claim(2).exists()
    assert resume.resume(slurm.run_dir, overrides=["actor.save_every=7"]).job_id == "9"
    assert len(looked) == 1


def test_a_run_goes_on_with_other_rollout_tasks_whoever_began_that_before(slurm, monkeypatch):
    paths = RunPaths(slurm.run_dir)
    bus, before = paths.bus, paths.config.read_bytes()
    monkeypatch.setattr(resume.preflight, "check", lambda *_, **__: None)
    monkeypatch.setattr(resume, "check_resources", lambda *_: None)
    monkeypatch.setattr(resume, "_check_begin", lambda *_: None)
    layout.create(bus, ["rollout-0"], {})
    produce(bus, "rollout-0", [0, 1])
    slurm.leaves(1)
    slurm.refuses("sbatch: error: too many")
    with pytest.raises(LaunchError):
        resume.resume(slurm.run_dir, overrides=["engines.rollout.count=3"])
    assert paths.config.read_bytes() == before and layout.open_bus(bus).deals == ((0, 1),)
    (slurm.folder / "refusal").unlink()
    if (child := os.fork()) == 0:  # killed before it started a job
        resume.submit.start = lambda *_: os._exit(9)
        try:
            resume.resume(slurm.run_dir, overrides=["engines.rollout.count=3"])
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert layout.open_bus(bus).deals == ((0, 1), (2, 3))
    paths.launch_claim(2).unlink()
    assert resume.resume(slurm.run_dir, overrides=["engines.rollout.count=2"]).job_id == "9"
    assert layout.open_bus(bus).deals == ((0, 1), (2, 2))


@pytest.fixture
def thrice(tmp_path, monkeypatch):
    """A run of job 5, of 6 with another layout, of 7 as that, and of one to come with more
    steps."""
    fake = fake_slurm.make(tmp_path, monkeypatch, earlier=("5", "6"))
    paths = RunPaths(fake.run_dir)
    known = json.loads(paths.launch_record.read_text())
    for number, each in enumerate([*known["earlier"], known], start=1):
        each["time"] = 100.0 * number
    write_json(paths.launch_record, known)
    now = read_resolved(paths.config)
    middle, *_ = change(now, ["actor.layout.data_parallel=2", "actor.save_every=7"])
    last, *_ = change(middle, ["schedule.num_steps=60"])
    for path, config in (
        (paths.config_before(2), now), (paths.config_before(4), middle), (paths.config, last),
    ):  # fmt: skip
        write_json(path, config.model_dump(mode="json"))
    yield paths
    states.has_accounting.cache_clear()


def trained(paths, *steps):
    path = paths.events("actor", 0)
    path.parent.mkdir()
    common = {"role": "actor", "rank": 0, "pid": 1, "event": "step", "loss": 1.0}
    lines = (json.dumps(common | {"step": step, "time": then}) for step, then in steps)
    path.write_text("".join(f"{line}\n" for line in lines))


def test_a_replay_has_the_job_of_its_step_and_knows_its_grid(thrice):
    trained(thrice, (1, 150.0), (2, 250.0), (3, 260.0))
    one, two = replay._jobs_of(thrice, [replay.read_step(thrice, step) for step in (1, 3)])
    assert [each.actor.layout.data_parallel for each in (one, two)] == [1, 2]
    assert replay._is_same_grid(thrice, two, range(2, 4))
    assert not replay._is_same_grid(thrice, two, range(1, 4))
    assert replay._is_same_grid(thrice, one, range(1, 2))


def test_status_and_summary_say_what_was_changed_from_which_step_on(thrice):
    trained(thrice, (1, 150.0), (2, 190.0), (2, 250.0), (3, 350.0))
    found = summary.summarize(thrice.root)["changes"]
    assert [(each["number"], each["first_step"]) for each in found] == [(2, 2), (4, None)]
    assert found[0]["keys"]["actor.layout.data_parallel"] == (1, 2)
    said = report._changes(found)
    assert said[0][1].startswith("actor.layout.data_parallel: 1 -> 2; actor.save_every: 10 -> 7 (")
    assert said[1] == ("changed", "schedule.num_steps: 30 -> 60 (for the next start)")
    assert "  changed       schedule.num_steps: 30" in report.text(status.collect(thrice.root))
