"""Whether a job lives, may live or has ended, and what is done with it: no second one beside it."""

import errno
import json
import os
import signal
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor

import fake_slurm
import pytest
from typer.testing import CliRunner

from relax_hpc.cli.main import app
from relax_hpc.config.job_file import read_resolved
from relax_hpc.errors import ConfigError, LaunchError
from relax_hpc.launch import record, script, states
from relax_hpc.launch.placement import place
from relax_hpc.runs import status, verdict
from relax_hpc.runs.cancel import cancel
from relax_hpc.runs.changes import change
from relax_hpc.runs.resume import resume
from relax_hpc.runtime.files.records import write_json
from relax_hpc.runtime.paths import RunPaths


@pytest.fixture
def resumed(tmp_path, monkeypatch):
    """A run that was resumed twice: as job 5, 6 and 7."""
    yield fake_slurm.make(tmp_path, monkeypatch, earlier=("5", "6"))
    states.has_accounting.cache_clear()


def gc(slurm, *options):
    answer = CliRunner().invoke(app, ["bus", "gc", str(slurm.run_dir), "--dry-run", *options])
    return str(answer.exception)


def refused(run, words, **asked):
    """The line with which a resume is refused."""
    with pytest.raises(ConfigError, match=words) as error:
        resume(run.run_dir, **asked)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("word", ["PENDING", "COMPLETING", "SUSPENDED", "REQUEUE_HOLD"])
def test_in_every_state_in_which_slurm_may_run_a_job_no_second_one_is_started(slurm, word):
    slurm.leaves(143)  # of an attempt that Slurm requeued
    slurm.says(f"7+0|{word}", "7+1|COMPLETED")
    assert status.job_state(slurm.run_dir) == word
    advice = "it is about to end" if word == "COMPLETING" else "cancel it first"
    refused(slurm, f"is {word.lower()} as job 7; {advice}", ended=True)
    assert f"is {word}, and its components delete what they own" in gc(slurm, "--ended")
    assert slurm.asked("sbatch") == []


@pytest.mark.parametrize("word", ["OUT_OF_MEMORY", "NODE_FAIL", "CANCELLED by 0"])
def test_from_every_state_in_which_a_job_has_ended_the_run_goes_on(slurm, word):
    slurm.says(f"7+0|{word}", "7+1|COMPLETED")
    assert status.job_state(slurm.run_dir) == word.split()[0]
    assert resume(slurm.run_dir).job_id == "9"
    launched = record.read(slurm.run_dir)
    assert [(each.number, each.leader) for each in launched.all] == [(2, "9"), (1, "7")]


def test_a_job_that_was_requeued_without_a_component_waits_for_somebody_to_cancel_it(slurm):
    """Slurm never starts it, and gives no reason."""
    slurm.says("7+0|PENDING|", "7+1|CANCELLED|n2")
    found = status.collect(slurm.run_dir)
    assert found.state == "PENDING"
    assert states.why(found.queue).startswith("never starts, since a component was cancelled")
    line = "{}|PENDING||7|launch failed requeued held|N/A|5:00"  # as Slurm 22.05 says it
    slurm.says(*map(line.format, ("7+0", "7+1")))
    held = status.collect(slurm.run_dir).queue
    assert states.why(held).startswith("is held, since a node could not be prepared for it")


def test_a_word_that_is_not_known_counts_as_alive_until_somebody_says_otherwise(slurm):
    slurm.says("7+0|FROBNICATING", "7+1|FAILED")
    assert status.job_state(slurm.run_dir) == "FROBNICATING"
    refused(slurm, "Slurm says FROBNICATING of job 7.*add --ended")
    assert "add --ended" in gc(slurm)
    assert resume(slurm.run_dir, ended=True).job_id == "9"


def test_a_job_lives_as_long_as_slurm_does_not_answer_whatever_an_attempt_left(slurm):
    slurm.is_silent()
    for code in (None, 143, 1):
        if code is not None:
            slurm.leaves(code)
        found = status.collect(slurm.run_dir)
        assert found.state == "UNREACHABLE" and found.silence.count("\n") == 0
        assert not states.is_over(found.state)
        error = refused(slurm, "whether job 7 still runs is not known")
        assert "add --ended" in error
        assert "whether job 7 still runs is not known" in gc(slurm)
    assert slurm.asked("sbatch") == []
    slurm.leaves(0)  # the script's own word, which a requeue cannot follow
    assert status.job_state(slurm.run_dir) == "COMPLETED"


def test_how_a_job_ended_that_slurm_has_forgotten_is_what_its_script_left(slurm):
    assert status.job_state(slurm.run_dir) == "UNKNOWN" and states.is_over("UNKNOWN")
    refused(slurm, r"Slurm does not know job 7 any more.*add --ended")
    slurm.leaves(143)
    assert status.job_state(slurm.run_dir) == "CANCELLED"
    slurm.leaves(1)
    assert status.job_state(slurm.run_dir) == "FAILED"


def test_what_a_site_has_sbatch_print_is_no_part_of_the_id(slurm):
    slurm.leaves(1)
    slurm.greets("--> Verifying valid submit host ...OK\n3 nodes are free\n--> OK\n")
    assert resume(slurm.run_dir).job_id == "9"


def test_of_those_who_resume_a_run_at_the_same_time_one_starts_it(slurm):
    slurm.leaves(1)
    together = threading.Barrier(4)

    def run(_):
        together.wait()
        try:
            return resume(slurm.run_dir).job_id
        except ConfigError as error:
            return "refused" if "else is starting it" in str(error) else str(error)

    with ThreadPoolExecutor(4) as pool:
        assert sorted(pool.map(run, range(4))) == ["9", "refused", "refused", "refused"]
    assert len(slurm.asked("sbatch")) == 1


def test_who_dies_while_resuming_holds_up_only_who_is_not_sure(slurm):
    slurm.leaves(1)
    with subprocess.Popen(["sleep", "60"]) as other:
        paths, mine = RunPaths(slurm.run_dir), record.ProcessId.of(other.pid)
        claim = {"time": 0.0, "node": record.socket.gethostname(), "pid": mine.pid}
        write_json(paths.launch_claim(2), claim | {"start_time": mine.start_time})
        for ended in (False, True):  # it lives
            refused(slurm, "somebody else is starting it", ended=ended)
        other.kill()
    refused(slurm, "somebody else is starting it")
    assert resume(slurm.run_dir, ended=True).job_id == "9"
    assert record.read(slurm.run_dir).number == 3


def test_a_complete_run_goes_on_with_more_steps_and_after_that_like_any_other(slurm, monkeypatch):
    for name in ("check_partitions", "check_limits", "Cluster.nodes"):
        monkeypatch.setattr(f"relax_hpc.launch.cluster.{name}", lambda *_: None)
    slurm.leaves(0)
    num_steps = read_resolved(RunPaths(slurm.run_dir).config).num_steps
    refused(slurm, f"--set schedule.num_steps={2 * num_steps}, or")
    assert slurm.asked("sbatch") == []
    more = [f"schedule.num_steps={num_steps + 1}"]
    assert resume(slurm.run_dir, overrides=more).job_id == "9"
    assert read_resolved(RunPaths(slurm.run_dir).config).num_steps == num_steps + 1
    slurm.says("9+0|FAILED", "9+1|FAILED")
    assert resume(slurm.run_dir).number == 3


@pytest.mark.parametrize(
    ("saved", "still", "said"), [
        (4, 0, "over all of them: 0.818 at step 5, 0.714 over 8"),
        (8, 2, "over all of them: 0.667 at step 9, after 0.5 at step 8"),
    ],
)  # fmt: skip
def test_what_more_steps_make_of_a_learning_rate_that_falls_is_told(
    slurm, monkeypatch, saved, still, said
):
    config = read_resolved(RunPaths(slurm.run_dir).config)
    monkeypatch.setattr(type(config), "steps_of_critic_alone", still)
    rate = {"lr": 1.0, "warmup_steps": 0, "final_lr_fraction": 0.5, "decay": "linear"}
    tree = config.model_dump(mode="json")
    tree["actor"]["optimizer"] |= rate
    tree["schedule"]["num_steps"] = 8
    (RunPaths(slurm.run_dir).checkpoints / f"step_{saved:08}").mkdir(parents=True)
    _, [line], _ = change(type(config).model_validate(tree), ["schedule.num_steps=12"])
    assert line.startswith("schedule.num_steps: 8 -> 12; the learning rate falls ")
    assert line.endswith(said), line


def test_what_sbatch_refused_can_be_resumed_again(slurm):
    slurm.leaves(1)
    slurm.refuses("sbatch: error: Batch job submission failed: Invalid account\nsbatch: help\n")
    with pytest.raises(LaunchError, match="failed: Invalid account; help; change its resources"):
        resume(slurm.run_dir)
    slurm.refuses("sbatch: error: Unable to contact slurm controller (connect failure)\n")
    with pytest.raises(LaunchError, match=r"failure\); submit where Slurm answers"):
        resume(slurm.run_dir)
    assert not RunPaths(slurm.run_dir).launch_claim(2).exists()
    (slurm.folder / "refusal").unlink()
    assert resume(slurm.run_dir).job_id == "9"


# O1: one who prints in latin-1, and errors of classes that nobody names
ODD = [UnicodeError("odd"), OSError(errno.EIO, "bad"), KeyboardInterrupt(), SystemExit(143)]


@pytest.mark.parametrize(
    ("at", "error"),
    zip(["relax_hpc.launch.record.write", "pathlib.Path.rename"] * 2, ODD, strict=True),
)
def test_whatever_fails_between_sbatchs_answer_and_the_record_cancels_the_job(
    slurm, monkeypatch, at, error
):
    slurm.leaves(1)
    slurm.greets("Projet pr\udce9par\udce9\n")

    def fail(*_, **__):
        assert slurm.asked("sbatch")
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(at, fail)
        with pytest.raises((LaunchError, type(error))):
            resume(slurm.run_dir)
    assert slurm.asked("scancel") == ["scancel 9"]
    assert record.read(slurm.run_dir).leader == "7"
    assert resume(slurm.run_dir).job_id == "9", "nothing of the attempt is in the way"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_job_is_cancelled_whose_sbatch_was_asked_as_ctrl_c_came(slurm, number):  # O1
    slurm.leaves(1)
    sbatch = slurm.folder / "sbatch"
    told = f'echo "9+0|${{@: -1}}" > commands; kill -{number} {os.getpid()}; sleep 20\n'
    sbatch.write_text(sbatch.read_text().replace("sleep 0.1\n", told))
    with pytest.raises(BaseException, match=r"143|^$"):
        resume(slurm.run_dir)
    assert slurm.asked("scancel") == ["scancel 9"]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


LOST = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation\n"


@pytest.mark.parametrize("is_asked_in_vain", [False, True])
def test_a_job_that_was_queued_though_sbatch_failed_is_found_or_else_nobody_starts_another(
    slurm, is_asked_in_vain
):
    slurm.leaves(1)
    slurm.refuses(LOST)
    (slurm.folder / "lost").touch()
    squeue = slurm.folder / "squeue"
    if not is_asked_in_vain:
        assert resume(slurm.run_dir).job_id == record.read(slurm.run_dir).leader == "9"
        return
    text = squeue.read_text().replace("cat commands; exit 0", f"echo '{LOST}' >&2; exit 1")
    squeue.write_text(text)
    with pytest.raises(LaunchError, match="look at squeue --me, and scancel what is there"):
        resume(slurm.run_dir)
    refused(slurm, "somebody else is starting it")
    with pytest.raises(LaunchError, match=r"it is being started, see .*launch-2\.json"):
        cancel(slurm.run_dir)


def test_cancel_ends_every_job_that_the_run_ever_started_and_says_what_each_was(resumed):
    resumed.says("5+0|RUNNING", "5+1|RUNNING", "6+0|FAILED", "6+1|FAILED", "7+0|SUSPENDED")
    found = status.collect(resumed.run_dir)
    assert (found.state, found.job_id, found.earlier) == ("SUSPENDED", "7", {"5": "RUNNING"})
    said = []
    cancel(resumed.run_dir, said.append)
    assert said == [
        "job 7: cancelled, was SUSPENDED",
        "job 6: had ended before, FAILED",
        "job 5: cancelled, was RUNNING",
    ]
    assert resumed.asked("scancel") == ["scancel 7", "scancel 5"]


def test_tasks_are_told_before_scancel_that_they_must_not_have_the_job_requeued(slurm):
    slurm.says("7+0|RUNNING", "7+1|RUNNING")
    told, scancel = RunPaths(slurm.run_dir).cancellation("7"), slurm.folder / "scancel"
    scancel.write_text(f"{scancel.read_text()}[ -e {told} ] && touch told\n")
    cancel(slurm.run_dir)
    assert (slurm.folder / "told").exists()
    assert resume(slurm.run_dir).job_id == "9"
    assert not RunPaths(slurm.run_dir).cancellation("9").exists()


def test_a_job_that_is_requeued_as_it_is_cancelled_is_cancelled_again(slurm):
    slurm.says("7+0|RUNNING", "7+1|RUNNING")
    slurm.brings_back("PENDING", "RUNNING", "COMPLETING")
    said = []
    cancel(slurm.run_dir, said.append)
    assert said == ["job 7: cancelled, was RUNNING"]
    assert slurm.asked("scancel") == ["scancel 7"] * 3
    assert verdict.read(slurm.run_dir).what == "cancelled"


def test_cancel_does_not_say_cancelled_of_a_job_that_lives_on_or_may(slurm):
    slurm.says("7+0|RUNNING", "7+1|RUNNING")
    slurm.brings_back(*["PENDING"] * 9)
    said = []
    with pytest.raises(LaunchError, match=r"job 7 may still run: 7\+0 is PENDING again after"):
        cancel(slurm.run_dir, said.append)
    scancel = slurm.folder / "scancel"
    scancel.write_text(f"{scancel.read_text()}echo '{fake_slurm.DEAD}' > silent\n")
    with pytest.raises(LaunchError, match=r"after scancel \(squeue: .*\); cancel it again"):
        cancel(slurm.run_dir, said.append)
    assert said == [] and verdict.read(slurm.run_dir) is None


def test_an_earlier_job_that_lives_keeps_the_run_from_being_started_again(resumed):
    resumed.says("5+0|PENDING", "7+0|FAILED", "7+1|FAILED")
    resumed.leaves(1, "6")
    assert status.job_state(resumed.run_dir) == "PENDING"
    refused(resumed, "is pending as job 5; cancel it first")


def test_cancel_says_in_one_line_what_it_could_not_reach(resumed):
    resumed.leaves(0, "7")
    resumed.is_silent(fake_slurm.NO_CONF)
    answer = CliRunner().invoke(app, ["cancel", str(resumed.run_dir)])
    assert answer.exit_code != 0 and answer.output == "job 7: is complete, nothing is cancelled\n"
    said = str(answer.exception)
    assert said.count("may still run: scancel: ") == 2 and "job 6" in said and "job 5" in said
    assert "\n" not in said and "resources" not in said


def test_a_local_job_of_another_machine_is_not_taken_for_one_that_has_ended(slurm):
    paths = RunPaths(slurm.run_dir)
    tree = json.loads(paths.launch_record.read_text())
    controller = {"pid": 1, "start_time": 0.0}
    write_json(paths.launch_record, tree | {"controller": controller, "node": "login2"})
    found = status.collect(slurm.run_dir)
    assert found.state == "UNREACHABLE" and "it runs on login2" in found.silence
    refused(slurm, "it runs on login2", local=True)
    with pytest.raises(LaunchError, match="cancel it there"):
        cancel(slurm.run_dir)


def test_a_job_that_begins_after_the_run_was_started_anew_ends_at_once(slurm, tmp_path):
    claim = tmp_path / "it's claimed"
    job = script.Job("toy", tmp_path, next_claim=claim)
    components = place(read_resolved(RunPaths(slurm.run_dir).config))
    text = script.slurm_script(job, components)
    head = text.split("max_restarts=")[0] + "echo goes on; exit 0"
    left = script.exit_code_file(job.folder, "7")
    left.parent.mkdir()
    left.write_text("143\n")
    cancelled = RunPaths(tmp_path).cancellation("7")
    cancelled.parent.mkdir(exist_ok=True)
    for told, restarts, said, code in (
        (None, "0", "goes on\n", 0), (claim, "0", "the run was resumed", 1),
        (cancelled, "0", "goes on\n", 0), (cancelled, "1", "the run was cancelled", 1),
    ):  # fmt: skip
        claim.unlink(missing_ok=True)
        if told:
            told.touch()
        slurms = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": restarts}
        done = subprocess.run(["bash", "-c", head], env=slurms, capture_output=True, text=True)
        assert done.stdout.startswith(said) and done.returncode == code
    assert not left.exists(), "143 was the end of an earlier attempt"
