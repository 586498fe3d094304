"""Programs as episodes: started, answered, scored, ended as a whole; what fails is an error of the
sample, and what was sampled is not sampled again."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from chat_fakes import Engine, session_of, tokens_of
from job_trees import job_of
from roles.role_fakes import wait_for

from relax_hpc.config.rollout import ProgramConfig, RolloutConfig
from relax_hpc.environments import program as program_process
from relax_hpc.environments import registry
from relax_hpc.environments.program import ProgramEnvironment, ProgramError
from relax_hpc.environments.record import EpisodeRecord, sequences
from relax_hpc.environments.rewards.contract import fail
from relax_hpc.environments.session import Outcome
from relax_hpc.errors import ConfigError, EngineLostError
from relax_hpc.runtime.files.user_programs import describe_call_error

ASKING = """
import json, os, sys, urllib.request

def chat(messages):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "policy", "messages": messages}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
         "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]

task = json.load(open(sys.argv[1]))
"""
TWICE = """
messages = task["messages"]
messages.append(chat(messages))
messages.append({"role": "user", "content": "sure?"})
messages.append(chat(messages))
"""


@pytest.fixture(scope="module")
def tokens():
    return tokens_of()


@pytest.fixture
def agent(tmp_path):
    """Writes an agent; the environment that starts it."""

    def written(text, timeout_s=60, kept=None):
        (tmp_path / "agent.py").write_text(ASKING + textwrap.dedent(text))
        command = [sys.executable, "agent.py", "{task}", "{outcome}"]
        config = ProgramConfig(command=command, folder=tmp_path, timeout_s=timeout_s)
        return ProgramEnvironment(config, kept)

    return written


def play(environment, engine, record=None):
    session = session_of(engine, record)
    return asyncio.run(environment.rollout(session.prompt, session))


def test_a_program_of_two_turns_is_one_sequence_and_the_jobs_reward_decides(
    agent, tokens, tmp_path, monkeypatch
):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # of a site
    record, engine = EpisodeRecord(), Engine(tokens, "3", "yes")
    made = play(agent(TWICE + "json.dump(task, open('seen', 'w'))"), engine, record)
    assert made == Outcome()
    task = json.loads((tmp_path / "seen").read_text())
    assert task.keys() == {"messages", "answer", "metadata", "tools", "source", "seed"}
    assert (task["answer"], task["seed"], len(task["messages"])) == ("12", 11, 4)
    [sequence] = sequences(record)
    assert int(sequence.loss_mask.sum()) == len("3") + 1 + len("yes") + 1


def test_what_a_program_writes_is_the_outcome_however_it_ends(agent, tokens):
    wrote = """
    json.dump({"rewards": {"right": 1}, "metrics": {"turns": 2}}, open(sys.argv[2], "w"))
    sys.exit(3)
    """
    made = play(agent(TWICE + textwrap.dedent(wrote)), Engine(tokens, "3", "yes"))
    assert made == Outcome({"right": 1}, {"turns": 2})


@pytest.mark.parametrize(("text", "said"), [
    ("chat(task['messages']); sys.exit('no world')", "^ended with 1; it said: no world$"),
    ("chat(task['messages']); os.kill(os.getpid(), 9)", "^was killed by SIGKILL$"),
    ("open(sys.argv[2], 'w').write('{}')", "^ended and has had no reply of the policy$"),
    ("1 / 0", "^ended with 1 and has had no reply .*ZeroDivisionError: division by zero$"),
    ("chat(task['messages']); open(sys.argv[2], 'w').write('{\"a\": 1}')", "come is {'a': 1};"),
    ("sys.stderr.write('BadError: ' + 'x' * 100_000 + 'y'); sys.exit(2)",
     r"it said: BadError: x{90} \.\.\. x{294}y \(all of it: .*\)$"),
])  # fmt: skip
def test_a_program_that_fails_is_an_error_of_the_sample_in_its_words(agent, tokens, text, said):
    with pytest.raises(ProgramError, match=said):
        play(agent(text), Engine(tokens, "3"))


DEEP = """
def called(depth):
    if not depth:
        raise RuntimeError("Error code: 400")
    called(depth - 1)
sys.stderr.write("begun\\n")
called(40)
"""


def test_the_last_line_of_an_agent_reaches_the_score_and_all_of_it_a_file_that_is_named(
    agent, tokens, tmp_path
):  # U1
    kept = tmp_path / "run" / "logs" / "program-0.log"
    environment = agent(DEEP, kept=kept)
    with pytest.raises(ProgramError) as failure:
        play(environment, Engine(tokens))
    error = fail(f"environment: {describe_call_error(failure.value)}").error
    for said in ("ended with 1 and has had no", "RuntimeError: Error code: 400", f" it: {kept})"):
        assert said in error
    whole = kept.read_text(encoding="utf-8").splitlines()
    assert whole[1] == "begun" and whole.count("    called(depth - 1)") >= 3
    with pytest.raises(ProgramError):
        play(environment, Engine(tokens))
    again = kept.read_text(encoding="utf-8").splitlines()
    assert again == [*whole, *whole], "one after the other"


def test_of_a_flood_of_words_the_beginning_and_the_end_are_kept(agent, tokens, tmp_path):  # U1
    code = "sys.stderr.write('begun\\n' + 'x\\n' * 200_000 + 'the end')\nsys.exit(1)"
    kept = tmp_path / "program-0.log"
    with pytest.raises(ProgramError, match=r"x x the end \(all of it"):
        play(agent(code, kept=kept), Engine(tokens))
    text = kept.read_text(encoding="utf-8")
    left_out = 6 + 400_000 + 7 - 2 * (64 << 10)
    assert f"\n[{left_out} bytes are left out]\n" in text
    assert text.splitlines()[1] == "begun" and text.endswith("x\nthe end\n\n")


def is_there(path):
    """Whether the process lives whose number a file holds."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(int(path.read_text())).status() != psutil.STATUS_ZOMBIE
    return False


WITH_CHILD = """
import subprocess, time
child = subprocess.Popen([sys.executable, "-c", "import signal, time; "
    "signal.signal(signal.SIGTERM, signal.SIG_IGN); open('ready', 'w'); time.sleep(600)"])
open("child", "w").write(str(child.pid))
while not os.path.exists("ready"): time.sleep(0.01)
"""


WITH_DAEMON = (
    WITH_CHILD
    + """
if os.fork() == 0:  # a daemon, as these are made
    os.setsid()
    if os.fork() == 0:
        open("daemon", "w").write(str(os.getpid()))
        time.sleep(600)
    os._exit(0)
os.wait()
while not os.path.exists("daemon") or not open("daemon").read(): time.sleep(0.01)
"""
)


def test_a_program_that_takes_too_long_is_asked_to_end_and_then_killed_with_its_children(
    agent, tokens, tmp_path, monkeypatch
):
    monkeypatch.setattr(program_process, "GRACE_S", 0.5)
    stubborn = """
    import signal
    def at_the_end(*_):
        try: chat(task["messages"])
        except OSError as error: open("asked", "w").write(str(error))
    signal.signal(signal.SIGTERM, at_the_end)
    sys.stderr.write("thinking")
    sys.stderr.flush()
    while True: time.sleep(0.1)
    """
    environment = agent(WITH_DAEMON + textwrap.dedent(stubborn), timeout_s=4)
    with pytest.raises(ProgramError, match=r"^took longer than 4 s; it said: thinking$"):
        play(environment, Engine(tokens))
    assert "401" in (tmp_path / "asked").read_text(), "the episode is over"
    assert not is_there(tmp_path / "child") and not is_there(tmp_path / "daemon")


def test_what_a_program_leaves_behind_ends_with_it(agent, tokens, tmp_path):
    play(agent(WITH_DAEMON + "chat(task['messages'])"), Engine(tokens, "3"))
    assert not is_there(tmp_path / "child") and not is_there(tmp_path / "daemon")


def test_children_of_a_program_that_kills_who_keeps_it_end_too(agent, tokens, tmp_path):
    code = "chat(task['messages'])\nimport signal\nos.kill(os.getppid(), signal.SIGKILL)\n"
    with pytest.raises(ProgramError, match="was killed by SIGKILL"):
        play(agent(WITH_CHILD + code + "time.sleep(600)"), Engine(tokens, "3"))
    assert not is_there(tmp_path / "child")


def test_time_in_which_a_program_waits_for_the_policy_is_not_its_own(agent, tokens):
    async def run():
        engine = Engine(tokens, "3")
        engine.may_answer.clear()
        asyncio.get_running_loop().call_later(5, engine.may_answer.set)
        session = session_of(engine)
        environment = agent("chat(task['messages'])", timeout_s=4)
        return await environment.rollout(session.prompt, session)

    assert asyncio.run(run()) == Outcome()


def test_trouble_of_engines_is_raised_whatever_the_program_makes_of_it(agent, tokens):
    again = """
    import time
    while True:
        try: chat(task["messages"])
        except Exception: time.sleep(0.01)
    """
    engine = Engine(tokens, error=EngineLostError("http://x: gone"))
    with pytest.raises(EngineLostError, match="http://x: gone"):
        play(agent(again), engine)


def test_an_episode_that_was_broken_off_is_begun_anew_and_answered_from_its_record(
    agent, tokens, tmp_path
):
    """The second reply was half there: only what is missing of it is sampled."""
    environment = agent("open('pid', 'w').write(str(os.getpid()))\n" + TWICE)

    async def cancelled(record):
        engine = Engine(tokens, "3", "...", "yes")
        session = session_of(engine, record)
        playing = asyncio.create_task(environment.rollout(session.prompt, session))
        while engine.replies:
            await asyncio.sleep(0.01)
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)
        return engine

    record = EpisodeRecord()
    first = asyncio.run(cancelled(record))
    assert not is_there(tmp_path / "pid"), "who is broken off leaves nobody"
    assert [call.finish is None for call in record.calls] == [False, True]
    half = [*record.calls[1].draft.token_ids]
    assert tokens.decode(half) == "y"
    engine = Engine(tokens, "yes")
    assert play(environment, engine, record) == Outcome()
    [(given, draft, _)] = engine.asked
    assert (given, draft) == (first.asked[1][0], half)
    [sequence] = sequences(record)
    assert int(sequence.loss_mask.sum()) == len("3") + 1 + len("yes") + 1


OWNER = """
import asyncio, sys
sys.path[:0] = {path!r}
from chat_fakes import Engine, session_of, tokens_of
from job_trees import job_of
from relax_hpc.config.rollout import ProgramConfig
from relax_hpc.environments.program import ProgramEnvironment

async def main():
    engine = Engine(tokens_of(), "3")
    engine.may_answer.clear()
    session = session_of(engine)
    command = [sys.executable, "agent.py", "{{task}}"]
    await ProgramEnvironment(ProgramConfig(command=command)).rollout(session.prompt, session)

asyncio.run(main())
"""


@pytest.mark.long
def test_a_program_and_its_children_die_with_the_task_however_that_dies(agent, tmp_path):
    agent(WITH_DAEMON + "open('pid', 'w').write(str(os.getpid()))\nchat(task['messages'])")
    code = OWNER.format(path=[str(Path(__file__).parent), *sys.path])
    task = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path)
    try:
        wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), 60)
        assert is_there(tmp_path / "pid") and is_there(tmp_path / "child")
    finally:
        os.kill(task.pid, signal.SIGKILL)
        task.wait()
    names = ("pid", "child", "daemon")
    wait_for(lambda: not any(is_there(tmp_path / name) for name in names))


@pytest.mark.parametrize(
    ("rollout", "said"),
    [
        ({"environment": "program"}, "rollout.program.command: is required with"),
        ({"program": {"command": ["a", "{task}"]}}, "starts no program, and there is a table"),
        ({"environment": "program", "program": {"command": ["a", "{tsk}"]}}, "stands for nothing"),
    ],
)
def test_a_table_that_fits_no_program_is_refused(rollout, said):
    with pytest.raises(ConfigError, match=said):
        job_of(rollout=rollout)


@pytest.mark.parametrize(
    ("word", "said"),
    [("agent", "is on the PATH; name"), ("./b", "no such file"), ("./agent.py", "may not be exec")],
)
def test_a_program_that_cannot_be_started_is_refused_at_once(tmp_path, word, said):
    (tmp_path / "agent.py").write_text("")
    program = ProgramConfig(command=[word, "{task}"], folder=tmp_path)
    with pytest.raises(ConfigError, match=rf"^rollout\.program\..*{said}"):
        registry.make(RolloutConfig(environment="program", program=program))
