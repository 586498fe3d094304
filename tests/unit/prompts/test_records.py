"""Several sources as the prompts of a run: who is asked when, what is left out, what is read."""

import asyncio
import json
import threading
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_hpc.config.job_file import load
from relax_hpc.config.prompts import PromptsConfig
from relax_hpc.data import records as records_of
from relax_hpc.data import rows as parquet
from relax_hpc.data.records import Records
from relax_hpc.data.source import KeptRows, PromptSource
from relax_hpc.errors import ConfigError
from relax_hpc.launch.submit import resolve


class Letters:
    chat_template = None

    def encode(self, text, *, add_special_tokens):
        return list(text.encode())


def lines(path, count, **more):
    rows = ({"prompt": f"{path.stem} {n}", "answer": str(n)} | more for n in range(count))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def opened(seed=0, graded_by="", **settings):
    config = PromptsConfig(chat_template=False, **settings)
    records = Records(config.mixture, config, graded_by=graded_by)
    return PromptSource(records, Letters(), shuffle_seed=seed, settings=config)


@pytest.fixture
def mixed(tmp_path):
    small = {"path": lines(tmp_path / "small.jsonl", 30), "weight": 3}
    large = {"path": lines(tmp_path / "large.jsonl", 600, source="own"), "weight": 1}
    return {"small": small, "large": large}


def asked(source, ordinals):
    return [source[ordinal] for ordinal in ordinals]


def test_of_each_thousand_prompts_every_source_has_its_share_and_its_name(mixed):
    source = opened(sources=mixed)
    assert len(source) == 630
    for block in (0, 3):
        prompts = asked(source, range(block * 1000, (block + 1) * 1000))
        assert [p.source for p in prompts].count("small") == 750
        assert [p.source for p in prompts].count("own") == 250
    small = [p.index for p in asked(source, range(1000)) if p.source == "small"]
    assert sorted(small[:30]) == sorted(small[30:60]) == list(range(30))
    assert small[:30] != small[30:60]
    row = source.prompt(30 + 599)
    assert (row.answer, row.messages[0]["content"]) == ("599", "large 599")
    assert row.where.endswith("large.jsonl, line 600")


def test_rows_that_are_left_out_of_a_source_are_asked_by_nobody_and_shares_stay(mixed):
    source, out = opened(sources=mixed), {3: "x", 29: "x", 30: "x", 400: "x"}
    source.leave_out(out)
    assert len(source) == 626
    prompts = asked(source, range(1000))
    assert [p.source for p in prompts].count("small") == 750
    small = [p.index for p in prompts if p.source == "small"]
    assert sorted(small[:28]) == sorted(set(range(30)) - {3, 29})
    large = {p.index for p in asked(source, range(4000)) if p.source == "own"}
    assert large == set(range(30, 630)) - {30, 400}
    with pytest.raises(ConfigError, match="source small: no row can be used; correct them, or rem"):
        source.leave_out(dict.fromkeys(range(30), "x"))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.integers(0, 5), st.data())
def test_the_rows_kept_of_each_block_are_counted(blocks, first, data):
    total = first + sum(blocks)
    out = data.draw(st.sets(st.integers(0, total - 1))) if total else set()
    starts = [first + sum(blocks[:n]) for n in range(len(blocks))]
    each = zip(starts, blocks, strict=True)
    expected = [len(set(range(start, start + size)) - out) for start, size in each]
    assert KeptRows(total, out).sizes(blocks, first) == expected


def test_what_is_wrong_with_a_source_is_said_with_its_name(mixed, tmp_path):
    with pytest.raises(ConfigError, match=r"^source small: .*gone: no such file"):
        opened(sources=mixed | {"small": {"path": tmp_path / "gone"}})


def test_of_very_many_rows_stretches_are_read_the_first_and_the_last_among_them(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(records_of, "MOST_READ", 64 * 5)
    path, looked = lines(tmp_path / "x.jsonl", 2000), []
    config = PromptsConfig(train=path)
    records = Records(
        config.mixture, config, wrong=lambda answer, source: looked.append(int(answer)) or ""
    )
    records.read()
    assert len(looked) == len(set(looked)) == 320
    assert {0, 4, 1995, 1999} <= set(looked) and looked == sorted(looked)
    assert max(b - a for a, b in pairwise(looked)) < 2000 / 60
    assert len(records) == 2000
    chosen = records.sample(10)
    assert len(chosen) == 10 and set(chosen) <= set(looked)


def test_each_epoch_begins_with_the_rows_of_the_smallest_number(tmp_path):
    path = tmp_path / "x.jsonl"
    rows = ({"prompt": "x", "answer": str(n), "level": (n * 7) % 20} for n in range(200))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = opened(train=path, graded_by="level")
    source.leave_out({0: "x", 20: "x"})  # of level 0
    for epoch in (0, 1):
        levels = [source[epoch * 198 + n].metadata["level"] for n in range(198)]
        assert set(levels[:28]) == {0, 1, 2} and set(levels[-20:]) == {18, 19}
        assert levels != sorted(levels)  # in tenths
        assert {source[epoch * 198 + n].index for n in range(198)} == set(range(200)) - {0, 20}
    two = {"a": {"path": lines(tmp_path / "a.jsonl", 200, level=1)}, "x": {"path": path}}
    found = asked(opened(sources=two, graded_by="level"), range(400))
    assert {each.metadata["level"] for each in found if each.source == "x"} == set(range(20))
    assert {each.metadata["level"] for each in found[:40] if each.source == "x"} <= {0, 1, 2}


@pytest.mark.parametrize("level", ["hard", True, float("nan")])
def test_a_row_without_a_number_to_be_graded_by_is_named(tmp_path, level):
    path = lines(tmp_path / "x.jsonl", 3, level=1)
    with path.open("a") as file:
        file.write(json.dumps({"prompt": "x", "answer": "2", "level": level}) + "\n")
    source = opened(train=path, graded_by="level")
    with pytest.raises(ConfigError, match=r"x.jsonl, line 4: level = .*: must be a number, since"):
        source.records.read()
    with pytest.raises(ConfigError, match=r"x.jsonl, line 4: level"):
        source[0]


def test_names_of_data_are_the_same_wherever_a_role_starts(job):
    text = Path("job.toml").read_text(encoding="utf-8")
    sources = """
[prompts.sources.a]
path = ["x.jsonl[5:]", "hf:a/b/train"]
[prompts.sources.b]
path = "y"
weight = 2
"""
    train = next(line for line in text.splitlines() if line.startswith(("train", "prompts.train")))
    Path("job.toml").write_text(text.replace(train, "") + sources, encoding="utf-8")
    config, _ = resolve(load(Path("job.toml")))
    found = {name: list(map(str, each.path)) for name, each in config.prompts.sources.items()}
    here = Path.cwd()
    assert found == {"a": [f"{here}/x.jsonl[5:]", "hf:a/b/train"], "b": [f"{here}/y"]}
    assert [str(path) for path in config.eval["heldout"].path] == [f"{here}/heldout.jsonl"]


async def test_the_event_loop_turns_while_a_row_group_is_read_and_held_rows_are_had_at_once(
    tmp_path, monkeypatch
):
    texts = [f"prompt {n}" for n in range(40)]
    for name, part in (("a", texts[:20]), ("b", texts[20:])):
        table = pa.table({"prompt": part, "answer": part})
        pq.write_table(table, tmp_path / f"{name}.parquet", row_group_size=10)
    monkeypatch.setattr(parquet, "_CACHE", parquet.GroupCache(2**20))
    source = opened(train=f"{tmp_path}/*.parquet[5:]")
    records, slow, begun = source.records, threading.Event(), threading.Event()
    assert records[0].prompt == texts[5]
    read = parquet.ParquetRows.read

    def waits(rows, number):
        begun.set()
        assert slow.wait(10)
        return read(rows, number)

    monkeypatch.setattr(parquet.ParquetRows, "read", waits)

    late = [asyncio.create_task(records.fetch(row)) for row in (34, 6)]
    while not begun.is_set():
        await asyncio.sleep(0.001)
    assert (await asyncio.wait_for(records.fetch(3), 5)).prompt == texts[8]
    assert not any(each.done() for each in late)
    slow.set()
    assert [(await each).prompt for each in late] == [texts[39], texts[11]]


@pytest.mark.parametrize("column", ["answer", "reward_model.ground_truth"])
def test_a_row_of_parquet_without_an_answer_is_told_so_and_not_to_rename_a_column(tmp_path, column):
    outer, _, inner = column.partition(".")
    answers = [{inner: each} if inner else each for each in ("2", None)]
    path = tmp_path / "some.parquet"
    pq.write_table(pa.table({"prompt": ["1+1=", "1+2="], outer: answers}), path)
    source = opened(train=path, columns={"answer": column})
    assert source.records[0].answer == "2"
    with pytest.raises(ConfigError) as refused:
        source.records[1]
    assert f"some.parquet, row 1: {column} has no value" in str(refused.value)
    with pytest.raises(ConfigError, match=r"row 0: has no result; it has prompt"):
        opened(train=path, columns={"answer": "result"}).records[0]
