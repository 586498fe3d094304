"""From lines of a file to the documents of a step, and to the steps of a run."""

import json

import numpy as np
import pytest

from relax_hpc.cli.demo import models
from relax_hpc.config.run import SftConfig
from relax_hpc.data.documents import Documents, batch_end, count_steps
from relax_hpc.data.rows import open_rows
from relax_hpc.errors import ConfigError


@pytest.fixture(scope="module")
def tokens():
    return models.tokenizer()


def conversation(answer, question="q"):
    turns = [("user", question), ("assistant", answer)]
    return {"messages": [{"role": role, "content": text} for role, text in turns]}


def settings(**more):
    return SftConfig(train="unused", **{"batch_size": 4, "num_steps": 1} | more)


def open_documents(folder, tokens, lines, **more):
    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Documents(path, tokens, settings(**more))


def test_three_ways_to_write_a_document_give_the_same_tokens(tmp_path, tokens):
    question = [{"role": "user", "content": "q"}]
    documents = open_documents(tmp_path, tokens, [
        conversation("a"),
        {"prompt": "q", "completion": "a", "answer": "is for the verifier"},
        {"prompt": question, "answer": "a"},
    ])  # fmt: skip
    first, *others = map(documents.document, range(3))
    assert tokens.decode(first.token_ids[first.loss_mask == 1]) == "a<|im_end|>"
    for other in others:
        np.testing.assert_array_equal(other.token_ids, first.token_ids)
        np.testing.assert_array_equal(other.loss_mask, first.loss_mask)


def test_turns_in_a_prompt_are_not_trained_on_and_tools_go_to_the_template(tmp_path, tokens):
    turns = [{"role": r, "content": r[0]} for r in ("user", "assistant", "user")]
    line = {"prompt": turns, "completion": "b", "tools": [{"name": "f"}]}
    tokens = models.tokenizer(
        chat_template="{%- for tool in tools %}{{- tool.name }}{%- endfor %}" + models.CHAT_TEMPLATE
    )
    document = open_documents(tmp_path, tokens, [line]).document(0)
    assert tokens.decode(document.token_ids[document.loss_mask == 1]) == "b<|im_end|>"
    assert tokens.decode(document.token_ids).startswith("f<|im_start|>user")


def test_json_lines_and_parquet_hold_the_same_rows(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    lines = [
        conversation("é\n"),
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [1]}]},
    ]
    (tmp_path / "x.jsonl").write_bytes("\n\n".join(map(json.dumps, lines)).encode())  # no \n at end
    pq.write_table(pa.Table.from_pylist(lines), tmp_path / "x.parquet")
    text, table = (open_rows(tmp_path / f"x.{kind}") for kind in ("jsonl", "parquet"))
    assert [text[n].fields for n in range(len(text))] == lines
    assert [table[n].fields for n in range(len(table))] == lines
    assert [text[0].where, text[1].where] == [f"{tmp_path}/x.jsonl, line {n}" for n in (1, 3)]
    assert table[1].where == f"{tmp_path}/x.parquet, row 1"


def test_every_epoch_has_every_document_once_in_another_order(tmp_path, tokens):
    documents = open_documents(tmp_path, tokens, [conversation(str(n)) for n in range(9)])
    epochs = [[documents.index_of(n) for n in range(start, start + 9)] for start in (0, 9)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(9))
    assert epochs[0] != epochs[1]
    again = open_documents(tmp_path, tokens, [conversation(str(n)) for n in range(9)])
    assert [again.index_of(n) for n in range(9, 18)] == epochs[1]  # without the epoch before


LENGTHS = [3, 1, 4, 1, 5]
ENDS = {  # of the batches of two epochs in the file's order
    "documents": (dict(batch_size=4), [4, 8, 10]),
    "tokens": (dict(batch_size=None, tokens_per_step=5), [2, 4, 5, 7, 9, 10]),
}


@pytest.mark.parametrize("rule", ENDS)
def test_a_step_ends_where_its_documents_or_its_tokens_do(tmp_path, tokens, rule):
    how, ends = ENDS[rule]
    sft = settings(epochs=2, num_steps=None, shuffle_seed=None, **how)
    found, start = [], 0
    while (end := batch_end(sft, 5, start, lambda n: LENGTHS[n % 5])) > start:
        found.append(end)
        start = end
    assert found == ends
    lines = [conversation("x")] * 5
    documents = open_documents(tmp_path, tokens, lines, shuffle_seed=None)
    assert count_steps(sft, documents, LENGTHS) == len(ends)
    fewer = sft.model_copy(update={"num_steps": 2})
    assert count_steps(fewer, documents, LENGTHS) == 2


def test_a_long_document_is_refused_or_cut_where_the_job_says(tmp_path, tokens):
    lines = [conversation("a"), conversation("a" * 50), conversation("a", question="q" * 50)]
    strict = open_documents(tmp_path, tokens, lines, max_tokens=20)
    with pytest.raises(ConfigError, match=r"line 2: has 59 tokens, sft.max_tokens = 20; raise it"):
        strict.document(1)
    cut = open_documents(tmp_path, tokens, lines, max_tokens=20, too_long="truncate")
    short, long, only_prompt = map(cut.document, range(3))
    assert (short.is_truncated, short.num_trained, len(short.token_ids)) == (False, 2, 10)
    assert (long.is_truncated, long.num_trained, len(long.token_ids)) == (True, 13, 20)
    assert (only_prompt.is_truncated, only_prompt.num_trained) == (True, 0)
