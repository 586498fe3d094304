"""The two jobs of a run that are apart: who may give its nodes back, and what is refused."""

import itertools
import subprocess
import time
from collections import deque
from typing import NamedTuple

import fake_slurm
import pytest
from job_trees import job_of

from relax_hpc.bus import layout
from relax_hpc.bus.credits import CreditWriter
from relax_hpc.config.run import RunConfig
from relax_hpc.errors import ConfigError
from relax_hpc.launch import holder as queue
from relax_hpc.launch import placement, record, requeue, states, submit
from relax_hpc.launch.holder import Holder, SeenJob, next_move
from relax_hpc.launch.record import LaunchedComponent, LaunchRecord
from relax_hpc.launch.supervision import SUPERVISION
from relax_hpc.runs import logs, status
from relax_hpc.runs.cancel import cancel
from relax_hpc.runtime.files.records import read_json, write_json
from relax_hpc.runtime.paths import RunPaths

SIDES = ("sampling", "training")


def job(**sections):
    """A job whose sides are apart; `weights__transport="files"` sets weights.transport."""
    apart = {"layout": "separate", "advanced": {"idle_s": 60}}
    return job_of(
        **{"schedule__num_steps": 4, "weights__transport": "files", "launch": apart} | sections
    )


class Side(NamedTuple):
    step: int = 0
    """The next of its steps; after the last of them it is to be held."""
    attempt: int = 0
    is_held: bool = False
    flag: int | None = None
    """Attempt that its record names."""
    read: int | None = None
    """What it has read of the other's."""


HOLD = 3


def after(world, number):
    """The worlds that one step of a side, or the end of its holder, can lead to."""
    me, other = world[number], world[1 - number]
    anew = me._replace(step=0, read=None)
    if me.is_held:
        return
    if 0 < me.step < HOLD:
        yield anew, other  # killed; the next one begins anew
    if me.step == 0:
        yield me._replace(step=1, flag=me.attempt), other
    elif me.step == 1:
        yield me._replace(step=2, read=other.flag), other
    elif me.step == HOLD:
        yield me._replace(step=0, attempt=me.attempt + 1, is_held=True), other
    else:
        seen = SeenJob("held" if other.is_held else "active", str(other.attempt))
        move = next_move(SIDES[number], seen, None if me.read is None else str(me.read))
        yield {
            "hold": (anew._replace(step=HOLD), other),
            "release": (anew, other._replace(is_held=False)),
            "yield": (anew._replace(flag=None), other),
        }.get(move, (anew, other))


def worlds(most=3):
    """Every world that can come to be, with those that come right after it."""
    start = (Side(), Side())
    found, left = {}, deque([start])
    while left:
        world = left.popleft()
        if world in found:
            continue
        found[world] = []
        for number in (0, 1):
            for mine, other in after(world, number):
                then = (mine, other) if number == 0 else (other, mine)
                if max(each.attempt for each in then) <= most:
                    found[world].append(then)
                    left.append(then)
    return found


def test_two_sides_are_never_held_at_once_in_whatever_order_they_and_their_ends_come():
    found = worlds()
    assert len(found) > 300, "it does look"
    assert not [world for world in found if all(each.is_held for each in world)]


@pytest.mark.parametrize("number", [0, 1])
def test_from_everywhere_each_side_can_still_get_to_give_its_nodes_back(number):
    found = worlds(most=4)
    good = {w for w in found if w[number].is_held}
    grown = True
    while grown:
        before = len(good)
        good |= {w for w, then in found.items() if good.intersection(then)}
        grown = len(good) > before
    young = {w for w in found if max(each.attempt for each in w) <= 2}
    assert young and young <= good


HETJOB = (
    "JobId=8 HetJobId=8 HetJobOffset=0 JobName=r Priority={priority} Nice=0 JobState={state} "
    "Reason={reason} Dependency=(null) Requeue=1 Restarts=2 BatchFlag=1\n"
    "JobId=9 HetJobId=8 HetJobOffset=1 JobName=r Priority=5 JobState=RUNNING Restarts=0\n"
)


@pytest.mark.parametrize(
    ("state", "priority", "reason", "queued"),
    [
        ("RUNNING", 0, "None", "active"),
        ("PENDING", 0, "job_requeued_in_held_state", "held"),
        ("PENDING", 4294901756, "Resources", "active"),
        ("COMPLETING", 0, "job_requeued_in_held_state", "held"),
        ("COMPLETING", 7, "None", "active"),
        ("FAILED", 7, "NonZeroExitCode", "ended"),
    ],
)
def test_a_job_is_held_if_it_waits_or_ends_and_has_no_priority(state, priority, reason, queued):
    text = HETJOB.format(state=state, priority=priority, reason=reason)
    assert queue.parse("8", text) == SeenJob(queued, "8.2")


def test_a_job_that_slurm_has_forgotten_has_ended_and_one_it_says_nothing_of_may_live(monkeypatch):
    said = subprocess.CompletedProcess([], 1, "", "slurm_load_jobs error: Invalid job id specified")
    monkeypatch.setattr(queue, "output_of", lambda _: said)
    assert queue.SlurmQueue().look("8").queued == "ended"
    said.stderr = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
    assert queue.SlurmQueue().look("8").queued == "unknown"


class Slurm:
    """The other job, and what was asked of it."""

    def __init__(self, queued="active", attempt="8.0"):
        self.seen, self.released = SeenJob(queued, attempt), []

    def look(self, job_id):
        return self.seen

    def release(self, job_id):
        self.released.append(job_id)
        self.seen = SeenJob("active", self.seen.attempt)
        return True


class Clock:
    """The holder's; whoever sleeps makes it go on."""

    now, time = 1000.0, staticmethod(time.time)

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


CLOCK, SINCE = Clock(), itertools.count(1)


class Run(NamedTuple):
    fake: fake_slurm.FakeSlurm
    paths: RunPaths
    config: RunConfig

    def holder(self, idle_s=0, slurm=None, side="sampling"):
        """Its task has had nothing to do for so long; 0 if none has said so."""
        job_id, task = {"sampling": ("7", "rollout-0"), "training": ("8", "actor-0")}[side]
        holder = Holder(self.config, self.paths, side, job_id, slurm or Slurm())
        if idle_s:
            idle_for(holder, idle_s, task)
        return holder


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run of job 7, which samples, and job 8, which trains; both in their first attempt."""
    monkeypatch.setattr("relax_hpc.launch.holder.time", CLOCK)
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    fake = fake_slurm.make(tmp_path, monkeypatch)
    paths, config = RunPaths(fake.run_dir), job(run_root=str(fake.run_dir.parent))
    write_json(paths.config, config.model_dump(mode="json"))
    components = tuple(
        LaunchedComponent(name, job_id, 1, paths.submission / name)
        for name, job_id in (("rollout", "7"), ("actor", "8+0"), ("reference", "8+1"))
    )
    record.write(paths, LaunchRecord("slurm", "7", components, 1.0, None), {})
    layout.create(paths.bus, ["rollout-0"], {})
    yield Run(fake, paths, config)
    states.has_accounting.cache_clear()


def idle_for(holder, seconds, task="rollout-0"):
    """A task of this holder says that it has nothing to do, so many seconds ago; None if it has."""
    since = None if seconds is None else next(SINCE)
    write_json(holder._paths.idle(holder._attempt, task), {"since": since})
    holder.idle_s()
    CLOCK.now += seconds or 0


def test_one_without_work_starts_the_other_at_once_and_goes_after_a_while(run):
    fake, paths, _ = run
    slurm = Slurm("held", "8.1")
    holder = run.holder(5, slurm)
    assert holder.tick() is None and slurm.released == ["8"]
    assert not fake.asked("scontrol"), "not as long as launch.advanced.idle_s"
    idle_for(holder, 61)
    assert holder.tick() == "hold"
    assert fake.asked("scontrol") == ["scontrol requeuehold 7"]
    assert read_json(paths.away("sampling")) == {"attempt": "7.0"}
    assert read_json(paths.verdict)["what"] == "requeued"
    assert holder.tick() == "stay", "until Slurm ends this process; it may be released by then"
    assert len(fake.asked("scontrol")) == 1


def test_it_raises_its_flag_before_it_looks_and_lowers_it_when_there_is_work(run):
    paths, seen = run.paths, []

    class Looks(Slurm):
        def look(self, job_id):
            seen.append(paths.away("sampling").exists())
            return super().look(job_id)

    holder = run.holder(slurm=Looks())
    write_json(paths.away("training"), {"attempt": "8.0"})
    idle_for(holder, 61)
    assert holder.tick() == "stay" and seen and all(seen)
    idle_for(holder, None)
    assert holder.tick() is None and not paths.away("sampling").exists()


def test_the_trainer_yields_to_a_side_that_is_about_to_go(run):
    fake, paths, _ = run
    slurm = Slurm(attempt="7.0")
    write_json(paths.away("sampling"), {"attempt": "7.0"})
    trainer = run.holder(61, slurm, "training")
    assert trainer.tick() == "yield" and not paths.away("training").exists()
    slurm.seen = SeenJob("held", "7.1")  # it has gone
    assert trainer.tick() == "release" and slurm.released == ["7"]
    slurm.seen = SeenJob("active", "7.1")
    assert trainer.tick() == "hold" and fake.asked("scontrol") == ["scontrol requeuehold 8"]


def test_it_is_held_only_once_the_trainer_has_saved(run, monkeypatch):
    fake, paths, _ = run
    saves = [paths.saves("8.0"), paths.critic_saves("8.0")]
    for each in saves:
        write_json(each, {"step": None})
    slept = []

    def sleep(_):
        assert not fake.asked("scontrol") and requeue.is_unsaved(saves)
        assert read_json(paths.ending("8.0"))["hold"], "the tasks are told"
        write_json(saves[len(slept)], {"step": 3})
        slept.append(1)

    monkeypatch.setattr(CLOCK, "sleep", sleep)
    holder = run.holder(61, Slurm(attempt="7.0"), "training")
    assert holder.tick() == "hold" and len(slept) == 2
    assert fake.asked("scontrol") == ["scontrol requeuehold 8"]


def test_a_holder_that_was_killed_on_the_way_is_followed_by_one_that_holds(run):
    requeue.announce("7", run.paths.root, hold=True)
    holder = run.holder()
    idle_for(holder, None)
    assert holder.tick() == "hold"
    assert run.fake.asked("scontrol") == ["scontrol requeuehold 7"]


def test_where_slurm_refuses_all_go_on_and_it_is_not_asked_again_at_once(run):
    fake, paths, _ = run
    script = fake.folder / "scontrol"
    script.write_text(f"{script.read_text()}echo 'Requested operation is disabled' >&2; exit 1\n")
    holder = run.holder(61)
    holder.tick()
    assert "refused" in read_json(paths.ending("7.0")) and not paths.away("sampling").exists()
    assert holder.tick() is None and len(fake.asked("scontrol")) == 1


def test_nobody_goes_for_one_that_slurm_says_nothing_of_or_that_has_ended(run):
    holder = run.holder(61, Slurm("ended"))
    assert [holder.tick(), holder.tick()] == ["stay", "end"], "not at the first look"
    assert run.holder(61, Slurm("unknown")).tick() == "stay"


def test_nobody_is_held_once_nothing_more_will_be_trained(run):
    fake, paths, _ = run
    writer = CreditWriter(paths.bus, 1)
    holder = run.holder(61)
    writer.write(writer.inherited._replace(step=4, finished=True))
    writer.close()
    assert holder.tick() is None and not fake.asked("scontrol")


def test_the_end_of_one_side_starts_the_other_if_it_is_held(run):
    for queued, released in (("held", ["8"]), ("active", []), ("ended", [])):
        slurm = Slurm(queued)
        run.holder(slurm=slurm).leave()
        assert slurm.released == released


def test_every_host_of_engines_has_to_be_idle_and_the_last_of_them_counts(run):
    config = job(engines__rollout__count=2, engines__rollout__nodes_per_engine=2,
                 engines__rollout__kind="sglang", engines__rollout__resources__nodes=4)  # fmt: skip
    holder = Holder(config, run.paths, "sampling", "7", Slurm())
    idle_for(holder, 100, "rollout-0")
    assert holder.idle_s() is None
    idle_for(holder, 30, "rollout-2")
    assert holder.idle_s() == 30


@pytest.mark.parametrize("ahead_s", [-86400, 86400])
def test_how_long_a_side_is_idle_is_by_the_clock_of_its_holder_alone(run, ahead_s):
    fake, paths, _ = run
    record, seen = paths.idle("7.0", "rollout-0"), []
    holder = run.holder()
    for since in (1, 1, None, 100, 100, 107):  # 107: it had work for a moment, between two looks
        write_json(record, {"since": since and time.time() // 1e6 * 1e6 + since + ahead_s})
        seen.append(holder.idle_s())
        assert holder.tick() is None
        CLOCK.now += 59
    assert seen == [0, 59, None, 0, 59, 0] and not fake.asked("scontrol")
    CLOCK.now += 1
    assert holder.tick() == "hold"


def test_each_job_has_the_components_of_its_side_and_starts_a_holder(tmp_path):
    config = job(
        run_root=str(tmp_path), reference__placement="own", engines__judge={"count": 1},
        algorithm__kl={"name": "k3", "coefficient": 0.1},
    )  # fmt: skip
    script = submit.plan("slurm", config, placement.place(config), 1).script
    sampling, training = script.split("#!/bin/bash\n")[1:]
    for text, side, names in (
        (sampling, "sampling", {"rollout", "judge"}),
        (training, "training", {"actor", "reference"}),
    ):
        every = ("rollout", "judge", "actor", "reference")
        assert {name for name in every if f": {name}\n" in text} == names
        assert f"--side {side} " in text


@pytest.mark.parametrize("ends", ["exit 3", "exec sleep 9 # TERM"])
def test_a_job_whose_holder_is_given_up_fails_and_one_that_is_told_to_end_does_not(tmp_path, ends):
    config = job(run_root=str(tmp_path))
    text = submit.plan("slurm", config, placement.place(config), 1).script.split("#!/bin/bash")[1]
    [line] = [each for each in text.splitlines() if "serve holder" in each]
    line = line.replace(line[line.index("serve holder") : line.index(" || {")], "serve holder fake")
    settings = "max_restarts=0 restart_delays_s=(0) restart_window_s=9 verdict=()"
    lines = [
        settings, SUPERVISION, f"fake() {{ {ends}\n}}", "trap 'echo failed' USR1", line,
        'await_end "$server"',
    ]  # fmt: skip
    if "TERM" in ends:
        lines.insert(-1, 'sleep 0.3; kill "$server"')
    done = subprocess.run(["bash", "-c", "\n".join(lines)], capture_output=True, text=True)
    assert ("failed" in done.stdout) == (ends == "exit 3"), done


def test_whoever_serves_a_script_that_was_killed_does_not_wait_to_serve_it_again():
    lines = [
        "max_restarts=9 restart_delays_s=(60) restart_window_s=9 verdict=()", SUPERVISION,
        'fake() { while kill -0 "$$" 2>/dev/null; do sleep 0.1; done; exit 1; }',
        "serve holder fake &", 'kill -KILL "$$"',
    ]  # fmt: skip
    outer = ["bash", "-c", 'bash -c "$1"; exit', "-", "\n".join(lines)]  # it waits for the script
    done = subprocess.run(outer, capture_output=True, timeout=20)  # and this for all who write here
    assert done.returncode == 128 + 9 and not done.stdout


def test_if_the_second_job_is_refused_the_first_is_cancelled(tmp_path, monkeypatch):
    fake = fake_slurm.make(tmp_path, monkeypatch)
    script = fake.folder / "sbatch"
    text = script.read_text().replace("sleep 0.1", "[ $(grep -c ^sbatch asked) -eq 1 ] || exit 1")
    script.write_text(text)
    config = job(run_root=str(tmp_path))
    paths = RunPaths(tmp_path / "run")
    paths.submission.mkdir(parents=True)
    planned = submit.plan("slurm", config, placement.place(config), 1)
    with pytest.raises(Exception, match="sbatch"):
        submit.start(planned, config, paths)
    assert fake.asked("scancel") == ["scancel 9"]
    states.has_accounting.cache_clear()


@pytest.mark.parametrize(
    ("lines", "state"),
    [
        (("7|RUNNING", "8+0|PENDING|||job requeued in held state|N/A|", "8+1|PENDING"), "RUNNING"),
        (("7|FAILED", "8+0|RUNNING", "8+1|RUNNING"), "RUNNING"),
        (("7|FAILED", "8+0|COMPLETED", "8+1|COMPLETED"), "FAILED"),
    ],
)
def test_a_run_is_as_the_side_that_is_at_work(run, lines, state):
    fake, paths, _ = run
    fake.says(*lines)
    [launch] = status.of_run(paths.root)
    assert launch.state == state
    if "held" in "".join(lines):
        assert launch.components[1].state == "REQUEUE_HOLD" and not launch.reason


def test_cancel_ends_both_and_logs_are_of_both(run):
    fake, paths, _ = run
    fake.says("7|RUNNING", "8+0|PENDING", "8+1|PENDING")
    said = []
    cancel(paths.root, said.append)
    assert fake.asked("scancel") == ["scancel 7", "scancel 8"]
    assert said == ["job 7 and 8: cancelled, was RUNNING"]
    files = {path.name for _, path in logs.sources(paths.root)}
    assert {"7_batch.log", "8_batch.log", "7_0_log.err", "8_0_log.err"} <= files


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weights__transport": "collective"}, "weights.transport = 'collective': .*'files'"),
        ({"engines__rollout__placement": "actor", "schedule__max_staleness": 0}, ".*use 'own'"),
        ({"weights__quantize": "fp8", "engines__rollout__kind": "sglang"}, ".*use 'none'"),
    ],
)
def test_what_needs_both_sides_at_once_is_refused_with_a_remedy(settings, message):
    with pytest.raises(ConfigError, match=message):
        job(**settings)
