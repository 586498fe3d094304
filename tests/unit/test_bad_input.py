"""Whatever is wrong with a job, the command line says so in one line and starts nothing."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

SETTINGS = {
    "schedule.max_stalenes=1": (
        "schedule.max_stalenes = 1: unknown key; did you mean schedule.max_staleness?"
    ),
    "schedule.max_staleness=-1": (
        "schedule.max_staleness = -1: input should be greater than or equal to 0"
    ),
    "schedule.num_steps=many": "schedule.num_steps = 'many': input should be a valid integer",
    "algorithm=3": "algorithm = 3: is a table of settings; it takes preset, aggregation,",
    "model.dtype=float64": "model.dtype = 'float64': input should be 'float32', 'bfloat16' or",
    "name=a/b": "name = 'a/b': use letters of a to z, digits, - and _, a letter",
    "engines.rollout.args.x={a=1}": "args.x = {'a': 1}: is a table; a number, a string",
    "rollout.routed_experts=true": (
        "rollout.routed_experts = true: the embedded engine has no experts; use engines.rollout"
    ),
    "engines.rollout.resources.nodes=3": (
        "engines.rollout.count = 1: does not divide over 3 nodes; use a multiple of 3"
    ),
    "rollout.samples_per_prompt=1": (
        "rollout.samples_per_prompt = 1: algorithm.advantage.name = 'group_mean' compares "
        "siblings of a prompt; use 2 or more"
    ),
    "actor.layout.tensor_parallel=3": (
        "actor.layout.tensor_parallel = 3: does not divide the model's"
    ),
    "actor.transformer.recompute_granularty=full": "did you mean recompute_granularity?",
    "actor.tokens_per_micro_batch=100": (
        "actor.tokens_per_micro_batch = 100: the longest prompt has 10 tokens and "
        "rollout.max_new_tokens = 256; use 266 or more"
    ),
    "rollout.max_new_tokens=5000": (
        "rollout.max_new_tokens = 5000: the longest prompt has 10 tokens and the model 4096 "
        "positions; use 4086 or less"
    ),
    "rollout.environment=two_turns": "no such environment; use single_turn, program, or name",
    "rollout.environment=mine.py:Mine": "cannot be made: FileNotFoundError",
    "eval.heldout.samples_per_prompt=4": (
        "eval.heldout.samples_per_prompt = 4: are all alike, since temperature = 0 is greedy; set"
    ),
    "eval.path=x": "eval.path = 'x': is eval.heldout.path now; use that",
    "model=x": "model = 'x': is a table of settings; it takes path, weights, dtype",
    "eval.heldout=3": "eval.heldout = 3: is a table of settings; it takes path, columns, every,",
    "algorithm.loss=3": "algorithm.loss = 3: is a table of settings; see docs/algorithms.md",
    "schedule.epochs=2": "unknown key; a run has schedule.num_steps: rows x epochs",
    "engines.judge.model=nowhere": "engines.judge.model = '",
    "eval.every=20": "eval.every = 20: is eval.heldout.every now; use that",
    "eval.heldout.evry=20": "unknown key; did you mean eval.heldout.every?",
    "engines.rollout.args.num_thread=2": "did you mean num_threads?",
    "launch.profile=locl": "launch.profile = 'locl': no such profile; did you mean local?",
    "model.path=nowhere": "no such folder; name a downloaded Hugging Face model",
    "run_root=job.toml/runs": "job.toml is not a folder",
    "run_root=/proc/runs": "choose a folder of yours that every node sees",
    "prompts.train=nowhere": "nowhere: no such file; name a file of JSON lines",
    "eval.heldout.path=model": "model: is a folder; name one that holds .jsonl",
    "prompts.max_prompt_tokens=2": "raise it, or remove the line",
    "engines.rollout.resources.time=soon": "resources.time = 'soon': is not a time limit; use",
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting_that_cannot_work_is_answered_in_one_line(refused, setting):
    said = refused("submit", "job.toml", "--local", "--set", setting)
    assert SETTINGS[setting] in said and "\n" not in said


FILES = {
    ("job.toml", None): "no such file; name a TOML file; jobs/ holds examples",
    ("job.toml", b" \n"): "job.toml: is empty; a TOML file is expected, see jobs/",
    (
        "job.toml",
        b"\x89HDF\xff",
    ): "job.toml: is not UTF-8 text (invalid start byte); name a TOML file",
    ("job.toml", b"name: run"): "job.toml: is not TOML: Expected '=' after a key",
    ("train.jsonl", b""): "train.jsonl: is empty; it has to hold a row",
    (
        "train.jsonl",
        b"\x89HDF\xff",
    ): "train.jsonl, line 1: is not UTF-8 text; JSON lines are expected",
    ("train.jsonl", b"1+1=\n"): "train.jsonl, line 1: is not JSON",
    ("heldout.jsonl", b'{"prompt": "1+1="}'): "heldout.jsonl, line 1: has no answer",
    ("model/config.json", None): "has no config.json",
    ("model/config.json", b"[]"): "config.json: is not an object; download it again",
    (
        "model/config.json",
        b"\xff",
    ): "config.json: is not UTF-8 text (invalid start byte); download it again",
    ("model/config.json", b'{"model_type": "gpt2"}'): (
        "model_type = 'gpt2': only llama, mistral, qwen2, qwen3, qwen3_moe, qwen3_vl, "
        "qwen3_vl_moe, qwen3_omni_moe is supported"
    ),
    ("model/config.json", b'{"model_type": "qwen3"}'): (
        "hidden_size = missing: a positive integer is expected"
    ),
    ("model/model.safetensors", None): "download the weights in the safetensors format",
    ("model/model.safetensors", b"\0" * 9): "model.safetensors is damaged or not complete",
    ("model/tokenizer.json", None): "holds no tokenizer",
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


CONFIGS = {
    "is_causal": (False, "is_causal = False: only None or True is supported: no token sees what"),
    "attention_bias": (True, "attention_bias = True: only False is supported: only Qwen2 has"),
    "rope_scaling": (
        {"rope_type": "dynamic"},
        "rope_scaling.rope_type = 'dynamic': only default, linear, yarn, llama3 is supported",
    ),
}


@pytest.mark.parametrize("field", CONFIGS)
def test_a_model_that_would_be_computed_otherwise_than_by_transformers_is_refused(refused, field):
    value, message = CONFIGS[field]
    path = Path("model/config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    said = refused("check", "job.toml")
    assert message in said and "\n" not in said


def test_groups_of_one_are_refused_however_advantages_are_normalized(refused):
    single = ("--set", "rollout.samples_per_prompt=1", "--set", "algorithm.advantage.name=grpo")
    assert "use 2 or more" in refused("submit", "job.toml", "--local", *single)


def test_each_mistake_has_a_line_of_its_own(refused):
    said = refused("check", "job.toml", "--set", "sed=1", "--set", "schedule.num_steps=0")
    assert [line.split(": ")[1] for line in said.splitlines()] == [
        "schedule.num_steps = 0",
        "sed = 1",
    ]


def test_a_name_in_use_is_refused_and_its_run_left_alone(refused):
    Path("runs/run").mkdir(parents=True)
    said = refused("submit", "job.toml", "--local")
    assert said.startswith("name = 'run': ") and "choose another name" in said
    assert "--set name=run-2" in refused("check", "job.toml", "--local")
    wrong = refused("check", "job.toml", "--local", "--set", "model.path=nowhere")
    assert "no such folder" in wrong, "all else is looked at first"


@pytest.mark.parametrize("verb", ["status", "logs", "cancel"])
def test_a_run_that_is_not_there_is_answered_in_one_line(refused, verb):
    assert refused(verb, "nowhere") == (
        "nowhere: no such run; give its directory, or a name that ls shows"
    )


@pytest.mark.skipif(find_spec("sglang") is not None, reason="SGLang is installed")
def test_an_engine_that_is_not_installed_here_is_not_started_here(refused, remarked):
    for told, verb in ((remarked, "check"), (refused, "submit")):
        said = told(verb, "job.toml", "--local", "--set", "engines.rollout.kind=sglang")
        assert "engines.rollout.resources.python (unset, so " in said
        assert "has no sglang; install sglang into that environment, or name an interp" in said


@pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang is not installed")
def test_sglang_arguments_are_checked_by_its_own_parser(refused):
    engine = ("--set", "engines.rollout.kind=sglang", "--set", "engines.rollout.args.tp_sise=2")
    said = refused("submit", "job.toml", "--local", *engine)
    assert "engines.rollout.args.tp_sise" in said and "did you mean tp_size?" in said
