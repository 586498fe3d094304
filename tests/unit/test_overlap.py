"""Prompts that are there twice: in the training data, or in a held-out set as well."""

import json
from pathlib import Path

from typer.testing import CliRunner

from relax_hpc.cli.main import app
from relax_hpc.data import overlap
from relax_hpc.data.media.source import MediaSource
from relax_hpc.data.records import PromptRecord

LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Prompts(list):
    def __init__(self, name, *prompts):
        super().__init__(PromptRecord(prompt, "1") for prompt in prompts)
        self.name = name

    def where(self, index):
        return f"{self.name}:{index}"


def words(first, count):
    return " ".join(LETTERS[n % 26] * 2 + str(n) for n in range(first, first + count))


def find(train, *heldout, most=None):
    train, heldout = Prompts("train", *train), Prompts("heldout", *heldout)
    return overlap.find(train, {"heldout": (heldout, len(heldout))}, most)


def test_a_prompt_that_was_there_before_is_counted_and_shown_with_the_first_of_its_kind():
    found = find(["a", "b", "a", "c", " a\n", "b", "A"])
    assert found.repeated.num_prompts == 3
    assert list(found.repeated.examples) == [
        ("train:2", "train:0"), ("train:4", "train:0"), ("train:5", "train:1")
    ]  # fmt: skip


def test_texts_and_messages_are_compared_by_what_is_asked():
    system = {"role": "system", "content": "Add."}
    user = {"role": "user", "content": "1+2="}
    found = find(["1+3=", [user]], [system, user], "1+2=", "1-2=")
    assert found.sets["heldout"].same.num_prompts == 2  # signs tell them apart, systems do not
    assert found.sets["heldout"].same.examples[0] == ("heldout:0", "train:1")


def test_thirteen_words_in_a_row_are_an_overlap_and_twelve_are_none():
    train = ["x", f"{words(0, 13)}!"]
    [thirteen, twelve] = (
        find(train, f"Now: {words(0, n).upper()} then").sets["heldout"] for n in (13, 12)
    )
    assert (thirteen.same.num_prompts, thirteen.alike) == (0, (1, [("heldout:0", "train:1")]))
    assert twelve.alike.num_prompts == 0
    other_order = " ".join(reversed(words(0, 13).split()))
    assert find(train, other_order).sets["heldout"].alike.num_prompts == 0


def test_words_do_not_run_from_one_prompt_into_the_next():
    found = find([words(0, 7), words(7, 7)], words(0, 14))
    assert found.sets["heldout"].alike.num_prompts == 0


def test_a_prompt_that_is_the_same_is_not_counted_again_as_alike():
    found = find([words(0, 20)], words(0, 20), words(1, 20)).sets["heldout"]
    assert (found.same.num_prompts, found.alike.num_prompts) == (1, 1)
    assert found.alike.examples == [("heldout:1", "train:0")]


def test_a_preamble_that_many_prompts_of_a_set_have_tells_nothing():
    preamble = words(0, 15)
    heldout = [f"{preamble} {words(100 * n, 14)}" for n in range(1, 31)]
    alone, whole = f"{preamble} {words(9000, 20)}", f"{preamble} {words(300, 14)}"
    assert find([alone], *heldout).sets["heldout"].alike.num_prompts == 0
    found = find([alone, whole], *heldout).sets["heldout"]
    assert (found.same.num_prompts, found.alike.num_prompts) == (1, 0)
    part = find([alone, words(300, 13)], *heldout).sets["heldout"]
    assert part.alike == (1, [("heldout:2", "train:1")])


def command(*arguments):
    answer = CliRunner().invoke(app, ["data", "job.toml", *arguments])
    assert answer.exit_code == 0, answer.output
    return answer.stdout


def test_the_command_compares_all_prompts_of_a_job(job):
    lines = [{"prompt": f"{n % 5}+1=", "answer": "1"} for n in range(7)]
    Path("train.jsonl").write_text(
        "".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8"
    )
    Path("heldout.jsonl").write_text(f"{json.dumps(lines[3])}\nno row\n", encoding="utf-8")
    skip = "--set=prompts.bad_rows=skip"
    assert command(skip).splitlines()[1:] == [
        "prompts.train: 7 prompts",
        "prompts.train: 2 of 7 prompts are there before, e.g. train.jsonl, line 6 as train.jsonl, "
        "line 1; train.jsonl, line 7 as train.jsonl, line 2",
        "eval.heldout: 1 of 2 prompts are trained on, e.g. heldout.jsonl, line 1 as train.jsonl, "
        "line 4",
    ]
    found = json.loads(command(skip, "--json"))
    assert found["sets"]["heldout"]["left_out"]["num_rows"] == 1
    assert found["repeated"]["num_prompts"] == 2


def test_rows_that_cannot_be_used_are_counted_of_every_chunk(job, monkeypatch):
    monkeypatch.setattr(overlap, "_CHUNK", 3)
    good = json.dumps({"prompt": "1+1=", "answer": "2"})
    Path("train.jsonl").write_text(
        "".join(f"{line}\n" for line in (good, "x", good, "y", "z")), encoding="utf-8"
    )
    _, said, *_ = command("--set=prompts.bad_rows=skip").splitlines()
    assert said.startswith(
        "prompts.train: 5 prompts, 3 of which cannot be used; the first: train.jsonl, line 2: "
    )


def test_one_question_about_two_images_is_two_prompts(tmp_path):
    data = MediaSource("x: image 1", "image", data=b"one")
    whole = MediaSource("x: image 1", "image", path=tmp_path / "a.png")
    train, heldout = Prompts("train"), Prompts("heldout")
    media = [(whole,), (whole._replace(offset=8, size=4),), (data,), (whole, data)]
    train += [PromptRecord("colour?", "1", media=each) for each in media]
    media = [(whole._replace(place="y: image 1"),), (data, whole), (data._replace(data=b"two"),)]
    heldout += [PromptRecord("colour?", "1", media=each) for each in media]
    found = overlap.find(train, {"heldout": (heldout, len(heldout))})
    assert found.repeated.num_prompts == 0
    assert found.sets["heldout"].same == (1, [("heldout:0", "train:0")])
