"""Jobs of the folder `jobs`, checked as far as that goes without their models; data sets."""

import json
import math
import random
import shutil
import struct
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer
from typer.testing import CliRunner

from relax_hpc.cli.bench.shapes import SHAPES
from relax_hpc.cli.demo import models as demo
from relax_hpc.cli.demo import tasks
from relax_hpc.cli.main import app
from relax_hpc.cli.prepare import Made, prepare
from relax_hpc.data import tokenizer
from relax_hpc.errors import ConfigError
from relax_hpc.trainer.models import registry

JOBS = Path(__file__).parents[2] / "jobs"
OF_MEDIA = {*JOBS.glob("qwen3-vl-*.toml"), *JOBS.glob("qwen3-omni-*.toml")}
RECIPES = sorted(set(JOBS.glob("*-*.toml")) - OF_MEDIA)
SMALL = "qwen3-0.6b"
"""Stands for smaller ones, too."""
DATA = {"dapo": "dapo-math", "code": "deepcoder", "": "gsm8k"}
STAND_INS = sorted([JOBS / "demo.toml", *(JOBS / "tiny").glob("*.toml")])


def stand_in(folder, tiny_model, shape):
    """A model of this shape whose weights are a hole in a file; the tokenizer is the tiny one."""
    shutil.copytree(tiny_model, folder)
    (folder / "config.json").write_text(json.dumps(SHAPES[shape]))
    header, end = {}, 0
    tensors = {
        name.replace("{expert}", str(expert)): shape
        for parameter in registry.parameters(registry.read_architecture(folder))
        for name, shape in parameter.hf.items()
        for expert in range(parameter.num_experts or 1)
    }
    for name, shape in tensors.items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    said = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(said)) + said)
        file.truncate(8 + len(said) + end)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory, tiny_model):
    folder = tmp_path_factory.mktemp("models")
    shapes = ("qwen3-0.6b", "qwen3-4b", "qwen3-30b-a3b")
    return {shape: stand_in(folder / shape, tiny_model, shape) for shape in shapes}


def gsm8k_line(n, answer=None):
    answer = answer or f"It is <<1+{n}=1,00{n}>>1,00{n}.\n#### 1,00{n}"
    return json.dumps({"question": f"How many are {n}?", "answer": answer}) + "\n"


def dapo_line(n, **fields):
    wish = (
        "Solve the following math problem step by step. The last line of your response should be "
        f"of the form Answer: $Answer.\n\nFind ${n}$.\nSay it.\n\nRemember to put your answer on "
        'its own line after "Answer:".'
    )
    prompt, truth = [{"role": "user", "content": wish}], {"ground_truth": str(n), "style": "rule"}
    return json.dumps(fields or {"prompt": prompt, "reward_model": truth}) + "\n"


def deepcoder_line(n, tests=None, **fields):
    tests = tests or [{"type": "stdin_stdout", "input": f"{n}\n", "output": "1"}]
    return json.dumps({"problem": f"Print {n}.", "tests": json.dumps(tests), **fields}) + "\n"


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    """A folder of each data set, made by `prepare` of rows like those that are published."""
    root = tmp_path_factory.mktemp("data")
    made = {"gsm8k": gsm8k_line, "dapo-math": dapo_line, "deepcoder": deepcoder_line}
    for name, line in made.items():
        (root / f"{name}.jsonl").write_text("".join(map(line, range(3))))
        prepare(name, str(root / f"{name}.jsonl"), root / name, heldout=1)
    return {name: root / name for name in made}


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def rows_of(folder, text, name="deepcoder"):
    """All rows that are made of these."""
    source = folder.with_suffix(".jsonl")
    source.write_text(text, encoding="utf-8")
    prepare(name, str(source), folder, heldout=1)
    return [row for part in ("train", "heldout") for row in lines(folder / f"{part}.jsonl")]


def passes(job, overrides):
    options = [f"--set={key}={value}" for key, value in overrides.items()]
    answer = CliRunner().invoke(app, ["check", str(job), "--local", *options])
    assert answer.exit_code == 0, f"{answer.output}\n{answer.exception}"


@pytest.mark.parametrize("job", RECIPES, ids=lambda job: job.stem)
def test_every_recipe_passes_check_with_a_model_of_its_shape(job, models, prompts, tmp_path):
    data = prompts[next(name for key, name in DATA.items() if key in job.stem)]
    overrides = {
        "run_root": tmp_path,
        "model.path": next((models[s] for s in models if job.stem.startswith(s)), models[SMALL]),
        "prompts.train": data / "train.jsonl",
        "eval.heldout.path": data / "heldout.jsonl",
    }
    if "distill" in job.stem:
        overrides["teachers.large.path"] = models["qwen3-30b-a3b"]
    passes(job, overrides)


@pytest.mark.parametrize("job", STAND_INS, ids=lambda job: job.stem)
def test_every_job_for_two_cores_passes_check(job, tiny_model, prompts, tmp_path):
    text = job.read_text()
    overrides = {"run_root": tmp_path, "model.path": tiny_model}
    if "[teachers.sums]" in text:
        overrides["teachers.sums.path"] = tiny_model
    row = {"prompt": "1+1=", "answer": "2", "completion": "\\boxed{2}"}
    if '[reward]\nname = "code"' in text:
        tasks.write_programs(tmp_path, 1, 1, seed=0)
        row = json.loads((tmp_path / "train.jsonl").read_text())
    kind = next((kind for kind in ("vl-moe", "vl", "omni") if f"tiny-{kind}" in text), None)
    if kind:
        tokens, made, save = demo.make_media_model(kind, 0)
        save(tmp_path / "model", made, tokens)
        rows_of_kind = tasks.tone_rows if kind == "omni" else tasks.shape_rows
        row = json.loads(rows_of_kind(tmp_path, "train", 1, random.Random(0))[0])
        overrides["model.path"] = tmp_path / "model"
        overrides["engines.rollout.resources.python"] = sys.executable
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    table, heldout = ("sft", "sft.heldout") if "[sft]" in text else ("prompts", "eval.heldout.path")
    overrides |= dict.fromkeys((f"{table}.train", heldout), tmp_path / "rows.jsonl")
    passes(job, overrides)


def test_gsm8k_keeps_its_test_part_and_the_number_behind_the_mark(tmp_path):
    folder = tmp_path / "downloaded" / "main"
    folder.mkdir(parents=True)
    for file, numbers in (("train-00000-of-00001", (0, 1, 2, 1)), ("test-00000-of-00001", (2, 7))):
        table = pa.Table.from_pylist([json.loads(gsm8k_line(n)) for n in numbers])
        pq.write_table(table, folder / f"{file}.parquet")
    made = prepare("gsm8k", str(tmp_path / "downloaded"), tmp_path / "out", heldout=1)
    assert made == Made(train=2, heldout=2, repeated=2)
    train, heldout = (lines(tmp_path / "out" / f"{part}.jsonl") for part in ("train", "heldout"))
    assert [row["answer"] for row in train] == ["1000", "1001"]
    assert [row["answer"] for row in heldout] == ["1002", "1007"], "not trained on"
    wish = "Think step by step, and put the final number into \\boxed{}."
    assert train[0]["prompt"] == f"How many are 0?\n\n{wish}" and train[0]["source"] == "gsm8k"


def test_without_a_test_part_what_is_held_out_does_not_depend_on_the_order(tmp_path):
    for name, numbers in (("up", range(40)), ("down", range(39, -1, -1))):
        (tmp_path / f"{name}.jsonl").write_text("".join(map(dapo_line, numbers)))
        made = prepare("dapo-math", str(tmp_path / f"{name}.jsonl"), tmp_path / name, heldout=5)
        assert made == Made(35, 5, 0)
    up, down = (lines(tmp_path / name / "heldout.jsonl") for name in ("up", "down"))
    assert up == down[::-1] and [row["answer"] for row in up] != ["0", "1", "2", "3", "4"]
    answer = up[0]["answer"]
    wish = "Think step by step, and put the final answer into \\boxed{}."
    assert up[0]["prompt"] == f"Find ${answer}$.\nSay it.\n\n{wish}", "the problem, and our wish"


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "Find $5$.\nSay it.", "solution": "5"},
        {"prompt": [{"role": "user", "content": "Find $5$.\nSay it."}], "label": 5},
    ],
)
def test_the_editions_of_dapo_math_give_the_same_task(tmp_path, fields):
    found = rows_of(tmp_path / "a", dapo_line(5, **fields) + dapo_line(6), "dapo-math")
    assert found == rows_of(tmp_path / "b", dapo_line(5) + dapo_line(6), "dapo-math")


def refused(tmp_path, text=None, *, name="gsm8k", source=None):
    if text is not None:
        (tmp_path / "rows.jsonl").write_text(text)
    with pytest.raises(ConfigError) as error:
        prepare(name, str(source or tmp_path / "rows.jsonl"), tmp_path / "out", heldout=1)
    assert not list(tmp_path.glob("out/*"))
    return str(error.value)


def test_what_is_no_such_data_set_is_refused_with_its_line(tmp_path):
    good = gsm8k_line(0)
    said = refused(tmp_path, good + gsm8k_line(1, "It is 7."))
    assert "rows.jsonl, line 2: answer does not end with #### and a number" in said
    assert "has no answer, but question" in refused(tmp_path, '{"question": "a"}\n')
    assert "has 1 prompts, and none is left to train on" in refused(tmp_path, good)
    assert "is none of gsm8k, dapo-math" in refused(tmp_path, name="gsm")
    download = "hf download openai/gsm8k --repo-type dataset --local-dir gsm8k"
    assert download in refused(tmp_path, source=tmp_path / "nowhere")


def test_deepcoder_has_the_tests_of_each_of_its_parts_as_the_reward_reads_them(tmp_path):
    parts = {
        "stdin": [{"input": "1\n", "output": "1", "testtype": "stdin", "metadata": {}}],
        "method": [
            {"input": "[1]\n2", "output": "3", "metadata": {"func_name": "add"}, "testtype": "f"}
        ],
        "call": [{"type": "function_call", "fn_name": "add", "input": [1, 2], "output": [3]}],
        "pairs": {"inputs": ["5\n"], "outputs": ["6"]},
        "called": {"inputs": [[1]], "outputs": [2], "fn_name": "next"},
    }
    text = "".join(
        deepcoder_line(name, tests, starter_code="def add" if name == "method" else None)
        for name, tests in parts.items()
    )
    rows = rows_of(tmp_path / "a", text)
    found = {row["prompt"].split()[1].rstrip("."): row for row in rows}
    assert {name: json.loads(row["answer"]) for name, row in found.items()} == {
        "stdin": {"inputs": ["1\n"], "outputs": ["1"]},
        "method": {"fn_name": "add", "inputs": ["[1]\n2"], "outputs": ["3"]},
        "call": {"fn_name": "add", "inputs": [[1, 2]], "outputs": [[3]]},
        "pairs": parts["pairs"],
        "called": parts["called"],
    }
    read = {name for name, row in found.items() if "standard input" in row["prompt"]}
    assert read == {"stdin", "pairs"}
    assert "```python\ndef add\n```" in found["method"]["prompt"]
    # R1: a prompt says what its tests call.
    calls = {"call": "a function `add`", "called": "a function `next`"}
    assert all(calls.get(each, "") in row["prompt"] for each, row in found.items())
    assert "which is called" not in found["method"]["prompt"] + found["stdin"]["prompt"]


def test_deepcoder_keeps_fifteen_tests_with_the_longest_inputs_that_are_not_huge(tmp_path):
    tests = [{"input": "x" * n, "output": ""} for n in (*range(40), 70_000)]
    huge = [{"input": "y" * 70_000, "output": "1"}]
    with pytest.raises(ConfigError, match=r"a\.jsonl.*2.*neither a table nor a list"):
        rows_of(tmp_path / "a", deepcoder_line(0) + deepcoder_line(1, "text"))
    rows = rows_of(tmp_path / "a", deepcoder_line(0, tests) + deepcoder_line(1, huge))
    kept = {len(json.loads(row["answer"])["inputs"][0]): json.loads(row["answer"]) for row in rows}
    assert [len(each) for each in kept[25]["inputs"]] == list(range(25, 40))
    assert len(kept[70_000]["inputs"]) == 1


@pytest.mark.parametrize(
    ("name", "model_type"),
    [("TokenizersBackend", "qwen3"), ("Qwen2Tokenizer", "llama"), ("Qwen2TokenizerFast", "qwen3")],
)
def test_a_tokenizer_is_the_one_that_transformers_chooses(tiny_model, tmp_path, name, model_type):
    stored = shutil.copytree(tiny_model, tmp_path / "model")
    for file, change in (
        ("tokenizer_config.json", {"tokenizer_class": name}),
        ("config.json", {"model_type": model_type}),
    ):
        content = json.loads((stored / file).read_text()) | change
        (stored / file).write_text(json.dumps(content))
    ours, theirs = tokenizer.load(stored), AutoTokenizer.from_pretrained(stored)
    assert type(ours) is type(theirs)
    assert ours.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert ours.chat_template == theirs.chat_template
    text = "a  b\t\r\n é漢🙂 \x00\x7f"
    assert ours.decode(ours.encode(text)) == text
