"""Rows that cannot be used: refused, or left out by all tasks alike, once and for all."""

import json
import logging
import os
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some

from relax_hpc import records
from relax_hpc.bus import layout
from relax_hpc.errors import ConfigError, PeerTimeoutError
from relax_hpc.job_file import load
from relax_hpc.paths import RunPaths
from relax_hpc.prompts import tokenizer
from relax_hpc.prompts.kept import Kept
from relax_hpc.prompts.source import Examined, PromptSource
from relax_hpc.roles.rollout import prompt_check, row_check
from relax_hpc.roles.rollout.row_check import Share

GOOD = {"prompt": "1+1=", "answer": "2"}
BAD = {
    1: "not JSON",
    3: json.dumps({"prompt": " ", "answer": "2"}),
    4: json.dumps({"question": "x", "answer": "2"}),
    6: json.dumps({"prompt": "1" * 40, "answer": "2"}),
    9: json.dumps({"prompt": "x", "answer": "two"}),
}
"""Row -> a line that is no prompt, of ten."""
REASONS = (
    "is not JSON",
    "the prompt is empty",
    "has no prompt; it has question, answer",
    "the prompt has 46 tokens",
    "answer = 'two': can never be matched",
)
SKIP = ["prompts.bad_rows=skip", "prompts.max_prompt_tokens=30"]


@given(some.integers(0, 50).flatmap(lambda n: some.tuples(some.just(n), some.sets(
    some.integers(0, max(n - 1, 0)), max_size=n))))  # fmt: skip
def test_rows_that_are_kept_are_numbered_anew_without_a_gap(case):
    num_rows, left_out = case
    kept = Kept(num_rows, left_out)
    assert [kept[index] for index in range(len(kept))] == sorted(set(range(num_rows)) - left_out)


@pytest.mark.parametrize("index", [-1, 2])
def test_a_number_beyond_the_rows_that_are_kept_is_none(index):
    with pytest.raises(IndexError):
        Kept(3, [1])[index]


@pytest.mark.parametrize("num_rows", [0, 1, 7, 10])
@pytest.mark.parametrize("size", [1, 3, 8])
def test_the_shares_of_all_tasks_are_all_rows_once(num_rows, size):
    shares = [row for number in range(size) for row in Share(number, size).rows(num_rows)]
    assert shares == list(range(num_rows))


@pytest.fixture
def data(job):
    lines = [BAD.get(row, json.dumps(GOOD | {"level": row})) for row in range(10)]
    Path("train.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return RunPaths(job / "run")


def sources_of(config):
    tokens = tokenizer.load(Path("model"))
    return prompt_check.sources_of(config, prompt_check.read(config), tokens)


def settled(config, paths, size):
    """The prompts of each of several tasks that look at their rows at the same time."""
    sources = [sources_of(config) for _ in range(size)]
    tasks = [
        threading.Thread(target=row_check.settle, args=(config, paths, each, Share(number, size)))
        for number, each in enumerate(sources)
    ]
    for task in tasks:
        task.start()
    for task in tasks:
        task.join()
    return [each.train for each in sources]


def test_all_tasks_leave_out_the_same_rows_and_list_them_with_reasons(data, caplog, monkeypatch):
    config = load(Path("job.toml"), SKIP)
    monkeypatch.setattr(logging.getLogger("relax_hpc"), "propagate", True)
    first, second, third = settled(config, data, 3)
    epochs = [
        [source[n].index for n in range(2 * len(source))] for source in (first, second, third)
    ]
    assert epochs[0] == epochs[1] == epochs[2]
    assert sorted(epochs[0][:5]) == sorted(epochs[0][5:]) == [0, 2, 5, 7, 8]
    assert [first[n].metadata["level"] for n in range(5)] == epochs[0][:5]
    listed = [json.loads(line) for line in data.left_out.read_text().splitlines()]
    assert [(each["set"], each["row"]) for each in listed] == [
        ("prompts.train", row) for row in sorted(BAD)
    ]
    for each, said in zip(listed, REASONS, strict=True):
        assert each["reason"].startswith(f"train.jsonl, line {each['row'] + 1}: {said}")
    assert "prompts.train: 5 of 10 rows are left out" in caplog.text


def test_who_starts_again_reads_what_was_found_and_looks_at_nothing(data, monkeypatch):
    config = load(Path("job.toml"), SKIP)
    before = settled(config, data, 2)[0]
    monkeypatch.delattr(PromptSource, "examine")
    sources = sources_of(config)
    row_check.settle(config, data, sources, Share(1, 2))
    assert [sources.train[n].index for n in range(9)] == [before[n].index for n in range(9)]


def test_a_run_does_not_go_on_with_another_number_of_rows(data):
    config = load(Path("job.toml"), SKIP)
    settled(config, data, 1)
    with Path("train.jsonl").open("a") as file:
        file.write(json.dumps(GOOD) + "\n")
    with pytest.raises(ConfigError, match=r"prompts.train: has 11 rows, the run was begun with 10"):
        row_check.settle(config, data, sources_of(config), Share(0, 1))


@pytest.mark.parametrize("header", [{}, {"order": 3}])
def test_a_run_that_was_begun_in_another_order_is_refused(tmp_path, header):
    paths = RunPaths(tmp_path).bus
    layout.create(paths, ["rollout-0"], header)
    said = (
        f"begun in order {header.get('order', 1)} of the prompts, this relax-hpc has order 2; use"
    )
    with pytest.raises(ConfigError, match=said):
        row_check.check_order(paths)


@pytest.mark.parametrize("change", ["data", "template", "settings"])
def test_what_was_found_is_not_used_for_other_data_templates_or_settings(data, monkeypatch, change):
    Path("train.jsonl").write_text(f"{json.dumps(GOOD)}\n" * 10)
    config = load(Path("job.toml"))
    settled(config, data, 1)
    looked = []

    def examine(source, rows, **_):
        looked.append(list(rows))
        raise KeyboardInterrupt

    monkeypatch.setattr(PromptSource, "examine", examine)
    sources = sources_of(config)
    row_check.settle(config, data, sources, Share(0, 1))
    assert looked == []
    if change == "data":
        text = Path("train.jsonl").read_text()
        Path("train.jsonl").write_text(text.replace("1+1=", "11+1="))
    elif change == "template":
        with Path("model/chat_template.jinja").open("a") as file:
            file.write(" ")
    else:
        config = load(Path("job.toml"), ["prompts.assistant_prefix=x"])
    with pytest.raises(KeyboardInterrupt):
        row_check.settle(config, data, sources_of(config), Share(0, 1))


def indices(source):
    return [source._row(n) for n in range(2 * len(source))]


def change_line(row, line):
    lines = Path("train.jsonl").read_text().splitlines()
    lines[row] = line
    Path("train.jsonl").write_text("".join(f"{each}\n" for each in lines))


CHANGES = {
    "touched": lambda: os.utime("train.jsonl", (1, 1)),
    "mended": lambda: change_line(1, json.dumps(GOOD)),
    "broken": lambda: change_line(0, "not JSON"),
}
"""What becomes of the data, which keep their number of rows."""


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_later_start_goes_by_what_was_decided_whatever_becomes_of_the_data(
    data, monkeypatch, size, change
):
    config = load(Path("job.toml"), [*SKIP, "launch.peer_timeout_s=5"])
    before, listed = indices(settled(config, data, 2)[0]), data.left_out.read_text()
    assert sorted(before) == sorted([0, 2, 5, 7, 8] * 2)
    CHANGES[change]()
    monkeypatch.delattr(PromptSource, "examine")
    for number in range(2):
        data.prompt_rows(number).unlink()  # what was decided stands for itself
    sources = sources_of(config)
    row_check.settle(config, data, sources, Share(size - 1, size))  # alone: waits for nobody
    assert indices(sources.train) == before
    assert all(indices(source) == before for source in settled(config, data, size))
    assert data.left_out.read_text() == listed
    if change == "broken":
        with pytest.raises(ConfigError, match=r"train.jsonl, line 1: is not JSON"):
            sources.train[before.index(0)]


def test_what_was_decided_is_small_and_made_once(data):
    config = load(Path("job.toml"), SKIP)
    settled(config, data, 2)
    record = json.loads(data.decided_rows.read_text())
    assert record["num_rows"]["prompts.train"] == 10
    assert record["left_out"]["prompts.train"] == sorted(BAD)
    made = data.decided_rows.stat()
    settled(config, data, 3)
    assert data.decided_rows.stat() == made
    data.decided_rows.write_text(json.dumps(record | {"format": 99}))
    with pytest.raises(ConfigError, match=r"left-out.json: was written by another version of rel"):
        row_check.settle(config, data, sources_of(config), Share(0, 1))


def test_of_two_tasks_that_decide_at_once_both_go_by_what_the_first_decided(data, monkeypatch):
    def list_them(paths, rows):  # another was faster, and found rows 5 and 7 bad
        record = row_check.Decision({"prompts.train": 10}, {}, {"prompts.train": [5, 7]})
        records.write_json(paths.decided_rows, {"format": 1, **record._asdict()})

    monkeypatch.setattr(row_check.broken_media, "list_left_out", list_them)
    monkeypatch.setattr(row_check, "check_lengths", lambda *_: None)
    [source] = settled(load(Path("job.toml"), SKIP), data, 1)
    assert sorted(indices(source)[:8]) == [0, 1, 2, 3, 4, 6, 8, 9]


def test_lengths_are_looked_at_before_it_is_decided_and_at_every_start_thereafter(data):
    config = load(Path("job.toml"), SKIP)
    short = load(Path("job.toml"), [*SKIP, "actor.tokens_per_micro_batch=20"])
    said = r"micro_batch = 20: the longest prompt has \d+ tokens"
    with pytest.raises(ConfigError, match=said):
        row_check.settle(short, data, sources_of(short), Share(0, 1))
    assert not data.decided_rows.exists()
    settled(config, data, 1)
    assert data.decided_rows.exists()
    with pytest.raises(ConfigError, match=said):
        row_check.settle(short, data, sources_of(short), Share(0, 1))


@pytest.mark.parametrize("number", [0, 2], ids=["first", "further"])
@pytest.mark.parametrize("change", ["touched", "mended"])
def test_a_run_of_a_version_that_kept_no_decision_goes_on_with_what_its_tasks_found(
    data, monkeypatch, number, change
):
    config = load(Path("job.toml"), SKIP)
    before = indices(settled(config, data, 2)[0])
    data.decided_rows.unlink()
    CHANGES[change]()
    with monkeypatch.context() as patched:
        patched.delattr(PromptSource, "examine")
        sources = sources_of(config)
        row_check.settle(config, data, sources, Share(number, 3))
        assert indices(sources.train) == before and data.decided_rows.exists()
    data.decided_rows.unlink()
    data.prompt_rows(1).unlink()  # of the two, one had not come to it
    looked = []
    monkeypatch.setattr(
        PromptSource, "examine", lambda *_, **__: looked.append(1) or Examined(1, [])
    )
    settled(config, data, 3)
    assert len(looked) == 3 * len(sources_of(config).by_key)


def test_before_anything_is_decided_data_of_which_no_row_can_be_used_may_be_mended(data):
    good = Path("train.jsonl").read_text()
    Path("train.jsonl").write_text("no\n" * 10)
    config = load(Path("job.toml"), [*SKIP, "launch.peer_timeout_s=1"])
    for number in (1, 0):  # task 1 waits for task 0, which decides nothing
        with pytest.raises((ConfigError, PeerTimeoutError)):
            row_check.settle(config, data, sources_of(config), Share(number, 2))
    assert data.prompt_rows(0).exists() and data.prompt_rows(1).exists()
    assert not data.decided_rows.exists()
    Path("train.jsonl").write_text(good)
    assert [sorted(indices(each)) for each in settled(config, data, 2)] == [
        sorted([0, 2, 5, 7, 8] * 2)
    ] * 2


def test_a_task_that_does_not_look_at_its_rows_is_named(data):
    config = load(Path("job.toml"), [*SKIP, "launch.peer_timeout_s=1"])
    with pytest.raises(PeerTimeoutError, match=r"rollout-0, rollout-2 did not look at its prompts"):
        row_check.settle(config, data, sources_of(config), Share(1, 3))


def test_a_task_that_does_not_decide_is_named(data):
    config = load(Path("job.toml"), [*SKIP, "launch.peer_timeout_s=1"])
    with pytest.raises(PeerTimeoutError):
        row_check.settle(config, data, sources_of(config), Share(0, 2))
    with pytest.raises(PeerTimeoutError, match=r"rollout-0 did not decide in launch.peer_timeou"):
        row_check.settle(config, data, sources_of(config), Share(1, 2))


def test_a_file_of_nothing_but_bad_rows_is_refused_though_they_may_be_skipped(data):
    Path("train.jsonl").write_text("no\n" * 3)
    config = load(Path("job.toml"), SKIP)
    with pytest.raises(
        ConfigError, match=r"^prompts.train: no row can be used; the first: .*line 1"
    ):
        row_check.settle(config, data, sources_of(config), Share(0, 1))


def test_without_leave_a_task_that_finds_a_bad_row_ends(data):
    lines = [json.dumps(GOOD)] * 5 + [BAD[6]] + [json.dumps(GOOD)] * 4
    Path("train.jsonl").write_text("\n".join(lines))
    config = load(Path("job.toml"), ["prompts.max_prompt_tokens=30"])
    row_check.settle(config, data, sources_of(config), Share(0, 2))  # waits for nobody
    with pytest.raises(ConfigError, match=r"^prompts.train: .*line 6: the prompt has 46 tokens"):
        row_check.settle(config, data, sources_of(config), Share(1, 2))


def test_check_says_what_will_be_left_out(data):
    config = load(Path("job.toml"), SKIP)
    sources = sources_of(config)
    [said] = prompt_check.check_sample(config, sources)
    assert said.startswith(
        "prompts.train: 5 of 10 rows that were looked at cannot be used and are left out; the "
        "first: train.jsonl, line 2: is not JSON"
    )
    assert sources.train.first().index == 0
