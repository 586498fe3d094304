"""A step that the time limit would cut off is not begun; what can be finished is."""

import time

import fake_slurm
import pytest
from role_fakes import wait_for

from relax_hpc.launch import requeue
from relax_hpc.roles import ending as endings
from relax_hpc.roles.ending import MARGIN_S, Admission, Ending, LastSave
from relax_hpc.runtime.comm.world import SoloWorld
from relax_hpc.runtime.files.records import read_json
from relax_hpc.runtime.paths import RunPaths


class Clock:
    def __init__(self, monkeypatch):
        self.now = 1000.0
        monkeypatch.setattr(endings.time, "monotonic", lambda: self.now)


class End:
    """An allocation that ends at a time of the clock."""

    ahead_s = 0.0

    def __init__(self, clock, at):
        self.clock, self.at, self.announced = clock, at, []

    def compute_left_s(self):
        return None if self.at is None else self.at - self.clock.now

    def announce(self):
        self.announced.append(self.clock.now)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def trained(clock, end, *, seconds, saves=(), waited=0.0):
    """An admission that has seen steps of so many seconds, `waited` of each for its batch."""
    found = Admission(end, lambda: saves)
    for step, took in enumerate([*seconds, waited]):
        found.consider(step)
        if waited:
            clock.now += waited
            found.consider(step)
        clock.now += took - waited
    return found


def test_a_step_begins_if_it_and_its_save_end_in_time_by_the_95th_percentile(clock):
    end = End(clock, None)
    # Twenty steps of which one was slow: the percentile is the 19th.
    seconds = [100.0] * 18 + [110.0, 500.0]
    found = trained(clock, end, seconds=seconds, saves=[7.0, 20.0])
    end.at = clock.now + 110 + 20 + MARGIN_S + 0.5
    found.consider(20)
    assert end.announced == []
    end.at -= 1
    found.consider(20)
    assert end.announced == [clock.now]


def test_while_a_batch_is_waited_for_what_has_gone_by_counts(clock):
    end = End(clock, None)
    found = trained(clock, end, seconds=[100.0, 100.0], waited=60.0)  # 60 of this one, too
    end.at = clock.now + 40 + MARGIN_S + 5
    found.consider(2)
    assert end.announced == []  # as late as it ever was, and the 40 s after it fit in
    clock.now += 5
    found.consider(2)
    assert end.announced == []
    clock.now += 1  # the step's 100 s have not gone by, but it would end 1 s too late
    found.consider(2)
    assert end.announced == [clock.now]


def test_the_work_on_a_batch_is_still_to_come_however_late_it_is(clock):
    end = End(clock, None)
    found = trained(clock, end, seconds=[100.0, 100.0], waited=60.0)
    clock.now += 500
    end.at = clock.now + 40 + MARGIN_S + 0.5
    found.consider(2)
    assert end.announced == []
    end.at -= 1
    found.consider(2)
    assert end.announced == [clock.now]


def test_a_step_that_the_announcement_would_cut_off_is_not_begun(clock):
    """Slurm announces the end, and rollout stops then, whatever would still fit."""
    end = End(clock, None)
    end.ahead_s = 90.0
    found = trained(clock, end, seconds=[100.0, 100.0], saves=[2.0])
    end.at = clock.now + 100 + 90 + 0.5
    found.consider(2)
    assert end.announced == []
    end.at -= 1
    found.consider(2)
    assert end.announced == [clock.now]


def test_a_save_of_the_critic_that_takes_longer_is_waited_for_too(tmp_path, clock):
    paths = RunPaths(tmp_path)
    paths.control.mkdir()
    saves = Saves()
    critic = LastSave(SoloWorld(), Trainer, saves, Ending(paths, "7.0", paths.critic_saves("7.0")))
    saves.times = (70.0, 60.0)
    assert not critic.is_due()  # and says how long its saves take
    actor = Ending(paths, "7.0")
    assert not actor.is_near()
    end = End(clock, None)
    found = Admission(end, lambda: [20.0], actor.critic_save_s)
    for step in range(2):
        found.consider(step)
        clock.now += 100
    end.at = clock.now + 100 + 70 + MARGIN_S + 0.5
    found.consider(2)
    assert end.announced == []
    end.at -= 1
    found.consider(2)
    assert end.announced == [clock.now]


def test_the_first_step_is_tried_in_any_case_and_the_end_is_announced_once(clock):
    end = End(clock, clock.now + 1)
    found = Admission(end, lambda: [50.0])
    found.consider(7)
    assert end.announced == []
    clock.now += 100
    for step in (8, 8, 9):
        found.consider(step)
    assert len(end.announced) == 1


class Trainer:
    step = 3


class Saves:
    times = (1.0,)

    def __init__(self):
        self.saved = []

    def now(self):
        self.saved.append(Trainer.step)
        return True


def test_a_trainer_whose_next_step_does_not_fit_saves_and_has_the_job_requeued(
    tmp_path, monkeypatch
):
    """All parts but Slurm: the limit is squeue's, of the component that ends first."""
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    run = fake_slurm.make(tmp_path, monkeypatch)
    run.says("7+0|RUNNING|n1|7|None|N/A|3:00", "7+1|RUNNING|n2|8|None|N/A|2:30")
    end = requeue.SlurmJobEnd("7", run.run_dir)
    wait_for(lambda: end.compute_left_s() is not None)
    assert 140 < end.compute_left_s() <= 150
    saves, paths = Saves(), RunPaths(run.run_dir)
    ending = Ending(paths, "7.0")
    monkeypatch.setattr(ending, "wait", lambda: None)
    last = LastSave(SoloWorld(), Trainer, saves, ending, end)
    last()
    assert saves.saved == [] and not paths.ending("7.0").exists()
    last._admission._step_times.append(130.0)
    monkeypatch.setattr(ending, "will_save", lambda *_: None)
    last()
    wait_for(lambda: last() or run.asked("scontrol"))
    assert Trainer.step in saves.saved
    assert run.asked("scontrol") == ["scontrol requeue 7"]


def test_a_save_that_needs_more_than_slurms_notice_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    monkeypatch.setattr(requeue, "SIGNAL_AHEAD_S", 0.5)
    run = fake_slurm.make(tmp_path, monkeypatch)
    run.says("7|RUNNING|n1|7|None|N/A|10:00")
    end = requeue.SlurmJobEnd("7", run.run_dir)
    wait_for(lambda: end.compute_left_s() is not None)
    saving = Ending(RunPaths(run.run_dir), "7.0")
    saving.will_save()
    end.announce()
    time.sleep(1.5)
    assert run.asked("scontrol") == [], "far from the end of the allocation"
    assert "asked" not in read_json(RunPaths(run.run_dir).ending("7.0")), "nor will be at once"
    saving.note_saved(3)
    wait_for(lambda: run.asked("scontrol"))
    assert run.asked("scontrol") == ["scontrol requeue 7"]


def test_who_starts_after_an_announcement_asks_in_place_of_who_was_killed(tmp_path, monkeypatch):
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    run = fake_slurm.make(tmp_path, monkeypatch)
    run.says("7|RUNNING|n1|7|None|N/A|10:00")
    requeue.take_over("7", run.run_dir)
    assert run.asked("scontrol") == [], "nothing was announced"
    assert requeue.announce("7", run.run_dir)
    requeue.take_over("7", run.run_dir)
    assert run.asked("scontrol") == ["scontrol requeue 7"]


def test_an_end_that_was_refused_is_not_asked_for_again(tmp_path, monkeypatch):
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    run = fake_slurm.make(tmp_path, monkeypatch)
    assert requeue.announce("7", run.run_dir, refused=True)
    requeue.take_over("7", run.run_dir)
    assert run.asked("scontrol") == []


def test_a_wait_for_a_batch_is_broken_off_when_the_work_on_it_would_not_fit(tmp_path, clock):
    """What rank 0 asks between two looks for groups."""

    class Announced:
        near = False

        def is_near(self):
            return self.near

        def critic_save_s(self):
            return 0.0

        def will_save(self, save_s=0.0):
            pass

    end, ending = End(clock, None), Announced()
    last = LastSave(SoloWorld(), Trainer, Saves(), ending, end)
    Trainer.step = 3
    last()
    clock.now += 50
    Trainer.step = 4
    last()
    end.at = clock.now + 50 + 1 + MARGIN_S
    assert not last.is_due() and end.announced == []
    clock.now += 1
    assert not last.is_due()
    assert end.announced == [clock.now], "and who hears of it says that it is near"
    ending.near = True
    assert last.is_due()
