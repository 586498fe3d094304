"""Rows that cannot be used, refused or left out by all alike; sets with names of their own."""

import json
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from relax_hpc.bus import layout
from relax_hpc.config.job_file import load
from relax_hpc.data import tokenizer
from relax_hpc.data.rows import TaskShare
from relax_hpc.data.source import Examined, PromptSource
from relax_hpc.errors import ConfigError, PeerTimeoutError
from relax_hpc.roles.rollout import check, prompt_check, row_gate
from relax_hpc.roles.rollout.row_gate import RowGate
from relax_hpc.roles.sft import document_check
from relax_hpc.runtime.files import records
from relax_hpc.runtime.paths import RunPaths

GOOD = {"prompt": "1+1=", "answer": "2"}
BAD = {
    1: ("not JSON", "is not JSON"),
    3: ('{"prompt": " ", "answer": "2"}', "the prompt is empty"),
    4: ('{"question": "x", "answer": "2"}', "has no prompt; it has question, answer"),
    6: (f'{{"prompt": "{40 * "1"}", "answer": "2"}}', "the prompt has 46 tokens"),
    9: ('{"prompt": "x", "answer": "two"}', "answer = 'two': can never be matched"),
}
"""Row -> a line that is no prompt, of ten, and why."""
SKIP = ["prompts.bad_rows=skip", "prompts.max_prompt_tokens=30"]


@pytest.fixture
def data(job):
    lines = [BAD.get(row, [json.dumps(GOOD | {"level": row})])[0] for row in range(10)]
    Path("train.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return RunPaths(job / "run")


def sources_of(config):
    tokens = tokenizer.load(Path("model"))
    return prompt_check.sources_of(config, prompt_check.read(config), tokens)


def settle(config, paths, number=0, size=1):
    """The prompts of one of several tasks, which has looked at its rows."""
    sources = sources_of(config)
    RowGate(config, paths, sources, TaskShare(number, size)).settle()
    return sources


def settled(config, paths, size):
    """The prompts of each of several tasks that look at their rows at the same time."""
    with ThreadPoolExecutor(size) as pool:
        made = pool.map(lambda number: settle(config, paths, number, size), range(size))
        return [each.train for each in made]


def test_all_tasks_leave_out_the_same_rows_and_list_them_with_reasons(data, caplog, monkeypatch):
    config = load(Path("job.toml"), SKIP)
    monkeypatch.setattr(logging.getLogger("relax_hpc"), "propagate", True)
    sources = settled(config, data, 3)
    first, second, third = ([each[n].index for n in range(2 * len(each))] for each in sources)
    assert first == second == third
    assert sorted(first[:5]) == sorted(first[5:]) == [0, 2, 5, 7, 8]
    assert [sources[0][n].metadata["level"] for n in range(5)] == first[:5]
    listed = [json.loads(line) for line in data.left_out.read_text().splitlines()]
    for each, (row, (_, said)) in zip(listed, BAD.items(), strict=True):
        assert (each["set"], each["row"]) == ("prompts.train", row)
        assert each["reason"].startswith(f"train.jsonl, line {row + 1}: {said}")
    assert "prompts.train: 5 of 10 rows are left out" in caplog.text


def test_a_run_does_not_go_on_with_another_number_of_rows(data):
    config = load(Path("job.toml"), SKIP)
    settled(config, data, 1)
    with Path("train.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(GOOD) + "\n")
    with pytest.raises(ConfigError, match=r"prompts.train: has 11 rows, the run was begun with 10"):
        settle(config, data)


@pytest.mark.parametrize("header", [{}, {"order": 3}])
def test_a_run_that_was_begun_in_another_order_is_refused(tmp_path, header):
    paths = RunPaths(tmp_path).bus
    layout.create(paths, ["rollout-0"], header)
    with pytest.raises(
        ConfigError, match=f"begun in order {header.get('order', 1)} of the prompts"
    ):
        row_gate.check_order(paths)


@pytest.mark.parametrize("change", ["data", "template", "eval.heldout.columns.tools='none'"])
def test_what_was_found_is_not_used_for_other_data_templates_or_settings(data, monkeypatch, change):
    Path("train.jsonl").write_text(f"{json.dumps(GOOD)}\n" * 10, encoding="utf-8")
    config = load(Path("job.toml"))
    settled(config, data, 1)
    looked = []

    def examine(source, rows, **_):
        looked.append(list(rows))
        raise KeyboardInterrupt

    monkeypatch.setattr(PromptSource, "examine", examine)
    settle(config, data)
    assert looked == []
    if change == "data":
        text = Path("train.jsonl").read_text(encoding="utf-8")
        Path("train.jsonl").write_text(text.replace("1+1=", "11+1="), encoding="utf-8")
    elif change == "template":
        with Path("model/chat_template.jinja").open("a", encoding="utf-8") as file:
            file.write(" ")
    else:
        config = load(Path("job.toml"), [change])
    with pytest.raises(KeyboardInterrupt):
        settle(config, data)


def indices(source):
    return [source._row(n) for n in range(2 * len(source))]


def change_line(row, line):
    lines = Path("train.jsonl").read_text(encoding="utf-8").splitlines()
    lines[row] = line
    Path("train.jsonl").write_text("".join(f"{each}\n" for each in lines), encoding="utf-8")


CHANGES = {
    "touched": lambda: os.utime("train.jsonl", (1, 1)),
    "mended": lambda: change_line(1, json.dumps(GOOD)),
    "broken": lambda: change_line(0, "not JSON"),
}
"""What becomes of the data, which keep their number of rows."""


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("size", [1, 3])
def test_every_later_start_goes_by_what_was_decided_whatever_becomes_of_the_data(
    data, monkeypatch, size, change
):
    config = load(Path("job.toml"), [*SKIP, "launch.advanced.peer_timeout_s=5"])
    before, listed = indices(settled(config, data, 2)[0]), data.left_out.read_text()
    assert sorted(before) == sorted([0, 2, 5, 7, 8] * 2)
    CHANGES[change]()
    monkeypatch.delattr(PromptSource, "examine")
    for number in range(2):
        data.prompt_rows(number).unlink()  # what was decided stands for itself
    sources = settle(config, data, size - 1, size)  # alone: waits for nobody
    assert indices(sources.train) == before
    assert all(indices(source) == before for source in settled(config, data, size))
    assert data.left_out.read_text() == listed
    if change == "broken":
        with pytest.raises(ConfigError, match=r"train.jsonl, line 1: is not JSON"):
            sources.train[before.index(0)]


def test_of_two_tasks_that_decide_at_once_both_go_by_what_the_first_decided(data, monkeypatch):
    def list_them(paths, rows):  # another was faster, and found rows 5 and 7 bad
        record = row_gate.RowDecision({"prompts.train": 10}, {}, {"prompts.train": [5, 7]})
        records.write_json(paths.decided_rows, {"format": 1, **record._asdict()})

    monkeypatch.setattr(row_gate, "list_left_out", list_them)
    monkeypatch.setattr(row_gate, "check_lengths", lambda *_: None)
    [source] = settled(load(Path("job.toml"), SKIP), data, 1)
    assert sorted(indices(source)[:8]) == [0, 1, 2, 3, 4, 6, 8, 9]


def test_lengths_are_looked_at_before_it_is_decided_and_at_every_start_thereafter(data):
    config = load(Path("job.toml"), SKIP)
    short = load(Path("job.toml"), [*SKIP, "actor.tokens_per_micro_batch=20"])
    said = r"micro_batch = 20: the longest prompt has \d+ tokens"
    with pytest.raises(ConfigError, match=said):
        settle(short, data)
    assert not data.decided_rows.exists()
    settled(config, data, 1)
    assert data.decided_rows.exists()
    with pytest.raises(ConfigError, match=said):
        settle(short, data)


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
        sources = settle(config, data, number, 3)
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
    good = Path("train.jsonl").read_text(encoding="utf-8")
    Path("train.jsonl").write_text("no\n" * 10, encoding="utf-8")
    config = load(Path("job.toml"), [*SKIP, "launch.advanced.peer_timeout_s=1"])
    for number in (1, 0):  # task 1 waits for task 0, which decides nothing
        with pytest.raises((ConfigError, PeerTimeoutError)):
            settle(config, data, number, 2)
    assert data.prompt_rows(0).exists() and data.prompt_rows(1).exists()
    assert not data.decided_rows.exists()
    Path("train.jsonl").write_text(good, encoding="utf-8")
    assert [sorted(indices(each)) for each in settled(config, data, 2)] == [
        sorted([0, 2, 5, 7, 8] * 2)
    ] * 2


def test_a_task_that_does_not_look_at_its_rows_or_decide_is_named(data):
    config = load(Path("job.toml"), [*SKIP, "launch.advanced.peer_timeout_s=1"])
    with pytest.raises(PeerTimeoutError, match=r"rollout-0, rollout-2 did not look at its prompts"):
        settle(config, data, 1, 3)
    with pytest.raises(PeerTimeoutError, match="rollout-1 did not look at its prompts"):
        settle(config, data, 0, 2)
    with pytest.raises(PeerTimeoutError, match=r"rollout-0 did not decide in launch.advanced.peer"):
        settle(config, data, 1, 2)


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
    Path(f"{name}.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
    )


TEXTS = ["漢" * 29 if number == 1234 else "1" * 30 for number in range(3000)]
"""The one on line 1,235 does not fit, but is not long in letters."""
SFT = """
name = "run"
model.path = "model"
sft = {train = "train.jsonl", heldout = "heldout.jsonl", max_tokens = 60, SIZE, epochs = 2}
"""


@pytest.fixture
def two_layouts(job):
    Path("job.toml").write_text(JOB, encoding="utf-8")
    for name, rows in ROWS.items():
        write(name, rows)
    return Path("job.toml")


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


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("eval.math.columns.answer='soltion'",
         "eval.math.path: HERE/math.jsonl, line 1: has no soltion; it has problem, solution, le"),
        ("eval.math.columns.source='levl'",
         "eval.math.columns.source = 'levl': none of the 4 rows that were looked at has it; the"),
        ("prompts.sources.sums.columns.answer='truth.vlue'",
         "subject; set prompts.sources.sums.columns.answer to the field that is the answer; di"),
        ("prompts.columns.tools='can'", "prompts.columns.tools = 'can': none of the 8 rows"),
        ("prompts.columns.prompt=3", "job.toml: prompts.columns.prompt = 3: use text, in quotes"),
    ],
)  # fmt: skip
def test_a_mistake_is_said_with_its_set_before_anything_is_queued(
    two_layouts, refused, setting, said
):
    found = refused("submit", "job.toml", "--local", "--set", setting)
    assert said.replace("HERE", str(Path.cwd())) in found and "\n" not in found


def test_tasks_look_at_different_prompts_and_together_at_all(job):
    write("train", [{"prompt": text, "answer": "2"} for text in TEXTS])
    many = load(Path("job.toml"), ["prompts.max_prompt_tokens=60"])
    sources = sources_of(many)
    [said] = prompt_check.check_sample(many, sources)
    assert "all are checked when the job starts" in said
    found = []
    for rank in range(4):
        try:
            RowGate(many, RunPaths(Path("run")), sources, TaskShare(rank, 4)).settle()
        except ConfigError as error:
            found.append((rank, str(error)))
    [(rank, said)] = found
    assert rank == 1234 // (3000 // 4)
    assert said.startswith("prompts.train: train.jsonl, line 1235: the prompt has ")


def test_check_says_where_the_answer_seems_to_be_in_the_prompt(job):
    asked = [{"role": "user", "content": "1+1="}]
    given = [*asked, {"role": "assistant", "content": "2"}]
    write("train", [{"prompt": each, "answer": "2"} for each in (asked, given, "1+1=")])
    config = load(Path("job.toml"))
    [said] = prompt_check.check_sample(config, sources_of(config))
    assert said.startswith("prompts.train: 1 of 3 prompts that were looked at end with what the as")
    write("train", [{"prompt": asked, "answer": "2"}])
    assert prompt_check.check_sample(config, sources_of(config)) == []


def test_check_says_where_there_are_fewer_rows_than_are_asked_for_at_once(job):
    write("train", [GOOD] * 5)
    write("heldout", [GOOD] * 3)

    def said(*settings):
        config = load(Path("job.toml"), [*settings])
        return [*check.few_rows(config, sources_of(config))]

    assert said("schedule.prompts_per_step=5", "eval.heldout.num_prompts=3") == []
    train, heldout = said("schedule.prompts_per_step=6", "eval.heldout.num_prompts=4")
    assert "= 6: rows in prompts.train: 5, so every step has prompts more than once" in train
    assert "= 4: rows in eval.heldout.path: 3, and all of them are used" in heldout


def test_of_many_documents_a_sample_is_checked_and_the_steps_are_counted_all_the_same(job):
    write("train", [{"prompt": text, "completion": "2"} for text in TEXTS])
    write("heldout", [{"prompt": text, "completion": "2"} for text in TEXTS[:3]])
    for name, size in (("by_count", "batch_size = 7"), ("by_tokens", "tokens_per_step = 6000")):
        Path(f"{name}.toml").write_text(SFT.replace("SIZE", size), encoding="utf-8")
    documents = load(Path("by_count.toml"))
    files = document_check.open_files(documents)
    sizes, tokens = document_check.read(documents, files), tokenizer.load(Path("model"))
    steps, left_out = document_check.check_sample(documents, files, sizes, tokens)
    assert steps == 858  # 2 x 3,000 documents by 7, and the rest
    assert left_out.startswith("checked 1,003 of 3,003 documents; all are checked when the job")
    with pytest.raises(
        ConfigError, match=r"train.jsonl, line 1235: has \d+ tokens"
    ):  # all are read
        document_check.check_sample(load(Path("by_tokens.toml")), files, sizes, tokens)
