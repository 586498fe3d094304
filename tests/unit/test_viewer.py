"""Trajectories to look at: what is shown of them, of which, and how large a page gets."""

import html
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from bus_fixtures import PRODUCERS, group, produce
from bus_steps import plan
from typer.testing import CliRunner
from viewer_runs import SCRIPT, empty_run, put, said

from relax_hpc.bus.producer import Producer
from relax_hpc.bus.tools import inventory
from relax_hpc.cli.main import app
from relax_hpc.config.run import RunConfig
from relax_hpc.data.rows import TaskShare, facts_of
from relax_hpc.errors import BusError, DamagedError
from relax_hpc.roles.rollout.prompt_check import open_sources
from relax_hpc.roles.rollout.row_gate import RowGate
from relax_hpc.runs.answers import Answers
from relax_hpc.runs.api import Run
from relax_hpc.runs.viewer import GroupQuery, output
from relax_hpc.runs.viewer.run import RunViewer, choose
from relax_hpc.runs.viewer.words import COLOURS, Token, colour
from relax_hpc.schema import FinishReason, MediaKind, Medium, PromptGroup


@pytest.fixture
def run(tmp_path, tiny_model):
    return empty_run(tmp_path / "run", tiny_model)


class Page(HTMLParser):
    """Reads a page: elements, and for each article its text and the classes of its tokens."""

    def __init__(self, path):
        super().__init__()
        self.elements, self.articles, self.attributes, self.values = [], [], [], []
        self.source = path.read_text()
        self.feed(self.source)

    def handle_starttag(self, tag, attrs):
        self.elements.append(tag)
        self.attributes += [name for name, _ in attrs]
        self.values += attrs
        if tag == "article":
            self.articles.append({"text": "", "classes": []})
        if tag == "b":
            self.articles[-1]["classes"].append(dict(attrs)["class"])
        if tag == "dd":
            self.articles[-1]["text"] += " "

    def handle_data(self, data):
        if self.articles and self.elements[-1] != "script":
            self.articles[-1]["text"] += data

    @property
    def texts(self):
        return [" ".join(article["text"].split()) for article in self.articles]


def page_of(run, *options):
    answer = CliRunner().invoke(app, ["view", str(run.root), *options])
    assert answer.exit_code == 0, answer.output
    return Page(run.view)


def printed(run, *options, columns="200"):
    answer = CliRunner(env={"COLUMNS": columns}).invoke(app, [*options, str(run.root)])
    assert answer.exit_code == 0, answer.output
    return answer.output


def test_a_script_in_a_response_is_text_and_nothing_is_loaded(run):
    put(run, [said(SCRIPT, prompt=f'"><b onload=x>{SCRIPT}'), said(f"{SCRIPT}'\"&amp;", 0, 1)])
    found = page_of(run)
    assert found.elements.count("script") == 1, "ours"
    assert SCRIPT in found.texts[0] and f"{SCRIPT}'\"&amp;" in found.texts[1]
    assert "<script>alert" not in found.source and "&lt;script&gt;alert" in found.source
    assert not {"src", "onload", "style"} & set(found.attributes)
    assert {said for name, said in found.values if name == "href"} == {"#group-0"}
    assert "default-src 'none'" in found.source and "://" not in found.source
    assert "unsafe-inline" not in found.source


def test_a_token_that_is_a_whole_script_is_text():
    found = output.tokens([Token(f"</b>{SCRIPT}", True, -1.0, 3)])
    assert "<script" not in found and found.count("</b>") == 1
    assert found.startswith('<b class="l4 m1 v3" title="-1 v3">&lt;/b&gt;&lt;script&gt;')


def test_the_terminal_prints_the_same_and_no_text_of_the_model_acts_on_it(run):
    put(run, [said(f"{SCRIPT}[red]a\x1b[2Jb"), said("4", 0, 1)])
    for out in (printed(run, "view", "--text"), printed(run, "peek")):
        assert f"{SCRIPT}[red]a␛[2Jb" in out and "\x1b" not in out
        assert "prompt group 0, not planned yet, mean reward 0.5" in out
        assert re.search(r"1\+1=\n.*sibling 0: reward 0, advantage -0.5, stop, versions 3,", out)
        assert "sibling 1: reward 1, advantage +0.5, stop, versions 3, 4 + 1 tokens" in out
    assert not run.view.exists()


def write_rows(path, numbers):
    rows = [
        {"prompt": f"{n}+{n}=", "answer": 2 * n, "source": f"sums-{n % 2}", "level": [n, None]}
        for n in numbers
    ]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def start(run):
    """Does what the first task of a start does with the data, and returns them."""
    config = RunConfig.model_validate_json(run.config.read_text())
    sources = open_sources(config)
    RowGate(config, run, sources, TaskShare(0, 1)).settle()
    return sources


@pytest.fixture
def answered(tmp_path, tiny_model):
    """A run of 700 rows, whose number n asks for n + n, in the order of its own seed."""
    data = tmp_path / "sums.jsonl"
    write_rows(data, range(700))
    run = empty_run(
        tmp_path / "run", tiny_model, prompts={"train": [str(data)], "chat_template": False}
    )
    sources = start(run)
    for guid in range(4):
        index = sources.train[guid].index
        about = {"prompt": f"{index}+{index}=", "prompt_index": index}
        turns = np.array([[0, 0], [len(about["prompt"]), 1], [9, 2], [10, 1]], np.int32)
        parts = {"sum": float(guid), "form": 0.0}
        put(run, [said("<b>x", guid, s, parts=parts, turns=turns, **about) for s in range(2)])
    assert [sources.train[guid].index for guid in range(4)] != [0, 1, 2, 3]
    return run, data


def check_answers(text):
    """The right row of each group stands beside what was asked, whatever its place in the file."""
    asked = [int(number) for number in re.findall(r"(\d+)\+\1=", text)]
    assert len(set(asked)) == 4
    for n in asked:
        known = f'answer: {2 * n}\nsource: sums-{n % 2}\nmetadata: {{"level":[{n},null]}}\n'
        assert f"{known}{n}+{n}=" in text


def test_the_answer_of_its_row_stands_beside_each_response_after_a_shuffle(answered):
    run, _ = answered
    for command in (("peek", "--groups", "4"), ("view", "--text")):
        out = printed(run, *command)
        check_answers(out)
        assert "reward 1 (form 0, sum 3), adv" in out and "tokens, 2 turns and 1 of a tool" in out
    found = page_of(run)
    shown = re.sub(r"\n+", "\n", html.unescape(re.sub(r"</?\w[^>]*>", "", found.source)))
    check_answers(re.sub(r"\n(answer|source|metadata)\n", r"\n\1: ", shown))


def test_a_page_links_to_each_group_and_has_a_search_and_the_parts_to_sort_by(answered):
    values = page_of(answered[0]).values
    links = [said.removeprefix("#") for name, said in values if name == "href"]
    assert links == [f"group-{guid}" for guid in (3, 2, 1, 0)]
    assert set(links) <= {said for name, said in values if name == "id"}
    assert ("type", "search") in values
    parts = [json.loads(said) for name, said in values if name == "data-parts"]
    assert parts == [{"sum": guid, "form": 0} for guid in (3, 2, 1, 0)]


def test_rows_that_are_exported_have_their_answers(answered):
    run, data = answered
    printed(run, "bus", "export", "--to", str(data.with_name("o.jsonl")), "--text")
    rows = [json.loads(line) for line in data.with_name("o.jsonl").read_text().splitlines()]
    for row in rows:
        n = row["prompt_index"]
        assert (row["prompt"], row["answer"], row["source"]) == (
            f"{n}+{n}=", str(2 * n), f"sums-{n % 2}",
        )  # fmt: skip
        assert json.loads(row["metadata"]) == {"level": [n, None]}
    assert len(rows) == 8
    for sample in Run(run.root).samples(n=3):
        n = int(sample["prompt"].partition("+")[0])
        assert (sample["answer"], sample["metadata"]) == (str(2 * n), {"level": [n, None]})


@pytest.mark.parametrize("what", ["has changed", "is gone"])
def test_data_that_are_not_what_the_run_began_with_are_said_once_and_give_no_answer(answered, what):
    run, data = answered
    write_rows(data, range(1, 701))
    start(run)  # it goes on with them, and knows no better what its first rows were
    if what == "is gone":
        data.unlink()
    remark = f"the answers are not shown: {data} {what} since the run began"
    for command in (
        ("peek",), ("view", "--text"), ("bus", "export", "--to", str(data.with_name("o.parquet")))
    ):  # fmt: skip
        out = printed(run, *command, columns="900")
        assert out.count(remark) == 1 and "answer:" not in out
    found = page_of(run)
    assert found.source.count(remark) == 1 and "<span>answer" not in found.source


def test_sets_of_an_evaluation_without_training_are_told_apart_and_no_program_is_run(
    tmp_path, tiny_model
):
    sets, program = {}, tmp_path / "rows.py"
    for name, numbers in (("a", range(3)), ("b", range(5, 9))):
        write_rows(tmp_path / name, numbers)
        sets[name] = {"path": [str(tmp_path / name)], "columns": {"source": "none"}}
    run = empty_run(tmp_path / "run", tiny_model, eval=sets)
    run.data_files.parent.mkdir(parents=True)

    def begin(**more):
        known = {
            f"eval.{name}.path": {"num_rows": count, "files": facts_of([tmp_path / name])}
            for name, count in (("a", 3), ("b", 4))
        }
        run.data_files.write_text(json.dumps(known | more))
        return Answers(run)

    found = [begin().of(guid, index) for guid, index in ((2, 2), (3, 0), (6, 3))]
    assert [(row.answer, row.source) for row in found] == [("4", "a"), ("10", "b"), ("16", "b")]
    assert begin().of(7, 4) is None, "there is no such row"
    program.write_text("raise SystemExit")
    job = run.config.read_text().replace('"train":["t"]', f'"train":["{program}:Rows"]')
    run.config.write_text(job)
    refused = begin(**{"prompts.train": {"num_rows": 1, "files": {}}})
    assert refused.missing.endswith(
        f"{program}:Rows is a program, which is not run to look at its rows"
    )
    assert refused.of(0, 0) is None


def test_peek_says_how_few_responses_mark_an_answer_where_most_do_not(run):
    job = RunConfig.model_validate_json(run.config.read_text())
    of_gsm8k = job.model_copy(update={"reward": job.reward.model_copy(update={"name": "gsm8k"})})
    run.config.write_text(of_gsm8k.model_dump_json())
    put(run, [said("It is 2."), said("two", 0, 1), said("#### 3", 0, 2), said("3", 0, 3)])
    assert "1 of 4 responses mark an answer as the reward gsm8k reads it: say" in printed(
        run, "peek"
    )
    put(run, [said("#### 2", 2), said("\\boxed{4}", 2, 1)])
    assert "mark an answer" not in printed(run, "peek", "--groups", "1")


def test_siblings_stand_in_order_each_with_its_facts(run):
    rows = [
        said("no", reward=0.0, finish=FinishReason.LENGTH),
        said("two", 0, 1, reward=2.5, version=1),
        said("II", 0, 1, segment=1, reward=2.5, prompt="1+1= roman: "),
        said("2", 0, 2, reward=0.5),
    ]
    rows[1] = rows[1]._replace(version_runs=np.array([[4, 1], [5, 4]], np.int32))
    put(run, rows)
    texts = page_of(run).texts
    begun = [  # of three episodes, 0, 2.5 and 0.5: the mean is 1
        "sibling 0 reward 0 advantage -1 finish length versions 3 prompt 4 tokens",
        "sibling 1 reward 2.5 advantage +1.5 finish stop versions 1 to 4 prompt 4 tokens",
        "sibling 1, segment 1 reward 2.5 advantage +1.5",
        "sibling 2 reward 0.5 advantage -0.5",
    ]
    assert all(map(str.startswith, texts, begun))
    ends = [text.split("tokens 1 turn ")[-1] for text in texts]
    assert ends == ["no", "two", "1+1= roman: II", "1+1= 2"]


def mask_failed(run):
    run.config.write_text(run.config.read_text().replace('"on_error":"zero"', '"on_error":"mask"'))


def test_parts_of_a_reward_are_named_and_so_is_one_that_failed(run):
    right = said("4", reward=0.9, parts={"<b>": -0.1, "math": 1.0})
    put(run, [right, said("d", 0, 1, reward=0.0, reward_error=True), said("5", 0, 2, reward=0.1)])
    # of three episodes the mean is 1/3, of those that have a reward 1/2
    begun = "sibling 0 reward 0.9 <b> -0.1 math 1 advantage"
    assert page_of(run).texts[0].startswith(f"{begun} +0.5667 finish")
    mask_failed(run)
    found = page_of(run)
    assert found.texts[0].startswith(f"{begun} +0.4 finish") and "<b> 1" not in found.source
    assert found.texts[1].startswith("sibling 1 reward 0 the reward failed advantage")


def test_a_reward_that_failed_and_is_masked_is_in_no_mean_and_its_group_comes_last(run):
    failed = said("a", reward=0.0, reward_error=True)
    put(run, [failed, said("4", 0, 1, reward=0.6)])
    put(run, [failed._replace(guid=1)])
    put(run, [said("4", 2, reward=0.5), said("b", 2, 1, reward=0.1)])
    mask_failed(run)
    for order, expected in (("best", [0, 2, 1]), ("worst", [2, 0, 1])):
        out = printed(run, "view", "--text", "--sort", order)
        heads = re.findall(r"prompt group (\d), not planned yet, (.*)", out)
        means = {"0": "mean reward 0.6", "1": "all rewards failed", "2": "mean reward 0.3"}
        assert heads == [(str(guid), means[str(guid)]) for guid in expected]


def test_the_colours_of_three_tokens_by_hand(run):
    row = said("abc")
    row = row._replace(
        loss_mask=np.array([0, 0, 0, 0, 1, 0, 1], np.uint8),
        version_runs=np.array([[4, 7], [6, 8]], np.int32),
        columns={"rollout_logprobs": np.array([0, 0, 0, 0, -0.6, 0, -9], np.float32)},
    )
    put(run, [row, said("d", 0, 1)])
    # -0.6 lies beyond -0.05, -0.25 and -0.5; version 7 is the second of six colours
    assert page_of(run).articles[0]["classes"] == ["l3 a1 m1 v1", "m0", "l7 a1 m1 v2"]
    assert 'title="-0.6 v7 A-0.5"' in page_of(run).source
    a, b, c = next(RunViewer(run.root).view(GroupQuery(), 9).groups).rows[0].head
    # rewards are 0 and 1, so the advantage of its tokens is -0.5
    assert [colour(a, by) for by in COLOURS] == [3, 1, 1, 1]
    assert [colour(b, by) for by in COLOURS] == [None, None, 0, None]
    assert [colour(c, by) for by in COLOURS] == [7, 1, 1, 2]
    assert colour(Token("x", True, -0.05, 0), "logprob") == 1, "a bound belongs to what is below"
    assert '<body data-by="version">' in page_of(run, "--by", "version").source


def rewarded(run, rewards):
    """A prompt group for each mean reward, in turn by both producers, a shard each."""
    for r, name in enumerate(PRODUCERS):
        with Producer(run.bus, name, {}) as producer:
            for guid in range(r, len(rewards), 2):
                made = [row._replace(reward=rewards[guid]) for row in group(guid).trajectories]
                producer.put([PromptGroup(guid, made)])


def guids(run, **asked):
    return [each.guid for each in choose(run.bus, GroupQuery(**asked)).chosen]


def test_groups_are_sorted_as_asked(run):
    rewarded(run, [0.5, 0.25, 1.0, 0.0, 1.0, 0.75, 0.5, 0.25])
    assert guids(run, sort="best", groups=3) == [2, 4, 5]
    assert guids(run, sort="worst", groups=3) == [3, 1, 7]
    assert guids(run, sort="newest", groups=3) == [7, 6, 5]
    drawn = guids(run, sort="random", groups=5)
    assert len(set(drawn)) == 5 and drawn == guids(run, sort="random", groups=5)
    assert guids(run, guid=6) == [6]
    plan(run.bus, 1)
    assert guids(run, step=1) == [3, 2, 1, 0]
    assert guids(run, step=1, sort="best", groups=1) == [2]
    with pytest.raises(BusError, match="has no step 2; steps 1 to 1 are planned"):
        guids(run, step=2)


def asked_again(run, *rewards):
    """Prompt groups, each of two siblings, by (prompt, rewards), a shard each."""
    for guid, (prompt, each) in enumerate(rewards):
        rows = [said("x", guid, s, prompt_index=prompt, reward=r) for s, r in enumerate(each)]
        put(run, rows)


def test_prompts_that_went_from_wrong_to_right_or_back_come_in_pairs_the_last_first(run):
    asked_again(
        run,
        *[(0, (0, 1)), (1, (1, 1)), (2, (0, 0)), (3, (1, 1)), (4, (0, 0))],  # half is not most
        *[(0, (1, 1)), (1, (1, 1)), (2, (0, 1)), (3, (0, 0)), (4, (1, 1)), (4, (0, 0))],
    )
    assert guids(run, sort="flipped") == [10, 9, 4, 8, 3, 5, 0]
    assert guids(run, sort="flipped", groups=4) == [10, 9, 4], "a pair is not torn"
    notes = choose(run.bus, GroupQuery(sort="flipped")).notes
    assert notes.keys() == {10, 9, 8, 5}
    assert notes[8] == "right to wrong: 0 of 2 here, 2 of 2 in prompt group 3"
    assert notes[5] == "wrong to right: 2 of 2 here, 1 of 2 in prompt group 0"
    assert "right to wrong: 0 of 2 here" in page_of(run, "--sort", "flipped").source


def test_what_is_right_is_said_by_the_job_and_without_a_flip_it_is_said_what_is_there(run):
    asked_again(run, (0, (0, 0)), (0, (0.5, 0.5)))
    remark = "no prompt went from wrong to right or back: 2 prompt groups of 1 prompts are on disk"
    assert choose(run.bus, GroupQuery(sort="flipped")).remarks[0].startswith(remark)
    run.config.write_text(run.config.read_text().replace('"solved_at":1.0', '"solved_at":0.5'))
    assert "wrong to right: 2 of 2 here" in printed(run, "view", "--text", "--sort", "flipped")


def test_who_follows_sees_each_group_once_as_it_comes(run, monkeypatch):
    put(run, [said("first", 0), said("d", 0, 1)], [said("second", 1), said("d", 1, 1)])
    rounds = []

    def asleep(_):
        rounds.append(1)
        if len(rounds) == 2:
            put(run, [said("third", 2), said("d", 2, 1)], producer=PRODUCERS[1])

    monkeypatch.setattr("time.sleep", asleep)
    views = RunViewer(run.root).follow(2, 9, until=lambda: len(rounds) == 3)
    assert [[group.guid for group in view.groups] for view in views] == [[0, 1], [], [2], []]


def test_a_group_that_was_committed_twice_is_shown_once_as_it_was_planned(run):
    def commit(producer, reward):
        rows = [row._replace(reward=reward) for row in group(0).trajectories]
        put(run, rows, *[group(guid).trajectories for guid in (1, 2, 3)], producer=producer)

    commit(PRODUCERS[1], 0.75)
    plan(run.bus, 1)
    commit(PRODUCERS[0], 0.25)  # whose log is read first
    found = inventory.survey(run.bus).groups
    assert [each.guid for each in found] == [0, 1, 2, 3] and found[0].rewards == (0.75, 0.75)


def test_deleted_shards_are_said(run):
    rewarded(run, [0.0] * 6)
    plan(run.bus, 1)
    for name in PRODUCERS:
        run.bus.shard(name, 1, 0).unlink()
    [remark] = choose(run.bus, GroupQuery()).remarks
    assert remark.startswith("trained on and cleared away: 4 trajectories of 2 shards, which")
    assert guids(run) == [5, 4, 3, 2] and guids(run, step=1) == [3, 2]
    assert remark in page_of(run).source
    assert printed(run, "peek").splitlines()[-1] == remark, "last: it is no loss"  # U13
    show = CliRunner().invoke(app, ["bus", "show", str(run.root), "--guid", "1"])
    assert "is deleted, since a checkpoint covers it; relax-hpc bus ls" in str(show.exception)


def test_a_shard_that_goes_while_it_is_looked_at_is_deleted_and_one_that_is_damaged_is_not(run):
    rewarded(run, [0.0] * 4)
    found = RunViewer(run.root).view(GroupQuery(groups=4), 9)
    path = run.bus.shard(PRODUCERS[0], 1, 1)
    data = path.read_bytes()
    path.unlink()  # guid 2
    assert [each.guid for each in found.groups] == [3, 1, 0]
    path.write_bytes(data[:1000])
    with pytest.raises(DamagedError, match="is torn"):
        choose(run.bus, GroupQuery())


def test_a_file_that_is_there_is_not_written_over(run):
    mine = run.root / "mine.html"
    mine.write_text("of the user")
    answer = CliRunner().invoke(app, ["view", str(run.root), "--out", str(mine)])
    assert f"--out {mine}: is there; name another file" in str(answer.exception)
    assert mine.read_text() == "of the user" and not list(run.root.glob(".*.tmp"))


def test_a_page_ends_before_it_is_too_large_and_says_so(run, monkeypatch):
    produce(run.bus, PRODUCERS[0], range(60), per_shard=20, response=50)
    whole = page_of(run, "--groups", "60")
    assert whole.elements.count("section") == 60 and "The page ends" not in whole.source
    size = run.view.stat().st_size
    monkeypatch.setattr(output, "MAX_BYTES", size // 2)
    found = page_of(run, "--groups", "60")
    count = found.elements.count("section")
    assert 5 < count < 30 and run.view.stat().st_size <= size // 2
    assert f"The page ends after {count} prompt groups" in found.source
    assert found.source.rstrip().endswith("</html>")


def test_tokens_that_stand_for_media_are_a_few_words(run):
    """A prompt of two images, then a video and its sound; an image that a tool shows."""
    data = np.arange(9, dtype=np.uint8)
    media = (
        Medium(MediaKind.PNG, data, (1, 4, 4)),
        Medium(MediaKind.JPEG, data, (1, 2, 2)),
        Medium(MediaKind.MP4, data, (2, 2, 2), frames=(0, 3), seconds_per_grid=0.5),
        Medium(MediaKind.MP4, data),
    )
    prompt = f"a{'~' * 300}b{'~' * 7}, {'~' * 50} how many?"
    spans = [(0, 1, 300), (1, 302, 7), (2, 311, 20), (3, 331, 10), (2, 341, 20)]
    row = said(f"1+{'~' * 40}2~", prompt=prompt)
    first = row.prompt_len + 2
    mask = row.loss_mask.copy()
    mask[first : first + 40] = 0
    row = row._replace(
        media=media, media_spans=np.array([*spans, (0, first, 40)], np.int32), loss_mask=mask
    )
    put(run, [row, said("d", 0, 1, prompt=prompt)])
    shown = (
        "a[image 1: 300 tokens]b[image 2: 7 tokens], "
        "[video 1: 40 tokens; audio 1: 10 tokens] how many?"
    )
    out = printed(run, "peek", columns="80")
    assert f"\n{shown}\n" in out, "all of it, though --tokens 200 is less than it has"
    assert "\n1+[image 1: 40 tokens]2~\n" in out and f"{len(prompt)} + 44 tokens" in out
    assert f">\n{shown}</pre>" in page_of(run).source
    # a, image, b, image, comma, space, video are 7, and " how many?" is 10
    short = page_of(run, "--tokens", "4").source
    assert "a[image 1: 300 tokens] [... 68 tokens ...] y?</pre>" in short
