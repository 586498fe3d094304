"""Whatever is wrong with a job, one line says so and nothing starts; what `check` prints."""

import math
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from relax_hpc.cli import main
from relax_hpc.config.job_file import validate
from relax_hpc.config.run import RunConfig, SftRunConfig
from relax_hpc.errors import ConfigError

NINES = "9" * 20
SETTINGS = {
    "schedule.max_stalenes=1": "s = 1: unknown key; did you mean schedule.max_staleness?",
    "model.path=no/such/model": "a downloaded Hugging Face model",
    "algorithm=3": "algorithm = 3: is a table of settings; it takes preset, aggregation,",
    "rollout.advanced.routed_experts=true": "= true: the embedded engine has no experts; use",
    "rollout.max_new_tokens=5000": "prompt has 10 tokens and the model 4096 positions; use 4086 or",
    "run_root=/proc/runs": "choose a folder of yours that every node sees",
    "prompts.max_prompt_tokens=2": "raise it, or remove the line",
    # Beyond their types, and values that are none.
    f"seed={NINES}": f"seed = {NINES}: use 2147483647 or less",
    "schedule.num_steps=" + "9" * 5000: "schedule.num_steps = '9999",
    "engines.rollout.args.x=[1, [nan]]": "args.x = [1, [nan]]: a finite number is expected",
    f"engines.rollout.args.x={NINES}": f"args.x = {NINES}: has more than 64 bits; use",
    "actor.resources.x=1": "actor.resources.x = 1: unknown key; actor.resources takes partition,",
    "actor.lora.alpha=8": "alpha = 8.0: means nothing with rank = 0; set a rank, e.g. 32, or",
    "actor.lora.targets=['lm_head']": "use 'q_proj', 'k_proj', 'v_proj', 'o_proj',",
    "critic.lrx=1": "critic.lrx = 1: unknown key; did you mean critic.lr?",
    "eval.heldout.samples_per_prompt=4": "= 4: are all alike, since temperature = 0 is greedy; set",
    'resources.comment="a\\nb"': "comment = 'a\\nb': has a line break or another control character",
    "resources.nodes=2": "nodes = 2: is of one component; set actor.resources.nodes, or that of an",
    "name=" + "[" * 5000: "name = '[[[[",
}


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting[:40])
def test_a_setting_that_cannot_work_is_answered_in_one_line(refused, setting):
    said = refused("submit", "job.toml", "--local", "--set", setting)
    assert SETTINGS[setting] in said and "\n" not in said and len(said) < 600


FILES = {
    ("job.toml", None): "no such file; name a TOML file; relax-hpc init NAME makes one",
    ("job.toml", b"name: run"): "job.toml: is not TOML: Expected '=' after a key",
    ("heldout.jsonl", b'{"prompt": "1+1="}'): "heldout.jsonl, line 1: has no answer",
    ("model/config.json", b'{"model_type": "gpt2"}'): "'gpt2': only llama, mistral, qwen2, qwen3, ",
    ("model/config.json", b'{"model_type": "qwen3"}'): "hidden_size = missing: a positive integer",
    (
        "model/config.json",
        b'{"model_type": "qwen3", "is_causal": false}',
    ): "is_causal = False: only",
    ("model/model.safetensors", None): "download the weights in the safetensors format",
    ("model/model.safetensors", b"\0" * 9): "model.safetensors is damaged or not complete",
    ("model/tokenizer.json", b"[1]"): "model/tokenizer.json: is ",
    ("model/tokenizer_config.json", b"[" * 100_000): "model/tokenizer_config.json: is ",
    ("model/chat_template.jinja", None): "prompts.chat_template = True: the tokenizer in",
}


@pytest.mark.parametrize(("path", "content"), FILES)
def test_a_file_that_cannot_be_used_is_answered_in_one_line(refused, path, content):
    if content is None:
        Path(path).unlink()
    else:
        Path(path).write_bytes(content)
    said = refused("submit", "job.toml", "--local")
    assert FILES[path, content] in said and "\n" not in said


def test_each_mistake_has_a_line_of_its_own(refused):
    said = refused("check", "job.toml", "--set", "sed=1", "--set", "schedule.num_steps=0")
    assert [line.split(": ")[1] for line in said.splitlines()] == [
        "schedule.num_steps = 0",
        "sed = 1",
    ]


def test_a_run_whose_name_is_taken_is_numbered(remarked, refused):
    for name in ("run", "run-2"):
        Path("runs", name).mkdir(parents=True)
    for arguments in (
        ["check", "job.toml", "--local"],
        ["submit", "job.toml", "--local", "--dry-run"],
    ):
        assert "name = 'run': is taken; this run is run-3" in remarked(*arguments)
    wrong = refused("check", "job.toml", "--local", "--set", "model.path=nowhere")
    assert "no such folder" in wrong, "all else is looked at first"


@pytest.mark.skipif(find_spec("sglang") is not None, reason="SGLang is installed")
def test_an_engine_that_is_not_installed_here_is_not_started_here(refused, remarked):
    for told, verb in ((remarked, "check"), (refused, "submit")):
        said = told(verb, "job.toml", "--local", "--set", "engines.rollout.kind=sglang")
        assert "engines.rollout.resources.python (unset, so " in said
        assert "has no sglang; install sglang into that environment, or name an interp" in said
        if verb == "check":
            assert "\nnothing else is wrong; where that is there: relax-hpc submit job" in said


def fields(section):
    for name, field in section.model_fields.items():
        if hasattr(field.annotation, "model_fields"):
            yield from ((f"{name}.{key}", of) for key, of in fields(field.annotation))
        else:
            yield name, field


@pytest.mark.parametrize("kind", [RunConfig, SftRunConfig])
@pytest.mark.parametrize("value", [math.nan, 10**40, 1e300])
def test_no_number_of_a_job_may_be_infinite_or_larger_than_what_computes_with_it(kind, value):
    numbers = [key for key, field in fields(kind)
               if any(kind in str(field.annotation) for kind in ("int", "float"))]  # fmt: skip
    assert len(numbers) > 25
    for key in numbers:
        tree = {"sft": {}} if kind is SftRunConfig else {}
        *sections, last = key.split(".")
        inner = tree
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[last] = value
        with pytest.raises(ConfigError) as error:
            validate(tree, source="job")
        assert f"job: {key} = " in str(error.value), key


def test_a_terminal_shows_remarks_and_then_what_comes_next(job, monkeypatch, capsys):
    shutil.copy("train.jsonl", "heldout.jsonl")  # there is a remark on it
    monkeypatch.setattr(main, "decode_media", lambda _, say: say("decoded 7 media"))
    with monkeypatch.context() as patch:
        patch.setattr(sys.stdout, "isatty", lambda: True)
        patch.setattr(sys, "stderr", sys.stdout)
        asked = ["check", "job.toml", "--local", "--set", "reward.args={ }", "--decode"]
        main.app(asked, standalone_mode=False)
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "decoded 7 media"
    assert any("are trained on" in line for line in shown[1:-1])
    assert not any(line.startswith("{") for line in shown)
    again = "relax-hpc submit job.toml --local --set 'reward.args={ }'"
    assert shown[-1] == f"nothing is wrong; next: {again}"


@pytest.mark.parametrize(("steps", "is_said"), [(9, True), (10, False)])
def test_a_warm_up_that_is_longer_than_the_run_is_told_of(remarked, steps, is_said):
    asked = ("actor.optimizer.warmup_steps=10", f"schedule.num_steps={steps}")
    words = (word for each in ("actor.optimizer.lr=1e-5", *asked) for word in ("--set", each))
    said = remarked("check", "job.toml", "--local", *words)
    told = "learns in 9 steps, so the learning rate rises to 9e-06 only, not to 1e-05\n"
    assert (told in said, "rises" in said) == (is_said, is_said)
