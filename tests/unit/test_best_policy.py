"""The best policy: which checkpoint is kept for its score, exported with its card, and when."""

import shutil
from functools import partial
from pathlib import Path

import pytest
from test_checkpoints import Trainer, checkpoints_in, steps_in

from relax_hpc.bus.plan import PlanPosition
from relax_hpc.config import job_file
from relax_hpc.errors import ConfigError
from relax_hpc.launch import requeue
from relax_hpc.runs import cancel, card, summary
from relax_hpc.runtime.files.records import read_json, write_json
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.runtime.telemetry.events import EventWriter
from relax_hpc.trainer.checkpoints import best, store
from relax_hpc.trainer.checkpoints.convert import convert
from relax_hpc.trainer.megatron.checkpoint_files import MANIFEST

TREE = {
    "name": "sums",
    "model": {"path": "models--Qwen--Qwen3-4B/snapshots/abc"},
    "prompts": {"train": "/home/me/data/train.jsonl"},
    "schedule": {"num_steps": 60},
    "actor": {"save_every": 10, "advanced": {"keep_best": "sums"}},
    "eval": {"sums": {"path": "heldout.jsonl", "every": 10}},
}


def job(**sections):
    return job_file.validate(TREE | sections, source="test")


@pytest.fixture
def run(tmp_path):
    paths = RunPaths(tmp_path / "run")
    paths.checkpoints.mkdir(parents=True)
    paths.config.write_text(job().model_dump_json())
    return paths


def score(paths, **by_key):
    """Notes shares of scores, each as `during_2=[correct by task]` of 4 samples a task."""
    for rank in (0, 1):
        shares = {
            f"sums/{key.replace('_', '/')}": [0, 0, correct[rank], 4]
            for key, correct in by_key.items()
            if len(correct) > rank
        }
        path = paths.heldout_shares(rank, 2)
        write_json(path, (read_json(path) or {}) | shares)


def checkpoints_of(paths, **how):
    keep = partial(best.to_keep, paths, "sums", 10)
    return checkpoints_in(paths.checkpoints, keep=1, best=keep, **how)


def save(paths, *steps, **how):
    for step in steps:
        checkpoints_of(paths, **how).save(Trainer(step, step), PlanPosition(1, step, step))


def bests(paths):
    return [int(name[5:]) for name in steps_in(paths.checkpoints / "best")]


def test_a_score_is_of_all_tasks_and_of_the_step_at_which_it_was_due(run):
    score(run, before_0=[4, 4], during_1=[1, 2], during_2=[3], during_3=[4, 3], after_45=[2, 2])
    score(run, during_4=[0, 0])
    assert best.scores_of(run, "sums", 10) == {10: 3 / 8, 30: 7 / 8, 40: 0, 45: 1 / 2}
    assert best.scores_of(run, "others", 10) == {}


def test_the_best_stays_one_at_a_time_and_of_equal_ones_the_earlier(run):
    save(run, 10, 20, 30)
    assert bests(run) == [10, 20], "their scores may still come"
    score(run, during_1=[2, 2], during_2=[2, 2])
    save(run, 40)
    assert bests(run) == [10, 30]
    score(run, during_3=[1, 1], during_4=[4, 1])
    save(run, 50)
    assert bests(run) == [40] and store.find(run.checkpoints, 40).parent.name == "best"
    score(run, during_5=[4, 4])
    checkpoints_of(run).prune()
    assert bests(run) == [], "the newest is the best"
    assert best.find_best(run, job()) == ("sums", 50, 1.0, run.checkpoints / "step_00000050")
    assert [each.step for each in checkpoints_of(run).complete()] == [50]


def test_one_that_no_score_can_come_for_any_more_goes(run):
    save(run, 10, 15)  # 15: at an announced end
    score(run, during_2=[1, 1])
    save(run, 20, 30)
    assert bests(run) == [20]


class Killed(BaseException):
    pass


def test_killed_at_any_moment_it_leaves_a_best_one_and_the_next_start_mends_the_rest(
    run, monkeypatch
):
    save(run, 10, 20, 30)
    score(run, during_1=[3, 3], during_2=[1, 1])
    checkpoints_of(run).prune()
    assert bests(run) == [10]
    score(run, during_3=[4, 4])
    checkpoints_in(run.checkpoints, keep=9).save(Trainer(40, 40), PlanPosition(1, 40, 40))
    kills = 0
    for kills in range(9):
        copy = RunPaths(run.root.with_name(f"killed-{kills}"))
        shutil.copytree(run.root, copy.root)
        left = iter(range(kills))
        with monkeypatch.context() as patch:
            for owner, name in ((Path, "rename"), (shutil, "rmtree")):
                patch.setattr(owner, name, until_killed(getattr(owner, name), left))
            try:
                checkpoints_of(copy).prune()
                break
            except Killed:
                pass
        assert best.find_best(copy, job()).step == 30
        trainer = Trainer(0)
        assert checkpoints_of(copy).resume(trainer).step == trainer.weight == 40
        checkpoints_of(copy).prune()
        assert steps_in(copy.checkpoints / "best") == ["step_00000030"]
    assert 3 <= kills < 8


def until_killed(call, left):
    def act(*args):
        if next(left, None) is None:
            raise Killed
        return call(*args)

    return act


def test_a_resume_that_has_no_other_takes_the_best(run):
    save(run, 10, 20)
    score(run, during_1=[4, 4])
    shutil.rmtree(run.checkpoints / "step_00000020")
    trainer = Trainer(0)
    assert checkpoints_of(run).resume(trainer).step == trainer.weight == 10
    assert checkpoints_of(run, lacks=lambda _: "its shards are gone").resume(trainer) is None


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"eval": {}}, "keep_best = 'sums': no held-out set has this name .there is none."),
        ({"eval": {"sums": {"path": "h", "every": 15}}}, "every = 15: .* multiple of .* = 10"),
        ({"eval": {"sums": {"path": "h", "every": 0}}}, "every = 0: .* multiple of"),
    ],
)
def test_a_job_whose_policies_are_scored_without_being_saved_is_refused(sections, said):
    with pytest.raises(ConfigError, match=said):
        job(**sections)


def test_the_best_is_told_and_exported_with_a_card(run, tmp_path, monkeypatch):
    model = tmp_path / "models--Qwen--Qwen3-4B/snapshots/abc"
    model.mkdir(parents=True)
    (model / "README.md").write_text("---\nlicense: apache-2.0\ntags: [x]\n---\nlicense: no\n")
    run.config.write_text(job(model={"path": str(model)}).model_dump_json())
    save(run, 10, 20, 30)
    score(run, during_1=[2, 2], during_2=[3, 4], during_3=[1, 1])
    told = summary.summarize(run.root)["best_policy"]
    assert told == {
        "name": "sums", "step": 20, "score": 7 / 8, "folder": "checkpoints/best/step_00000020",
    }  # fmt: skip
    for folder in run.checkpoints.glob("*/step_*"):
        (folder / MANIFEST).write_text("")
    events = EventWriter(run.events("actor", 0), role="actor", rank=0)
    for step in (10, 20, 30):
        events.emit("step", step=step, num_tokens=1000)
    run.reward_curve.write_bytes(b"picture")
    given = []

    def to_hf(folder, model, out, also):
        given.append(folder)
        out.mkdir(parents=True)
        also(out)

    monkeypatch.setattr("relax_hpc.trainer.checkpoints.convert.to_hf", to_hf)
    out = convert(run.root, "hf", out=None, step=None, model=None, best=True, card=card.write)
    assert out == run.hf(20) and given == [run.checkpoints / "best/step_00000020"]
    assert (out / "reward.png").read_bytes() == b"picture"
    said = (out / "README.md").read_text()
    assert said.startswith('---\nbase_model: "Qwen/Qwen3-4B"\nlicense: apache-2.0\ntags:')
    assert "after 20 of 60 steps" in said and "2.0k tokens" in said and "license: no" not in said
    assert "eval.sums.every = 10\n" in said and 'prompts.train = ["train.jsonl"]' in said
    assert "/home/me" not in said and "optimizer" not in said
    with pytest.raises(ConfigError, match="--best and --step 20: give one of them"):
        convert(run.root, "hf", out=None, step=20, model=None, best=True)
    shutil.rmtree(run.heldout_shares(0, 1).parent)
    with pytest.raises(ConfigError, match="has no best policy"):
        convert(run.root, "hf", out=None, step=None, model=None, best=True)


class Launched:
    state = "RUNNING"
    record = type("Record", (), {"leaders": ("7",)})


def save_before_cancel(run, monkeypatch, act, within_s=60.0):
    """Returns whether all was saved, and what was said; `act` is what tasks do between looks."""
    said = []
    monkeypatch.setattr(cancel.status, "of_run", lambda _: [])
    monkeypatch.setattr(cancel.status, "decisive", lambda _: Launched)
    monkeypatch.setattr(cancel.time, "sleep", lambda _: act())
    return cancel.save(run.root, within_s, said.append), " ".join(said)


def test_a_cancel_that_saves_waits_for_trainer_critic_and_rollout(run, monkeypatch):
    records = [run.saves("7.1"), run.critic_saves("7.1"), run.keeps("7.1", 0)]
    write_json(run.saves("7.0"), {"step": 10})  # before a requeue
    for record in records:
        write_json(record, {"step": None})
    save(run, 20)
    left = iter(records)

    def act():
        assert read_json(run.ending("7.1"))["cancel"] and read_json(run.ending("7.0")) is None
        requeue.take_over("7", run.root)  # a task that starts: it asks for no requeue
        write_json(next(left), {"step": 20})

    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    monkeypatch.setattr(requeue, "ask_in_time", lambda *_, **__: pytest.fail("requeued"))
    is_saved, said = save_before_cancel(run, monkeypatch, act)
    assert is_saved and said == f"saved: {run.checkpoints}/step_00000020" and not [*left]
    assert requeue.announce("7", run.root), "Slurm's own end takes its place"


@pytest.mark.parametrize("step", [None, 30])
def test_a_cancel_that_cannot_save_lets_the_run_go_on(run, monkeypatch, step):
    write_json(run.saves("7.0"), {"step": step})
    is_saved, said = save_before_cancel(run, monkeypatch, lambda: None, within_s=0.0)
    assert not is_saved and "nothing is cancelled" in said
    assert ("step 30 could not be saved" in said) == (step == 30)
    assert "refused" in read_json(run.ending("7.0"))
