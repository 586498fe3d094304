"""Messages to a user about a run: its state and why it failed, and in one line what is wrong."""

import itertools
import json
import time

import pytest
from typer.testing import CliRunner

from relax_hpc.cli.main import app
from relax_hpc.errors import RelaxError
from relax_hpc.inference import members
from relax_hpc.inference.members import Member, Roster, RosterEntry
from relax_hpc.launch import script
from relax_hpc.launch.placement import Component
from relax_hpc.runs import report, status, verdict
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.runtime.telemetry.events import EventWriter
from relax_hpc.sections import Resources


@pytest.fixture
def run(slurm):
    return slurm


def cli(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def as_json(run):
    return json.loads(cli("status", run.run_dir, "--json").output)


def refusal(*words):
    """The one line with which a command was refused."""
    answer = cli(*words)
    assert isinstance(answer.exception, RelaxError), (words, answer.output, answer.exception)
    assert "\n" not in str(answer.exception)
    return str(answer.exception)


COMMANDS = ("status", "resume", "cancel", "scale list")
FOREIGN = {
    "empty": "", "list": "[1]", "foreign": '{"a": 1}', "bytes": "\xff", "deep": "[" * 100_000,
}  # fmt: skip


@pytest.mark.parametrize("content", FOREIGN.values(), ids=FOREIGN)
@pytest.mark.parametrize("name", ["run.json", "control/launch.json"])
def test_a_broken_or_foreign_record_is_named_with_what_to_do(run, name, content):
    path = run.run_dir / name
    path.write_bytes(content.encode("latin-1"))
    for command in COMMANDS:
        if (name, command) == ("run.json", "cancel"):
            continue  # it does not need it
        said = refusal(*command.split(), run.run_dir)
        assert said.startswith(f"{path}: is not ") and "restore it" in said
    assert run.asked("sbatch") == run.asked("scancel") == []


BATCH_LOG = """2026-01-01T00:00:00 actor: start 1 ended with exit code 1
2026-01-01T00:00:00 actor: start 2 ended with exit code 3
2026-01-01T00:00:00 actor: failed 2 times, giving up
2026-01-01T00:00:00 rollout: start 1 ended with exit code 137
"""


def fail(run, **events):
    run.says("7+0|FAILED", "7+1|FAILED")
    (run.run_dir / "submission" / "7_batch.log").write_text(BATCH_LOG)
    for role, messages in events.items():
        with EventWriter(RunPaths(run.run_dir).events(role, 2), role, 2) as writer:
            for message in messages:
                writer.emit("error", message=message)


@pytest.mark.parametrize(("kind", "final"), [("RewardError", True), ("KeyError", False)])
def test_where_the_job_or_a_program_is_to_be_corrected_another_run_is_advised(run, kind, final):
    fail(run, actor=[f"{kind}: the reward failed: RewardError: no"])
    said = cli("status", run.run_dir).output
    again = f"relax-hpc resume {run.run_dir}"
    assert (f"  to go on      {again}\n" in said) == (not final)
    assert ("  to go on      relax-hpc submit JOB --set name=NEW, with the job or" in said) == final
    assert (f"  or            {again}, which keeps both as they were" in said) == final


def test_the_last_error_of_a_run_does_not_act_on_the_terminal(run):
    fail(run, actor=["ValueError: \x1b]0;owned\x07\x1b[2J\x9b31m\u202e"])
    shown = [cli(command, run.run_dir).output for command in ("status", "watch")]
    for said in (*shown, report.text(status.collect(run.run_dir))):
        assert "␛]0;owned␇␛[2J" in said.replace("\n", "")
        assert not {*said} & {*"\x1b\x07\x9b\u202e"}


def test_without_an_event_a_failed_task_is_quoted_and_else_the_script(run):
    fail(run)
    path = run.run_dir / "submission" / "actor" / "7_0_log.err"
    path.write_text("Traceback\n  x\nImportError: no torch\nsrun: error: n1: task 0\n")
    said = cli("status", run.run_dir).output
    assert "exit code 3: actor-0: ImportError: no torch\n" in said
    assert f"see           {path}\n" in said
    path.unlink()
    path = path.with_name("7_gpu12_log.err")  # of a node, before its tasks have logs of their own
    path.write_text("slurmstepd-gpu12: error: execve(): /env/bin/python: No such file\n")
    said = cli("status", run.run_dir).output
    assert "exit code 3: actor on gpu12: slurmstepd-gpu12: error: execve(): /env/bin/pyt" in said
    path.unlink()
    log = run.run_dir / "submission" / "7_batch.log"
    log.write_text("7_submission.sh: line 9: module: command not found\n")
    assert "line 9: module: command not found\n" in cli("status", run.run_dir).output


def ended(words):
    return f"2026-01-01T00:00:00 actor: {words}\n"


PROGRESS = "step 3 of 30, 12k tokens/s\n"
LAUNCH = "task 0 launch failed: Slurmd could not connect IO"
GAVE_UP = BATCH_LOG.splitlines(keepends=True)
GAVE_UP[1:3] = [ended("would fail again in the same way, giving up")]
REASONS = {
    "killed": ([], ended("start 1 ended with exit code 137"), PROGRESS,
        "actor failed, killed by SIGKILL: by somebody, or by its node for want of memory (resources"
        ".mem)"),
    "killed with an error": (["KeyError: x"], ended("start 1 ended with exit code 137"), PROGRESS,
        "actor failed, killed by SIGKILL: actor-2: KeyError: x"),
    "ended": ([], ended("start 1 ended with exit code 200"), PROGRESS,
        "actor failed, exit code 200: actor-0: step 3 of 30, 12k tokens/s"),
    "no restart cures it": (["MismatchError: other models"], "".join(GAVE_UP), "",
        "actor failed, exit code 1: actor-2: MismatchError: other models"),
    "setup": ([], ended("setup ended with exit code 127: module load x"), "",
        "actor: setup ended with exit code 127: module load x"),
    "not started": ([], f"srun: error: {LAUNCH}\nsrun: error: Timed out\n{BATCH_LOG}", "",
        f"actor failed 2 times, exit code 3: {LAUNCH}: it seems that its node does not see FOLDER"),
}  # fmt: skip


@pytest.mark.parametrize("case", REASONS)
def test_the_reason_is_what_tasks_and_logs_say_of_whoever_ended_the_run(run, case):
    """Errors of the actor, the log of the script and of the actor, and the reason."""
    errors, of_script, of_actor, why = REASONS[case]
    fail(run, actor=errors, rollout=["KeyError: y"])
    log = run.run_dir / "submission" / "7_batch.log"
    log.write_text(of_script)
    (log.parent / "actor" / "7_0_log.err").write_text(of_actor)
    assert as_json(run)["reason"] == why.replace("FOLDER", f"{log.parent / 'actor'}")


def test_a_script_that_has_not_even_a_log_did_not_see_the_run_directory(run):
    fail(run)
    log = run.run_dir / "submission" / "7_batch.log"
    assert "began no log" not in cli("status", run.run_dir).output
    log.unlink()
    assert f"began no log of its script in {log.parent}:" in cli("status", run.run_dir).output


def steps(run, *events):
    """(event, step) of an actor, one a second."""
    path = RunPaths(run.run_dir).events("actor", 0)
    path.parent.mkdir(exist_ok=True)
    first = time.time() - len(events) + 1
    common = {"role": "actor", "rank": 0, "pid": 1, "num_trajectories": 8}
    common |= {"num_tokens": 1, "time/step": 1.0, "eta_s": 9.0}
    lines = [
        {**common, "event": event, "step": step, "time": first + second}
        for second, (event, step) in enumerate(events)
    ]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def test_after_a_resume_the_present_step_is_shown_and_not_the_highest(run):
    run.says("7+0|RUNNING", "7+1|RUNNING")
    for more, shown in (((), 8), ((("step", 9), ("step", 10)), 10)):
        steps(run, *(("step", step) for step in range(1, 13)), ("resume", 8), *more)
        assert as_json(run)["progress"]["steps_done"] == shown


def test_engines_of_every_pool_are_listed_and_those_of_a_fixed_one_have_no_version(run):
    paths = RunPaths(run.run_dir)
    job = json.loads(paths.config.read_text())
    job["engines"]["judge"] = job["engines"]["rollout"] | {
        "count": 4, "engines_per_task": 2, "resources": {}
    }  # fmt: skip
    paths.config.write_text(json.dumps(job))
    run.says("7+0|RUNNING", "7+1|RUNNING")
    for component, rank in (("rollout", 0), ("judge", 0), ("judge", 1)):
        with EventWriter(paths.events(component, rank), component, rank) as events:
            events.emit("start", attempt="7.0", start=1, node=f"{component[0]}{rank}")
    for pool, name in (("rollout", "rollout-0"), ("judge", "judge-1.0"), ("judge", "judge-0.1")):
        members.announce(paths, Member(name, "7-1-1", "", 1, "embedded", "HEALTHY", pool=pool))
    Roster(3, {"rollout-0": RosterEntry("7-1-1", 3, "ACTIVE")}).write(paths)

    listed = as_json(run)["engines"]
    assert [[row[key] for key in ("pool", "id", "state", "node", "version")] for row in listed] == [
        ["rollout", "rollout-0", "ACTIVE", "r0", 3],
        ["judge", "judge-0.0", "STARTING", "j0", "fixed"],
        ["judge", "judge-0.1", "HEALTHY", "j0", "fixed"],
        ["judge", "judge-1.0", "HEALTHY", "j1", "fixed"],
        ["judge", "judge-1.1", "STARTING", "j1", "fixed"],
    ]


@pytest.mark.parametrize(
    ("option", "line"),
    [
        ("--comment=my exp # 2", '--comment="my exp # 2"'),
        ('--comment=say "it\\now" twice', '--comment="say \\"it\\\\now\\" twice"'),
        ("--comment=it's", '--comment="it\'s"'),
        ("--comment='my exp'", "--comment='my exp'"),
        ("--exclusive", "--exclusive"),
    ],
)
def test_options_of_sbatch_with_spaces_are_quoted_as_it_reads_its_script(tmp_path, option, line):
    component = Component("actor", 1, Resources(sbatch=[option]))
    text = script.slurm_script(script.Job("toy", tmp_path), [component])
    assert f"#SBATCH {line}" in text.splitlines()


def noted(run_dir, *events):
    """Writes events of tasks of the actor, a second after one another, into their files."""
    folder = RunPaths(run_dir).events_folder
    folder.mkdir(parents=True, exist_ok=True)
    for at, (rank, event, message) in zip(itertools.count(1000), events):
        line = {"time": float(at), "event": event, "role": "actor", "rank": rank}
        line |= {"message": message} if message else {"attempt": "7.0", "start": 1}
        with (folder / f"actor-{rank}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


START = [(rank, "start", "") for rank in range(3)]
VICTIMS = [
    "PeerTimeoutError: rank 0 of the 2 of this component left: it has closed the connection",
    "RuntimeError: [pair.cc:534] Connection closed by peer [10.1.0.2]:34879",
    "ConnectionResetError: [Errno 104] Connection reset by peer",
]


@pytest.mark.parametrize("victim", VICTIMS)
def test_the_reason_is_the_cause_and_not_who_lost_its_peer(tmp_path, victim):
    """O12: whoever says it first, and at whichever start."""
    cause = "SpreadError: responses to a prompt hardly ever differ"
    before = (2, "error", "MismatchError: of an earlier start")
    noted(tmp_path, *START, before, *START, (0, "error", cause), (1, "error", victim))
    assert verdict.last_error(tmp_path, ["actor"], 0.0) == (f"actor-0: {cause}", "actor-0")
    noted(tmp_path, *START, (1, "error", victim), (0, "error", cause), (1, "error", "KeyError"))
    assert verdict.last_error(tmp_path, ["actor"], 0.0) == (f"actor-0: {cause}", "actor-0")
