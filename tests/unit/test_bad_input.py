"""Whatever is wrong with a job, one line says so and nothing starts; what `check` prints."""

import json
import math
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from hf_checkpoint import QWEN3, write

from relax_hpc.cli import main
from relax_hpc.config.job_file import validate
from relax_hpc.config.run import RunConfig, SftRunConfig
from relax_hpc.errors import ConfigError

NINES = "9" * 20
SETTINGS = {
    "schedule.max_stalenes=1": "s = 1: unknown key; did you mean schedule.max_staleness?",
    "actor.resources.acount=x": "did you mean actor.resources.account?",
    "model.path=Qwen/Qwen3-0.6B": "a downloaded Hugging Face model",
    "reward.name=mine.py:score": "mine.py",
    "schedule.num_steps=many": "schedule.num_steps = 'many': use a whole number",
    "algorithm=3": "algorithm = 3: is a table of settings; it takes preset, aggregation,",
    "name=a/b": "name = 'a/b': use letters of a to z, digits, - and _, a letter",
    "rollout.advanced.routed_experts=true": "= true: the embedded engine has no experts; use",
    "actor.transformer.recompute_granularty=full": "did you mean recompute_granularity?",
    "rollout.max_new_tokens=5000": "prompt has 10 tokens and the model 4096 positions; use 4086 or",
    "eval.path=x": "eval.path = 'x': is eval.heldout.path now; use that",
    "model=x": "model = 'x': is a table of settings; it takes path, weights, dtype",
    "schedule.epochs=2": "unknown key; a run has schedule.num_steps: rows x epochs",
    "engines.rollout.args.num_thread=2": "did you mean num_threads?",
    "launch.profile=locl": "launch.profile = 'locl': no such profile; did you mean local?",
    "model.path=nowhere": "no such folder; name a downloaded Hugging Face model",
    "run_root=/proc/runs": "choose a folder of yours that every node sees",
    "eval.heldout.path=model": "model: is a folder; name one that holds .jsonl",
    "prompts.max_prompt_tokens=2": "raise it, or remove the line",
    # Beyond their types, and values that are none.
    f"seed={NINES}": f"seed = {NINES}: use 2147483647 or less",
    "schedule.num_steps='5'": "schedule.num_steps = '5': use a whole number",
    "schedule.num_steps=" + "9" * 5000: "schedule.num_steps = '9999",
    f"weights.advanced.bucket_bytes={NINES}": "use 9223372036854775807 or less",
    "engines.rollout.args.x=[1, [nan]]": "args.x = [1, [nan]]: a finite number is expected",
    f"engines.rollout.args.x={NINES}": f"args.x = {NINES}: has more than 64 bits; use",
    "engines.rollout.args.x=2024-01-01": "is a date or a time; a number, a string, true, false or",
    "algorithm.mini_batches=99": "mini_batches = 99: a batch has schedule.prompts_per_step = 4",
    "run_root=$HOME/runs": "run_root = '$HOME/runs': variables are not put in; write the path out",
    f"name={'n' * 300}": "use 200 or fewer characters",
    "actor.resources.x=1": "actor.resources.x = 1: unknown key; actor.resources takes partition,",
    "actor.lr=1": "actor.lr = 1: unknown key; here it is actor.optimizer.lr",
    "actor.lora.alpha=8": "alpha = 8.0: means nothing with rank = 0; set a rank, e.g. 32, or",
    "actor.lora.targets=['lm_head']": "use 'q_proj', 'k_proj', 'v_proj', 'o_proj',",
    "critic.lrx=1": "critic.lrx = 1: unknown key; did you mean critic.lr?",
    "eval.heldout.samples_per_prompt=4": "= 4: are all alike, since temperature = 0 is greedy; set",
    "schedule.max_new_tokens=1": "here it is rollout.max_new_tokens or eval.<name>.max_new_tokens",
    'resources.comment="a\\nb"': "comment = 'a\\nb': has a line break or another control character",
    'actor.resources.mem="1G\\n#SBATCH -N9"': "actor.resources.mem = '1G\\n#SBATCH -N9': has a",
    "resources.nodes=2": "nodes = 2: is of one component; set actor.resources.nodes, or that of an",
    "algorithm..x=1": "--set algorithm..x=1: algorithm..x is no key; write section.key=value",
    "name=" + "[" * 5000: "name = '[[[[",
}


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting[:40])
def test_a_setting_that_cannot_work_is_answered_in_one_line(refused, setting):
    said = refused("submit", "job.toml", "--local", "--set", setting)
    assert SETTINGS[setting] in said and "\n" not in said and len(said) < 600


FILES = {
    ("job.toml", None): "no such file; name a TOML file; relax-hpc init NAME makes one",
    ("job.toml", b" \n"): "job.toml: is empty; relax-hpc init NAME makes a TOML file",
    ("job.toml", b"name: run"): "job.toml: is not TOML: Expected '=' after a key",
    ("train.jsonl", b""): "train.jsonl: is empty; it has to hold a row",
    ("heldout.jsonl", b'{"prompt": "1+1="}'): "heldout.jsonl, line 1: has no answer",
    ("model/config.json", None): "has no config.json",
    ("model/config.json", b'{"model_type": "gpt2"}'): "'gpt2': only llama, mistral, qwen2, qwen3, ",
    ("model/config.json", b'{"model_type": "qwen3"}'): "hidden_size = missing: a positive integer",
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


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("is_causal", False, "is_causal = False: only None or True is supported: no token sees"),
        ("rope_scaling", {"rope_type": "dynamic"}, "= 'dynamic': only default, linear, yarn, "),
    ],
)
def test_a_model_that_would_be_computed_otherwise_than_by_transformers_is_refused(
    refused, field, value, message
):
    path = Path("model/config.json")
    path.write_text(
        json.dumps(json.loads(path.read_text(encoding="utf-8")) | {field: value}), encoding="utf-8"
    )
    said = refused("check", "job.toml")
    assert message in said and "\n" not in said


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
        if verb == "check":
            assert "\nnothing else is wrong; where that is there: relax-hpc submit job" in said


@pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang is not installed")
def test_sglang_arguments_are_checked_by_its_own_parser(refused):
    engine = ("--set", "engines.rollout.kind=sglang", "--set", "engines.rollout.args.tp_sise=2")
    said = refused("submit", "job.toml", "--local", *engine)
    assert "engines.rollout.args.tp_sise" in said and "did you mean tp_size?" in said


def test_a_teacher_of_other_tokens_than_the_models_is_refused(refused, tiny_model):
    teacher = "algorithm.preset=distill", "teachers.t.path=other"
    settings = [word for each in teacher for word in ("--set", each)]
    Path("other").mkdir()
    write(Path("other"), QWEN3)
    said = refused("check", "job.toml", *settings)
    assert "8 in its config.json, 320 in model.path's; use a teacher of the same tokenizer" in said
    shutil.rmtree("other")
    shutil.copytree(tiny_model, "other")
    tokenizer = json.loads(Path("other/tokenizer.json").read_text(encoding="utf-8"))
    known = tokenizer["model"]["vocab"]
    one, two = sorted(known)[:2]
    known[one], known[two] = known[two], known[one]
    Path("other/tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    said = refused("check", "job.toml", *settings)
    assert "teachers.t.path = " in said and "its tokenizer.json has another token" in said


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("seed = " + "9" * 5000, "job.toml: is not TOML: Exceeds the limit"),
        ("x = " + "[" * 5000, "job.toml: is nested too deeply; relax-hpc init NAME makes one"),
        ('name = "again"', "job.toml: is not TOML: Cannot overwrite a value"),
    ],
    ids=["endless", "deep", "key twice"],
)
def test_a_job_file_that_holds_one_is_refused(refused, job, line, message):
    text = (job / "job.toml").read_text()
    (job / "job.toml").write_text(f"{line}\n{text}")
    said = refused("check", "job.toml")
    assert message in said and "\n" not in said


def fields(section):
    for name, field in section.model_fields.items():
        if hasattr(field.annotation, "model_fields"):
            yield from ((f"{name}.{key}", of) for key, of in fields(field.annotation))
        else:
            yield name, field


@pytest.mark.parametrize("kind", [RunConfig, SftRunConfig])
@pytest.mark.parametrize("value", [math.inf, math.nan, 10**40, -(10**40), 1e300])
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


NEXT = "nothing is wrong; next: relax-hpc submit job.toml"


@pytest.fixture
def check(job, monkeypatch, capsys):
    """Runs `check`; what a terminal shows, or what comes out beside what is said."""
    Path("heldout.jsonl").write_text(
        Path("train.jsonl").read_text(encoding="utf-8"), encoding="utf-8"
    )  # there is a remark on it

    def run(*arguments, terminal):
        with monkeypatch.context() as patch:
            if terminal:
                patch.setattr(sys.stdout, "isatty", lambda: True)
                patch.setattr(sys, "stderr", sys.stdout)
            main.app(["check", "job.toml", "--local", *arguments], standalone_mode=False)
        return capsys.readouterr()

    return run


def test_a_terminal_shows_remarks_and_then_what_comes_next(check, monkeypatch):
    monkeypatch.setattr(main, "decode_media", lambda _, say: say("decoded 7 media"))
    shown = check("--set", "reward.args={ }", "--decode", terminal=True).out.splitlines()
    assert shown[0] == "decoded 7 media"
    assert any("are trained on" in line for line in shown[1:-1])
    assert not any(line.startswith("{") for line in shown)
    assert shown[-1] == f"{NEXT} --local --set 'reward.args={{ }}'"


@pytest.mark.parametrize(("steps", "is_said"), [(9, True), (10, False)])
def test_a_warm_up_that_is_longer_than_the_run_is_told_of(check, steps, is_said):
    asked = ("actor.optimizer.warmup_steps=10", f"schedule.num_steps={steps}")
    asked = ("actor.optimizer.lr=1e-5", *asked)
    said = check(*(word for each in asked for word in ("--set", each)), terminal=False).err
    told = "learns in 9 steps, so the learning rate rises to 9e-06 only, not to 1e-05\n"
    assert (told in said, "rises" in said) == (is_said, is_said)
