"""The reference, teachers, and models as they were published: what is refused, what is given."""

import json
import math
import re
from contextlib import nullcontext

import numpy as np
import pytest
from hf_checkpoint import QWEN3, write
from job_trees import job_of
from llama_configs import CONFIGS

from relax_hpc.config.hf_config import ConfigJson
from relax_hpc.config.prompts import PromptsConfig
from relax_hpc.data.records import Records
from relax_hpc.data.source import PromptSource
from relax_hpc.data.tokenizer import load
from relax_hpc.errors import ConfigError
from relax_hpc.launch.placement import place
from relax_hpc.roles import table
from relax_hpc.roles.facts import Facts
from relax_hpc.roles.teacher.prompts import PrivilegedPrompts
from relax_hpc.roles.teacher.routing import taught_by
from relax_hpc.roles.training import check as training_check
from relax_hpc.roles.training.check import check_teachers, check_window
from relax_hpc.trainer.megatron.costs import training_flops
from relax_hpc.trainer.models import fields
from relax_hpc.trainer.models.registry import parameters, read_architecture


def refused(match):
    return pytest.raises(ConfigError, match=match)


def referring(reference=None, *, kl=0.0, path="m"):
    actor = {
        "layout": {"tensor_parallel": 4}, "tokens_per_micro_batch": 1000,
        "advanced": {"attention": "sdpa"},
    }  # fmt: skip
    return job_of(
        model__path=str(path), algorithm__kl={"name": "k3", "coefficient": kl}, actor=actor,
        reference=reference or {},
    )  # fmt: skip


@pytest.mark.parametrize(("reference", "kl", "message"), [
    ({}, 0.1, "algorithm.kl.coefficient = 0.1: needs a reference; set reference.placement"),
    ({"placement": "actor", "layout": {"tensor_parallel": 2}}, 0.1,
     "reference.layout = {'tensor_parallel': 2}: means nothing with reference.placement = "),
    ({"path": "x"}, 0.0, "reference.path = x: means nothing with reference.placement = 'none'"),
    ({"placement": "own", "layout": {"data_parallel": 3}, "resources": {"nodes": 2}}, 0.0,
     "the reference's ranks (tensor x pipeline x context x data_parallel) = 3: does not"),
])  # fmt: skip
def test_a_reference_that_cannot_be_is_refused(reference, kl, message):
    with refused(re.escape(message)):
        referring(reference, kl=kl)


@pytest.mark.parametrize(
    ("placement", "changes", "message"),
    [
        ("actor", {"hidden_size": 16}, "hidden_size is 16 in its config.json, 8 in model.path's"),
        ("actor", {"rope_theta": 1e4}, "default with base 10000 in its config.json, default with"),
        ("own", {"vocab_size": 12}, "vocab_size is 12 in its config.json, 8 in model.path's"),
        ("own", {"hidden_size": 16}, None),
    ],
)
def test_a_model_that_cannot_be_the_reference_is_refused(tmp_path, placement, changes, message):
    model, other = folder(tmp_path / "model"), folder(tmp_path / "other", **changes)
    config = referring({"placement": placement, "path": str(other)}, path=model)
    with nullcontext() if message is None else refused(re.escape(message)):
        training_check.check_reference(config, Facts(model))


def test_a_reference_of_its_own_component_is_trained_with_though_only_measured():
    assert referring({"placement": "own"}).columns == {"ragged/ref_logprobs"}
    assert referring().columns == set()


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
    (ONE | {"u": {"path": "y"}}, {}, "teachers.t.sources: is not set; say what each of several"),
    ({"t": {"path": "x", "sources": ["math"]}}, {}, "prompts.sources.code: has no teacher; add it"),
    (TWO | {"u": {"path": "z", "sources": ["code"]}}, {}, "teachers.two teaches code already; le"),
    ({"t": {"prompt": "a {answer}"}}, {}, "teachers.t.prompt = 'a {answer}': leaves the prompt o"),
    ({"t": {"prompt": "{prompt} {answer}"}}, {"rollout": {"environment": "tools.py:Tools"}},
     "teachers.t.prompt: an episode of rollout.environment = 'tools.py:Tools' is no prompt and"),
]  # fmt: skip


@pytest.mark.parametrize(("teachers", "tables", "message"), MISTAKES)
def test_a_teacher_that_cannot_be_is_refused(teachers, tables, message):
    with refused(re.escape(message)):
        job(teachers, **tables)


def test_each_teacher_is_a_component_with_a_column_of_its_own_and_only_where_it_teaches():
    config = job(TWO, actor={"layout": {"tensor_parallel": 2}})
    assert [(each.name, each.tasks) for each in place(config)] == [
        ("rollout", 1), ("actor", 2), ("teacher-one", 2), ("teacher-two", 2),
    ]  # fmt: skip
    writers = {"teacher-one-0": "teacher", "teacher-two-0": "teacher_2"}
    assert table.sidecar_writers(config) == writers
    assert config.columns == {"ragged/teacher_logprobs", "ragged/teacher_logprobs_2"}
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
    for each in (model, teacher):
        tokens(each, {"a": 0, "b": 1, "c": 2})
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


@pytest.fixture
def mixed(tmp_path):
    """Three sources of which each row says which it is of."""
    for name in SOURCES:
        rows = [
            {"prompt": f"{n}+{n}=", "answer": str(2 * n), "of": name, "hint": f"half is {n}"}
            for n in range(40)
        ]
        (tmp_path / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
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


def test_a_privileged_prompt_has_the_fields_of_its_row(mixed, tiny_model):
    settings = PromptsConfig(sources=mixed, user="Sum: {prompt}")
    source = source_of(settings, tiny_model, 0)
    text = "{prompt} {{{hint}}} {answer}"
    tokens = PrivilegedPrompts(source, "teachers.t.prompt", text)[3]
    said = source.tokenizer.decode(tokens)
    assert "Sum: 3+3= {half is 3} 6" in said
    plain = PrivilegedPrompts(source, "teachers.t.prompt", "{prompt}")[3]
    assert plain.tolist() == source.prompt(3).token_ids
    with refused(r"math, line 4: has no solution, which teachers\.t\.promp"):
        PrivilegedPrompts(source, "teachers.t.prompt", "{prompt} {solution}")[3]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_published_model_is_read_without_doubts_and_has_its_parameters(tmp_path, name):
    record, expected = CONFIGS[name]
    (tmp_path / "config.json").write_text(json.dumps(record))
    shape = read_architecture(tmp_path)
    assert fields.doubts(ConfigJson(tmp_path)) == []
    made = list(parameters(shape))
    assert sum(math.prod(size) for each in made for size in each.hf.values()) == expected
    assert shape.max_positions == record["max_position_embeddings"]
    assert shape.tied_embeddings == record["tie_word_embeddings"]
    assert shape.rope.base == record.get("rope_theta", 10000)
    assert shape.rope.kind == ("llama3" if record.get("rope_scaling") else "default")
    # 6 for each weight in a product: all but norms and an embedding that is not the output's too.
    norms = sum(math.prod(size) for each in made for n, size in each.hf.items() if "norm" in n)
    table = 0 if shape.tied_embeddings else shape.vocab_size * shape.hidden_size
    attended = shape.num_layers * shape.num_heads * shape.head_dim
    assert training_flops(shape, [1]) == 6 * (expected - norms - table + attended)


def test_a_reference_with_a_window_that_is_shorter_than_a_row_is_refused(tmp_path):
    record, _ = CONFIGS["Mistral-7B-v0.3"]
    for name, window in (("policy", None), ("reference", 4096)):
        (tmp_path / name).mkdir()
        text = json.dumps(record | {"sliding_window": window})
        (tmp_path / name / "config.json").write_text(text)
    for budget, fits in ((4096, True), (4097, False)):
        policy = str(tmp_path / "policy")
        config = job_of(model__path=policy, actor__tokens_per_micro_batch=budget)
        said = r"reference\.path = .*: has a sliding window of 4096 .* may have 4097 tokens; use "
        with nullcontext() if fits else pytest.raises(ConfigError, match=said):
            found, shape = (read_architecture(tmp_path / n) for n in ("reference", "policy"))
            check_window(config, f"reference.path = '{tmp_path}'", found, shape)
