"""Sources and held-out sets whose fields have names of their own, beside those of the job."""

import json
from pathlib import Path

import pytest

from relax_hpc.errors import ConfigError
from relax_hpc.job_file import load, read_resolved
from relax_hpc.launch.evaluate import Asked, job_of
from relax_hpc.paths import RunPaths
from relax_hpc.prompts import tokenizer
from relax_hpc.roles.rollout import prompt_check, row_check
from relax_hpc.runs.changes import changed

JOB = """
name = "run"
run_root = "runs"
model = {path = "model", dtype = "float32"}
schedule = {num_steps = 5, prompts_per_step = 4}
[prompts]
columns = {prompt = "question"}
[prompts.sources.gsm8k]
path = "gsm8k.jsonl"
[prompts.sources.sums]
path = "sums.jsonl"
columns = {prompt = "problem", answer = "truth.value", source = "subject"}
[eval.math]
path = "math.jsonl"
columns = {prompt = "problem", answer = "solution"}
[eval.same]
path = "gsm8k.jsonl"
"""
ROWS = {
    "gsm8k": [{"question": f"{n}+1=", "answer": str(n + 1)} for n in range(4)],
    "sums": [{"problem": f"{n}+2=", "truth": {"value": n + 2}, "subject": "sum"} for n in range(4)],
    "math": [{"problem": f"{n}+3=", "solution": str(n + 3), "level": n} for n in range(4)],
}


def write(name, rows):
    Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def two_layouts(job):
    Path("job.toml").write_text(JOB)
    for name, rows in ROWS.items():
        write(name, rows)
    return Path("job.toml")


def sources_of(config):
    tokens = tokenizer.load(Path("model"))
    return prompt_check.sources_of(config, prompt_check.read(config), tokens)


def test_each_set_is_read_by_its_own_names_and_by_the_jobs_where_it_has_none(two_layouts):
    config = load(two_layouts)
    files = prompt_check.read(config)
    found = [files.train[n] for n in (0, 7)]
    assert [(each.prompt, each.answer, each.source) for each in found] == [
        ("0+1=", "1", "gsm8k"), ("3+2=", "5", "sum"),
    ]  # fmt: skip
    math, same = files.heldout["math"][3], files.heldout["same"][3]
    assert (math.prompt, math.answer, math.metadata) == ("3+3=", "6", {"level": 3})
    assert (same.prompt, same.answer, same.metadata) == ("3+1=", "4", {})
    assert prompt_check.overlap_of(config, files).sets["same"].same.num_prompts == 4
    sources = sources_of(config)
    assert prompt_check.check_sample(config, sources) == []
    assert [sources.heldout["math"][n].answer for n in range(4)] == ["3", "4", "5", "6"]


@pytest.mark.parametrize("columns", ["", "columns = {prompt = 'question'}"])
def test_a_set_may_have_names_where_the_job_has_none(two_layouts, columns):
    text = JOB.replace('columns = {prompt = "question"}\n', "", 1)
    text = text.replace('path = "gsm8k.jsonl"\n', f'path = "gsm8k.jsonl"\n{columns}\n')
    two_layouts.write_text(text)
    if columns:
        assert prompt_check.read(load(two_layouts)).heldout["same"][0].prompt == "0+1="
    else:
        with pytest.raises(ConfigError, match=r"set prompts.sources.gsm8k.columns.prompt to the"):
            prompt_check.read(load(two_layouts))


def test_a_set_may_have_the_usual_name_where_the_job_has_another(two_layouts):
    write("math", [{"prompt": "1+1=", "answer": "2"}])
    setting = "eval.math.columns={prompt='prompt', answer='answer'}"
    assert prompt_check.read(load(two_layouts, [setting])).heldout["math"][0].prompt == "1+1="


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("eval.math.columns.answer='soltion'",
         "eval.math.path: HERE/math.jsonl, line 1: has no soltion; it has problem, solution, level;"
         " set eval.math.columns.answer to the field that is the answer; did you mean solution?"),
        ("eval.math.columns.promt='x'", "unknown key; did you mean eval.math.columns.prompt?"),
        ("eval.math.columns.source='levl'",
         "eval.math.columns.source = 'levl': none of the 4 rows that were looked at has it; the "
         "first has problem, solution, level; did you mean level?"),
        ("prompts.sources.sums.columns.answer='truth.vlue'",
         "HERE/sums.jsonl, line 1: has no truth.vlue; it has problem, truth.value, subject; set "
         "prompts.sources.sums.columns.answer to the field that is the answer; did you mean trut"),
        ("prompts.sources.sums.columns.source='subjet'",
         "prompts.sources.sums.columns.source = 'subjet': none of the 4 rows"),
        ("prompts.columns.tools='can'", "prompts.columns.tools = 'can': none of the 8 rows"),
        ("eval.math.columns=3", "job.toml: eval.math.columns = 3: is a table of settings"),
        ("prompts.columns.prompt=3", "job.toml: prompts.columns.prompt = 3: input should be a val"),
    ],
)  # fmt: skip
def test_a_mistake_is_said_with_its_set_before_anything_is_queued(
    two_layouts, refused, setting, said
):
    found = refused("submit", "job.toml", "--local", "--set", setting)
    assert said.replace("HERE", str(Path.cwd())) in found and "\n" not in found


def test_a_run_keeps_the_names_of_its_sets(two_layouts):
    config = load(two_layouts)
    tree = config.model_dump(mode="json")
    assert tree["eval"]["same"]["columns"]["prompt"] == "question"
    for key in ("prompts.columns.answer", "eval.math.columns.answer",
                "prompts.sources.sums.columns.answer"):  # fmt: skip
        why = (
            "points of a curve would" if key.startswith("eval") else "would change what is trained"
        )
        with pytest.raises(ConfigError, match=f"--set {key}='x': {why}"):
            changed(config, [f"{key}=x"])
    for each in (*tree["eval"].values(), *tree["prompts"]["sources"].values()):
        del each["columns"]  # as in runs of versions that had one name for all
    two_layouts.with_name("config.json").write_text(json.dumps(tree))
    old = read_resolved(two_layouts.with_name("config.json").absolute())
    assert all(each.columns == config.prompts.columns for each in old.eval.values())
    assert all(each.columns == config.prompts.columns for each in old.prompts.sources.values())


@pytest.mark.parametrize("key", ["eval.math", "prompts.sources.sums"])
def test_what_was_found_of_rows_is_not_used_for_other_names(two_layouts, monkeypatch, key):
    config, other = load(two_layouts), load(two_layouts, [f'{key}.columns.tools="none"'])
    paths, alone = RunPaths(Path("run")), row_check.Share(0, 1)
    row_check.settle(config, paths, sources_of(config), alone)
    looked = []
    examine = row_check.examine
    monkeypatch.setattr(
        row_check, "examine", lambda *args, **more: looked.append(1) or examine(*args, **more)
    )
    row_check.settle(config, paths, sources_of(config), alone)
    assert looked == []
    row_check.settle(other, paths, sources_of(other), alone)
    assert looked == [1]


def test_a_model_alone_is_scored_on_sets_with_names_of_their_own(two_layouts):
    keys = ["eval.math.columns.prompt=problem", "eval.math.columns.answer=solution"]
    alone = job_of(Asked(Path("model"), None, {"math": "math.jsonl"}, overrides=keys))
    of_job = job_of(Asked(Path("model"), two_layouts, {"math": "math.jsonl"}))
    for config, names in ((alone, ["math"]), (of_job, ["math", "same"])):
        sets = prompt_check.open_heldout(config)
        assert list(sets) == names and sets["math"][0].prompt == "0+3="
    assert sets["same"][0].prompt == "0+1="
