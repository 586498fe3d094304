"""The sections [reference] and [teachers.NAME]: which jobs are refused, and what each is given."""

import json
import re
from contextlib import nullcontext

import numpy as np
import pytest
from hf_checkpoint import QWEN3, write
from job_trees import job_of

from relax_hpc.config.prompts import PromptsConfig
from relax_hpc.data.records import Records
from relax_hpc.data.source import PromptSource
from relax_hpc.data.tokenizer import load
from relax_hpc.errors import ConfigError
from relax_hpc.launch.placement import place
from relax_hpc.launch.script import Job, slurm_script
from relax_hpc.roles import table
from relax_hpc.roles.facts import Facts
from relax_hpc.roles.teacher.prompts import PrivilegedPrompts
from relax_hpc.roles.teacher.routing import of_its_teacher, taught_by
from relax_hpc.roles.training import check as training_check
from relax_hpc.roles.training.check import check_teachers
from relax_hpc.schema import COLUMNS, Trajectory
from relax_hpc.sections import Resources


def refused(match):
    return pytest.raises(ConfigError, match=match)


def referring(reference=None, *, kl=0.0, profile=None, path="m", **model):
    actor = {
        "layout": {"tensor_parallel": 4}, "tokens_per_micro_batch": 1000,
        "advanced": {"attention": "sdpa"},
    }  # fmt: skip
    return job_of(
        model={"path": str(path), **model}, algorithm__kl={"name": "k3", "coefficient": kl},
        actor=actor, reference=reference or {}, launch__profile=profile,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("reference", "kl", "message"),
    [
        ({}, 0.1, "algorithm.kl.coefficient = 0.1: needs a reference; set reference.placement"),
        ({"placement": "actor", "layout": {"tensor_parallel": 2}}, 0.1,
         "reference.layout = {'tensor_parallel': 2}: means nothing with reference.placement = "
         "'actor'; remove it, or use 'own'"),
        ({"path": "x"}, 0.0, "reference.path = x: means nothing with reference.placement = 'none'"),
        ({"placement": "own", "layout": {"data_parallel": 3}, "resources": {"nodes": 2}}, 0.0,
         "the reference's ranks (tensor x pipeline x context x data_parallel) = 3: does not"),
    ],
)  # fmt: skip
def test_a_reference_that_cannot_be_is_refused(reference, kl, message):
    with refused(re.escape(message)):
        referring(reference, kl=kl)


def test_a_component_of_its_own_comes_last_and_has_its_own_grid_and_resources(tmp_path):
    profile = tmp_path / "site.toml"
    profile.write_text('partition = "a"\n[reference]\npartition = "small"\n')
    layout = {"tensor_parallel": 2, "data_parallel": 3}
    own = {"placement": "own", "layout": layout, "resources": {"nodes": 3}}
    config = referring(own, profile=str(profile))
    rollout, actor, reference = place(config)
    assert (rollout.name, actor.name, reference.name) == ("rollout", "actor", "reference")
    assert (reference.tasks, reference.tasks_per_node) == (6, 2)
    assert reference.resources == Resources(partition="small", nodes=3)
    text = slurm_script(Job("run", tmp_path), place(config))
    assert text.count("#SBATCH hetjob") == 2
    assert "srun --het-group=2 --job-name=reference --nodes=3 --ntasks=6" in text
    assert table.sidecar_writers(config) == {"reference-0": "reference"}


@pytest.mark.parametrize(
    ("placement", "changes", "message"),
    [
        ("actor", {"hidden_size": 16}, "hidden_size is 16 in its config.json, 8 in model.path's"),
        ("actor", {"rope_theta": 1e4}, "default with base 10000 in its config.json, default with"),
        ("own", {"vocab_size": 12}, "vocab_size is 12 in its config.json, 8 in model.path's"),
        ("own", {"hidden_size": 16}, None),
        ("actor", {}, None),
    ],
)
def test_a_model_that_cannot_be_the_reference_is_refused(tmp_path, placement, changes, message):
    model, other = folder(tmp_path / "model"), folder(tmp_path / "other", **changes)
    config = referring({"placement": placement, "path": str(other)}, path=model)
    with nullcontext() if message is None else refused(re.escape(message)):
        training_check.check_reference(config, Facts(model))


SOURCES = {"math": {"path": "a", "weight": 3.0}, "code": {"path": "b"}, "chat": {"path": "c"}}
TWO = {"one": {"path": "x", "sources": ["math", "chat"]}, "two": {"path": "y", "sources": ["code"]}}


def job(teachers, *, sources=SOURCES, model="m", **tables):
    prompts = {"sources": sources} if sources else {"train": "t"}
    made = {"algorithm": {"preset": "distill"}} | tables
    return job_of(model__path=str(model), prompts=prompts, teachers=teachers, **made)


ONE = {"t": {"path": "x"}}
MISTAKES = [
    ({}, {}, "algorithm.distill.name = 'advantage': needs a teacher; add a table [teachers.NAME]"),
    (ONE, {"algorithm": {}}, "teachers.t: nobody learns from it with algorithm.distill.name = 'no"),
    ({"t": {}}, {}, "teachers.t.path: is not set, so it is what training starts with and sees"),
    ({"t": {"path": "x", "sources": ["mth"]}}, {}, "no prompts.sources.mth; did you mean math?"),
    (ONE | {"u": {"path": "y"}}, {}, "teachers.t.sources: is not set; say what each of several"),
    ({"t": {"path": "x", "sources": ["math"]}}, {}, "prompts.sources.code: has no teacher; add it"),
    (TWO | {"u": {"path": "z", "sources": ["code"]}}, {}, "teachers.two teaches code already; le"),
    ({"t": {"prompt": "a {answer}"}}, {}, "teachers.t.prompt = 'a {answer}': leaves the prompt o"),
    ({"t": {"prompt": "{prompt} {"}}, {}, "write {{ and }} for braces"),
    (
        {"t": {"prompt": "{prompt} {answer}"}},
        {"rollout": {"environment": "tools.py:Tools"}},
        "teachers.t.prompt: an episode of rollout.environment = 'tools.py:Tools' is no prompt and",
    ),
]


@pytest.mark.parametrize(("teachers", "tables", "message"), MISTAKES)
def test_a_teacher_that_cannot_be_is_refused(teachers, tables, message):
    with refused(re.escape(message)):
        job(teachers, **tables)


def test_each_teacher_is_a_component_with_a_column_of_its_own_and_only_where_it_teaches():
    config = job(TWO, actor={"layout": {"tensor_parallel": 2}})
    assert [(each.name, each.tasks) for each in place(config)] == [
        ("rollout", 1), ("actor", 2), ("teacher-one", 2), ("teacher-two", 2),
    ]  # fmt: skip
    assert table.sidecar_writers(config) == {
        "teacher-one-0": "teacher", "teacher-two-0": "teacher_2",
    }  # fmt: skip
    assert config.columns == {"ragged/teacher_logprobs", "ragged/teacher_logprobs_2"}
    plain = job({}, algorithm={})
    assert [each.name for each in place(plain)] == ["rollout", "actor"] and not plain.columns
    mixed = job(ONE, algorithm={"preset": "async", "distill": {"coefficient": 0.1}})
    assert [each.name for each in place(mixed)][2:] == ["teacher-t"]


def folder(path, **changes):
    path.mkdir()
    return write(path, QWEN3 | changes)


def tokens(path, vocab):
    (path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}}))


def test_a_teacher_of_another_vocabulary_is_refused(tmp_path):
    model, teacher = folder(tmp_path / "model"), folder(tmp_path / "teacher")
    config = job({"t": {"path": str(teacher)}}, model=model)
    check_teachers(config, Facts(model))
    tokens(model, {"a": 0, "b": 1, "c": 2})
    tokens(teacher, {"a": 0, "b": 1, "c": 2})
    check_teachers(config, Facts(model))
    tokens(teacher, {"a": 0, "c": 1, "b": 2})
    with refused(r"teachers\.t\.path = .*another token 1 .*same tokenizer"):
        check_teachers(config, Facts(model))
    larger = folder(tmp_path / "larger", vocab_size=12)
    with refused(r"t\.path = .*vocab_size is 12 .*config.json, 8 in model"):
        check_teachers(job({"t": {"path": str(larger)}}, model=model), Facts(model))
    layout = {"path": str(teacher), "layout": {"tensor_parallel": 3}}
    with refused(r"teachers\.t\.layout\.tensor_parallel = 3: does not div"):
        check_teachers(job({"t": layout}, model=model), Facts(model))


def line(n, **more):
    return json.dumps({"prompt": f"{n}+{n}=", "answer": str(2 * n), **more}) + "\n"


@pytest.fixture
def mixed(tmp_path):
    """Three sources of which each row says which it is of."""
    for name in SOURCES:
        rows = "".join(line(n, of=name, hint=f"half is {n}") for n in range(40))
        (tmp_path / name).write_text(rows)
    return {name: each | {"path": str(tmp_path / name)} for name, each in SOURCES.items()}


def source_of(settings, tiny_model, seed):
    records = Records(settings.mixture, settings)
    return PromptSource(records, load(tiny_model), shuffle_seed=seed, settings=settings)


def test_a_teacher_has_exactly_the_prompts_of_its_sources(mixed, tiny_model):
    config = job(TWO, sources=mixed, seed=3)
    source = source_of(config.prompts, tiny_model, config.seed)
    guids = np.arange(0, 2500, 7)
    found = np.array([source[int(guid)].metadata["of"] for guid in guids])
    for name, teacher in config.teachers.items():
        assert np.array_equal(taught_by(config, name)(guids), np.isin(found, teacher.sources))
    assert 0.5 < taught_by(config, "one")(guids).mean() < 0.95
    assert taught_by(job(ONE, sources=mixed), "t")(guids).all()


def test_a_row_has_the_values_of_the_teacher_that_had_it():
    empty = np.zeros(0, np.int32)
    values = [np.array([np.nan] * 2, np.float32), np.array([0, -1.5], np.float32)]
    names = ["ragged/teacher_logprobs", "ragged/teacher_logprobs_2"]
    assert set(names) < set(COLUMNS)
    row = Trajectory(
        0, 0, 0, 0, empty, 0, empty, empty, 0, 0.0,
        columns={name.split("/")[1]: one for name, one in zip(names, values, strict=True)},
    )  # fmt: skip
    found = of_its_teacher(row, names)
    assert list(found.columns) == ["teacher_logprobs"]
    assert found.columns["teacher_logprobs"].tolist() == [0, -1.5]
    assert of_its_teacher(row, names[:1]) is row


def test_a_privileged_prompt_has_the_fields_of_its_row(mixed, tiny_model):
    settings = PromptsConfig(sources=mixed, user="Sum: {prompt}")
    source = source_of(settings, tiny_model, 0)
    text = "{prompt} {{{hint}}} {answer}"
    tokens = PrivilegedPrompts(source, "teachers.t.prompt", text)[3]
    said = source.tokenizer.decode(tokens)
    assert "Sum: 3+3= {half is 3} 6" in said
    mine = source.prompt(3)
    plain = PrivilegedPrompts(source, "teachers.t.prompt", "{prompt}")[3]
    assert plain.tolist() == mine.token_ids
    with refused(r"math, line 4: has no solution, which teachers\.t\.promp"):
        PrivilegedPrompts(source, "teachers.t.prompt", "{prompt} {solution}")[3]
