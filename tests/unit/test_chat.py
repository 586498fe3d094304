"""A policy that is talked to: in the terminal, from a script, and over OpenAI's API."""

import io
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress

import httpx
import psutil
import pytest
import torch
from job_trees import job_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from relax_hpc import ConfigError
from relax_hpc.cli import chat
from relax_hpc.launch import serve
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.runtime.text import printable

SYSTEM = {"role": "system", "content": "sum"}
FIRST = {"role": "user", "content": "1+2="}
COMMAND = [sys.executable, "-m", "relax_hpc"]


@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny_model):
    """A run with the model of step 4, which says many things, and what it begins with."""
    paths = RunPaths(tmp_path_factory.mktemp("runs") / "talk")
    model, tokens = (
        each.from_pretrained(tiny_model) for each in (AutoModelForCausalLM, AutoTokenizer)
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if re.search("o_proj|down_proj|gate_proj", name):
                weight *= 5
    for saved in (model, tokens):
        saved.save_pretrained(paths.hf(4))
    job = job_of(
        model={"path": str(tiny_model), "dtype": "float32"},
        prompts__system="sum",
        rollout__max_new_tokens=24,
    )
    paths.config.write_text(job.model_dump_json())
    return paths


@pytest.fixture(scope="module")
def served(run, tmp_path_factory):
    """A running `serve`: its address and file with the token; at the end nothing is left of it."""
    file = tmp_path_factory.mktemp("token") / "token"
    command = [*COMMAND, "serve", f"{run.root}@4", "--token-file", str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        said = process.stdout.readline()
        [url] = re.findall(r"OPENAI_BASE_URL=(http://127.0.0.1:\d+/v1) ", said)
        assert file.stat().st_mode & 0o777 == 0o600 and str(file) in said
        yield url, file
        family = psutil.Process(process.pid).children(recursive=True)
        assert any("embedded.server" in " ".join(each.cmdline()) for each in family)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert psutil.wait_procs(family, timeout=10)[1] == [] and not file.exists()


def greedy(run, messages, most=24):
    """What transformers answers: token ids and text."""
    folder = run.hf(4)
    model, tokens = (each.from_pretrained(folder) for each in (AutoModelForCausalLM, AutoTokenizer))
    ids = tokens.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    made = model.generate(**ids, max_new_tokens=most, do_sample=False)
    made = made[0, ids["input_ids"].shape[1] :].tolist()
    return made, tokens.decode(made, skip_special_tokens=True)


def test_a_script_gets_the_greedy_tokens_that_transformers_gets(run, ran, monkeypatch):
    sampled, sample = [], serve.GenerationClient.sample

    async def kept(*given, **how):
        done = await sample(*given, **how)
        sampled.extend(done.token_ids)
        return done

    monkeypatch.setattr(serve.GenerationClient, "sample", kept)
    monkeypatch.setattr(sys, "stdin", io.StringIO("1+2=\n"))
    said = ran("chat", f"{run.root}@4", "--temperature", "0").out
    ids, text = greedy(run, [SYSTEM, FIRST])
    assert sampled == ids and len({*ids}) > 5
    assert said == printable(text) + "\n"


def test_a_second_turn_contains_the_first(run, served, capsys):
    url, token = served[0], served[1].read_text().strip()
    with chat._open_talk(url, token, {"temperature": 0.0}, None, None) as talk:
        assert re.fullmatch(r"24 tokens, [\d.]+ tokens/s, cut off by the limit", talk.ask("1+2="))
        talk.ask("hello")
        first, answer, second, last = talk.messages
        assert [first, second["content"]] == [FIRST, "hello"]
        assert answer["content"] == greedy(run, [SYSTEM, FIRST])[1]
        assert last["content"] == greedy(run, [SYSTEM, first, answer, second])[1]
        talk.obey("/undo")
        talk.obey("/system other")
        assert talk.messages == [{**SYSTEM, "content": "other"}, first, answer]
        assert not talk.obey("/quit")
        with pytest.raises(ConfigError, match="/rest: no such command; there are /reset"):
            talk.obey("/rest")
        talk._tools = [{"type": "function", "function": {"name": "add"}}]
        talk._print_calls('so <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
        assert 'tool call, not run: add({"a": 1})\n' in capsys.readouterr().err


def test_a_client_of_openai_is_answered_and_one_with_a_wrong_token_is_not(run, served):
    url, token = served[0], served[1].read_text().strip()
    body = {"model": "any", "messages": [FIRST], "temperature": 0, "max_tokens": 9}
    _, text = greedy(run, [SYSTEM, FIRST], 9)
    with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {token}"}) as client:
        assert client.get("/models").json()["data"][0]["id"] == "talk@4"
        made = client.post("/chat/completions", json=body).json()
        assert made["choices"][0]["message"] == {"role": "assistant", "content": text}
        assert made["choices"][0]["finish_reason"] == "length"
        assert made["usage"]["completion_tokens"] == 9
        lines = client.post("/chat/completions", json={**body, "stream": True}).text.split("\n\n")
        deltas = [
            json.loads(x[6:])["choices"][0]["delta"] for x in lines if x.startswith("data: {")
        ]
        assert "".join(each.get("content", "") for each in deltas) == text and len(deltas) > 3
        assert [each.get("role") for each in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
        refused = client.post("/chat/completions", json={**body, "temperature": -1})
        assert refused.status_code == 400 and "temperature = -1: use 0" in refused.text
        asked = {"prompt": "1+2=", "temperature": 0, "max_tokens": 3}
        made = client.post("/completions", json=asked).json()
        assert made["usage"]["prompt_tokens"] == 4 and "text" in made["choices"][0]
        # The connection has named the token before.
        wrong = client.get("/models", headers={"Authorization": "Bearer other"})
        assert wrong.status_code == 401
    assert httpx.post(f"{url}/chat/completions", json=body).status_code == 401


def test_ctrl_c_breaks_an_answer_off_and_twice_ends(served, tmp_path):
    talk = f"--url {served[0]} --token-file {served[1]} --max-tokens 3000 --temperature 0"
    pid, terminal = os.forkpty()
    if pid == 0:
        os.execv(sys.executable, [*COMMAND, "chat", *talk.split()])
    output, deadline, reads = b"", time.monotonic() + 90, select.poll()
    reads.register(terminal, select.POLLIN)

    def wait_for(text, more=0):
        nonlocal output
        while text not in output or len(output.partition(text)[2]) < more:
            assert reads.poll(max(0.0, deadline - time.monotonic()) * 1000), output
            output += os.read(terminal, 4096)
        output = output.partition(text)[2]

    wait_for(b"> ")
    os.write(terminal, b"1\\\n+2=\n")
    wait_for(b"+2=", more=100)
    os.write(terminal, b"\x03")
    wait_for(b"broken off")
    os.write(terminal, f"/save {tmp_path}/talk.jsonl\n".encode())
    wait_for(b"talk.jsonl")
    wait_for(b"> ")
    while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0):
        assert time.monotonic() < deadline, output
        with suppress(OSError):  # it ends
            os.write(terminal, b"\x03")  # one that comes while it reads no key is not heard
        time.sleep(0.5)
    assert os.waitstatus_to_exitcode(ended[1]) == 0
    first, answer = json.loads((tmp_path / "talk.jsonl").read_text())["messages"]
    assert first["content"] == "1\n+2=" and answer["content"]


def test_tools_are_those_of_the_first_prompt_where_episodes_have_several_turns(tmp_path):
    tool = {"type": "function", "function": {"name": "add"}}
    row = {"prompt": "1+2=", "answer": "3", "tools": [tool]}
    (tmp_path / "train.jsonl").write_text(json.dumps(row) + "\n")
    for environment, tools in {"single_turn": None, "calls.py:Calls": [tool]}.items():
        job = job_of(prompts__train=str(tmp_path / "train.jsonl"), rollout__environment=environment)
        assert serve.Policy("a job", tmp_path, job).tools(pytest.fail) == tools


def test_the_newest_model_of_a_run_may_be_a_checkpoint_and_a_step_must_be_there(run, tmp_path):
    from relax_hpc.trainer.checkpoints import convert

    convert.to_megatron(run.hf(4), run.checkpoints / "step_00000007")
    said = []
    with serve.find_policy(str(run.root), said.append) as found:
        assert found.name == "talk@7" and "converting" in said[0] and found.folder != run.hf(7)
        made, saved = (
            AutoModelForCausalLM.from_pretrained(each).state_dict()
            for each in (found.folder, run.hf(4))
        )
        assert all(torch.equal(saved[name], each) for name, each in made.items())
    assert not found.folder.exists()
    shutil.rmtree(run.checkpoints)
    with (
        pytest.raises(ConfigError, match=r"talk@7: the run has no model .* use one of 0, 4$"),
        serve.find_policy(f"{run.root}@7", said.append),
    ):
        pass
