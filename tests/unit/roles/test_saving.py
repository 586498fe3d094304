"""When a run is saved, what is asked of its checkpoints, when a save counts as done."""

import pytest
from role_fakes import CheckpointPart, Events, Journal, config

from relax_hpc.errors import CheckpointError, FencedError
from relax_hpc.runtime.comm.world import SoloWorld
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.trainer.checkpoints import saving
from relax_hpc.trainer.checkpoints.store import PendingSave, Saved, _SaveState


class Trainer:
    step, skip = 0, None

    def expect_saves(self):
        pass

    def stream_weights(self):
        return iter([("w", self.step)])


class Checkpoints:
    """Saves are done when the next one begins, or when one waits; some of them fail."""

    def __init__(self, journal, fails=()):
        self.journal, self.fails, self.pending, self.done = journal, fails, None, []

    def poll(self):
        self.journal.note("poll")
        done, self.done = self.done, []
        return done

    def save(self, trainer, position, check_fenced):
        self.journal.note("save", trainer.step, position)
        check_fenced()
        done = self.wait()
        failure = "disk full" if trainer.step in self.fails else None
        self.pending = Saved(trainer.step, 1.5, 2.5, 10, failure)
        return done

    def wait(self):
        done, self.pending = [self.pending] if self.pending else [], None
        return done


class Rank0:
    def __init__(self, journal, trainer):
        self.journal, self.trainer = journal, trainer

    @property
    def position(self):
        return f"position {self.trainer.step}"

    def check_fenced(self):
        self.journal.note("check_fenced")

    def release(self):
        self.journal.note("release")


def saver(tmp_path, journal, *, is_rank0=True, fails=(), world=None, step=0, **settings):
    events, trainer = Events(), Trainer()
    trainer.step = step
    settings = {"schedule__num_steps": 10, "actor__save_every": 4} | settings
    checkpoints, made = Checkpoints(journal, fails), config(**settings)
    save = saving.Saving(
        made.actor, RunPaths(tmp_path), world, trainer, checkpoints,
        Rank0(journal, trainer) if is_rank0 else None, events,
        num_steps=made.num_steps, source=made.model.path,
    )  # fmt: skip

    def steps(*numbers, skip=None):
        for number in numbers:
            trainer.step, trainer.skip = number, skip
            save()

    steps.save = save
    return steps, events, checkpoints


def test_steps_that_are_multiples_and_the_last_are_saved_and_the_last_is_waited_for(tmp_path):
    journal = Journal()
    steps, events, checkpoints = saver(tmp_path, journal)
    steps(*range(1, 11))
    assert journal.of("save") == [("save", n, f"position {n}") for n in (4, 8, 10)]
    assert len(journal.of("poll")) == 10
    assert checkpoints.pending is None
    assert events.of("checkpoint") == [
        {"step": n, "wait_s": 1.5, "background_s": 2.5, "bytes": 10} for n in (4, 8, 10)
    ]
    assert len(journal.of("release")) == len(journal.of("check_fenced")) == 3


def test_after_a_skipped_update_the_next_one_that_is_done_is_saved_once(tmp_path):
    journal = Journal()
    steps, _, _ = saver(tmp_path, journal)
    steps(4, 5, skip="nan")
    assert not journal.of("save")
    steps(6, 7)
    assert [step for _, step, _ in journal.of("save")] == [6]
    steps(9, 10, skip="nan")
    assert [step for _, step, _ in journal.of("save")] == [6, 10]  # the run's last step


def test_a_save_that_failed_is_noted_and_lets_nothing_be_deleted(tmp_path):
    journal = Journal()
    steps, events, _ = saver(tmp_path, journal, fails=[4])
    steps(4, 8)
    assert events.all == [("checkpoint_failed", {"step": 4, "message": "disk full"})]
    assert not journal.of("release")


def test_a_run_whose_last_checkpoint_fails_does_not_end_well(tmp_path):
    steps, events, _ = saver(tmp_path, Journal(), fails=[10])
    with pytest.raises(CheckpointError, match="last checkpoint could not be saved: disk full"):
        steps(8, 10)
    assert [event["step"] for event in events.of("checkpoint")] == [8]


def test_the_model_is_written_for_others_at_its_own_multiples(tmp_path, monkeypatch):
    written = []

    def save_hf(folder, tensors, model, *, write):
        written.append((folder, list(tensors), model, write))

    monkeypatch.setattr(saving, "save_hf", save_hf)
    settings = {"actor__save_hf_every": 3, "model__path": "the model"}
    steps, events, _ = saver(tmp_path, Journal(), **settings)
    steps(*range(1, 8))
    paths = RunPaths(tmp_path)
    [three, six] = [(paths.hf(n), [("w", n)], config(**settings).model.path, True) for n in (3, 6)]
    assert written == [three, six]
    assert [(e["step"], e["path"]) for e in events.of("export")] == [
        (3, str(paths.hf(3))), (6, str(paths.hf(6))),
    ]  # fmt: skip
    written.clear()
    steps, events, _ = saver(tmp_path, Journal(), is_rank0=False, **settings)
    steps(3)
    assert written == [(*three[:3], False)] and not events.of("export")


def test_checkpoints_are_kept_and_waited_for_as_the_settings_say(tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr(saving, "Checkpoints", lambda *args, **kwargs: given.append((args, kwargs)))
    made = config(actor__keep_checkpoints=3, actor__keep_every=40, actor__save_every=10).actor
    how = {"timeout_s": 77, "is_valid": bool, "lacks": str, "best": list}
    saving.checkpoints_of(made, RunPaths(tmp_path), "world", tuple, **how)
    [(_, found)] = given
    assert found == how | {"keep": 3, "keep_every": 40, "beside_training": True}


def test_a_save_at_the_end_of_a_job_is_of_the_step_and_made_once(tmp_path):
    journal = Journal()
    steps, events, _ = saver(tmp_path, journal)
    save = steps.save
    assert save.now() is True and not journal.of("save"), "it was resumed from: it is on disk"
    steps(1, 2)
    assert save.now() is True and journal.of("save") == [("save", 2, "position 2")]
    assert events.of("checkpoint")[-1]["step"] == 2
    assert save.now() is True and len(journal.of("save")) == 1
    steps(3, 4)  # due
    assert save.now() is True and [entry[1] for entry in journal.of("save")] == [2, 4]
    steps(5, skip="not finite")
    assert save.now() is False and len(journal.of("save")) == 2


def test_a_save_that_failed_is_made_again_at_the_end_of_a_job(tmp_path):
    journal = Journal()
    steps, events, checkpoints = saver(tmp_path, journal, fails=[4])
    steps(4)
    assert journal.of("save") == [("save", 4, "position 4")]
    assert steps.save.now() is False, "begun again, and failed again"
    assert [step for _, step, _ in journal.of("save")] == [4, 4]
    assert steps.save.now() is False
    checkpoints.fails = []
    assert steps.save.now() is True and steps.save.now() is True
    assert [step for _, step, _ in journal.of("save")] == [4, 4, 4, 4]
    assert len(events.of("checkpoint_failed")) == 3


@pytest.mark.parametrize(
    ("step", "every", "made"), [(6, 3, True), (0, 3, False), (5, 3, False), (6, 0, False)]
)
def test_an_export_whose_writer_was_killed_is_made_up_for(tmp_path, monkeypatch, step, every, made):
    written = []
    monkeypatch.setattr(saving, "save_hf", lambda folder, *_, write: written.append(folder))
    settings = {"actor__save_hf_every": every} if every else {}
    steps, events, _ = saver(tmp_path, Journal(), world=SoloWorld(), step=step, **settings)
    steps.save.make_up()
    hf = RunPaths(tmp_path).hf(step)
    assert written == [hf] * made and len(events.of("export")) == made
    hf.mkdir(parents=True)
    steps.save.make_up()
    assert len(written) == made, "it is there"


class World:
    """Two ranks; this one hears what the test says of the other."""

    size = 2

    def __init__(self, rank=0):
        self.rank, self.other = rank, _SaveState(True, None, None)

    def allgather(self, mine):
        return [mine, self.other] if self.rank == 0 else [self.other, mine]


class Source:
    step = 6

    def checkpoint_part(self, *, copy):
        return CheckpointPart({"weight": "12345"})


def begin(folder, world, publish=lambda: None):
    save = PendingSave.begin(Source(), folder / "draft", world, publish, copy=True, timeout_s=20)
    assert save._ended.wait(20)
    return save


def test_a_save_is_not_done_while_a_rank_still_writes_from_its_copy(tmp_path):
    world = World()
    save = begin(tmp_path, world)
    world.other = _SaveState(False, None, None)
    assert save.poll() is None
    world.other = _SaveState(True, None, None)
    saved = save.poll()
    assert (saved.step, saved.num_bytes, saved.failure) == (6, 5, None)


def test_another_rank_takes_what_rank_0_says_and_publishes_nothing(tmp_path):
    world, published = World(rank=1), []
    save = begin(tmp_path, world, lambda: published.append(True))
    assert save.poll() is None  # rank 0 has not published it yet
    world.other = _SaveState(True, None, done := Saved(6, num_bytes=10))
    assert save.poll() is done and save.wait() is done
    assert published == []


@pytest.mark.parametrize("error", [CheckpointError("disk full"), FencedError("took over")])
def test_a_failure_of_another_rank_is_everybodys_and_a_fence_ends_the_actor(tmp_path, error):
    world = World()
    save = begin(tmp_path, world)
    world.other = _SaveState(True, error, None)
    if isinstance(error, FencedError):
        with pytest.raises(FencedError):
            save.poll()
    else:
        assert str(save.poll()) == "disk full"
    assert save._cancelled.is_set()
