"""Responses that the end of the job breaks off: what is kept of them, and how they go on."""

import asyncio
import json
import shutil

import episode_fakes
import pytest
from role_fakes import Events, config

from relax_hpc.bus import layout
from relax_hpc.bus.credits import Credit
from relax_hpc.bus.durable import Space
from relax_hpc.bus.log import RecordKind, read_log
from relax_hpc.bus.shards.encode import from_columns
from relax_hpc.bus.shards.shard import Shard
from relax_hpc.data.source import Prompt
from relax_hpc.environments.session import Outcome
from relax_hpc.errors import ConfigError
from relax_hpc.roles.ending import Ending
from relax_hpc.roles.rollout import loop
from relax_hpc.roles.rollout.episodes import Grouper
from relax_hpc.roles.rollout.folders import MODEL, Folders, digests_of
from relax_hpc.roles.rollout.skips import TaskSkips
from relax_hpc.roles.rollout.unfinished import AnnouncedEnd, Unfinished
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.schema import FinishReason

WHOLE = [11, 12, 13, 14, 15, 16]
"""Tokens that an engine samples in the end, whoever interrupts it."""


class Engine:
    """Samples `WHOLE`, a token at a time, and stops for ever where it is told to."""

    def __init__(self, version=0, stops_at=None):
        self.now, self.stops_at, self.asked = version, stops_at, []

    async def version(self):
        return self.now

    async def sample(self, given, draft, how, *, seed, homes):
        self.asked.append((list(given), list(draft.token_ids), seed))
        while len(draft.token_ids) < len(WHOLE):
            if self.stops_at is not None and len(draft.token_ids) >= self.stops_at + seed % 2:
                await asyncio.sleep(3600)
            draft.mark(len(draft.token_ids), self.now)
            draft.take([WHOLE[len(draft.token_ids)]], [-0.5 - self.now])
            await asyncio.sleep(0)
        return episode_fakes.answer(draft, [], [], [])


class Credits:
    def __init__(self, producer, groups):
        self.producer, self.groups = producer, groups

    def latest(self):
        return Credit(finished=len(self.producer.committed) >= self.groups)


class Turns:
    async def rollout(self, prompt, session):
        await session.chat()
        await session.chat([*session.messages, {"role": "user", "content": "more"}])
        return Outcome({"done": 1.0})


class Conversation(episode_fakes.Numbers):
    def following(self, where, asked, known, sampled, tools, template_args):
        return "and then?"

    def tokens(self, text):
        assert text == "and then?"
        return [77, 78]


@pytest.fixture
def run(tmp_path):
    return made_run(tmp_path)


def made_run(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"weights")
    paths = RunPaths(tmp_path / "run")
    paths.control.mkdir(parents=True)
    layout.create(paths.bus, ["rollout-0"], {})
    return paths


def settings(run, **further):
    return config(
        model__path=str(run.root.parent / "model"), schedule__num_steps=1,
        schedule__prompts_per_step=2, rollout__advanced__groups_per_shard=1, **further,
    )  # fmt: skip


def task(run, engine, *, environment=None, ends=None, **further):
    """A rollout task of two groups; `ends` is called once it is quiet, to end the job."""
    made, events = settings(run, **further), Events()
    prompts = [
        Prompt(
            index=i, token_ids=[7, 100 + i], answer="", messages=[{"role": "user", "content": "?"}]
        )
        for i in range(2)
    ]
    parts = episode_fakes.episodes(
        made, engine, lambda *_: 1.0, environment=environment, conversation=Conversation()
    )
    group = Grouper(made, episode_fakes.Prompts(prompts), parts)
    provenance = {MODEL: digests_of(made.model.path)}
    with Folders.open(run.bus, 0, 1, provenance) as folders:
        unfinished = Unfinished(made, group, folders, events)
        evaluator = episode_fakes.Evaluator(
            made, {"heldout": []}, parts, events, episode_fakes.Board(over=(made.num_steps,))
        )
        ending = Ending(run, "7.0", run.keeps("7.0", 0))
        whole = loop.run(
            made, engine, group, evaluator, folders, Credits(folders, 2), events,
            AnnouncedEnd(ending, unfinished), TaskSkips(made, folders),
        )  # fmt: skip
        asyncio.run(asyncio.wait_for(_until(whole, ends, run), 30))
        rows = {guid: found.trajectories for guid, found in folders.partial.items()}
    return events, rows, group


async def _until(whole, ends, run):
    if ends is None:
        await whole
        return
    running = asyncio.create_task(whole)
    await asyncio.sleep(0.5)
    ends()
    while (record := json.loads(run.keeps("7.0", 0).read_text()))["step"] is None:
        await asyncio.sleep(0.05)
    assert record["step"] >= 0
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


def announce(run):
    return lambda: run.ending("7.0").write_text("{}")


def forget(run):
    run.ending("7.0").unlink()


def committed(run):
    rows = []
    for record in read_log(run.bus.log("rollout-0")):
        if record.kind is RecordKind.BASE:
            with Shard(run.bus.shard("rollout-0", record.fence, record.seq)) as shard:
                rows += from_columns(shard.read_span(0, shard.rows), shard.part_names)
    return sorted(rows, key=lambda row: (row.guid, row.sibling))


def test_a_response_that_was_broken_off_goes_on_where_it_was_with_its_versions_and_logprobs(run):
    events, kept, _ = task(run, Engine(version=0, stops_at=4), ends=announce(run))
    [said] = events.of("unfinished")
    # Four or five tokens of each, less the last one, which may have been the end unheard.
    lengths = {g: [len(row.token_ids) - row.prompt_len for row in rows] for g, rows in kept.items()}
    # The last one of each of four is lost.
    num_tokens = sum(map(sum, lengths.values()))
    assert said == {"num_groups": 2, "num_tokens": num_tokens, "num_lost": 4}
    assert {n for rows in lengths.values() for n in rows} <= {3, 4} and len(lengths) == 2
    forget(run)
    engine = Engine(version=1)
    events, _, _ = task(run, engine)
    assert events.of("continued") == [
        {"num_groups": 2, "num_tokens": num_tokens, "num_dropped": 0, "num_damaged": 0}
    ]
    held = sorted(len(held) for _, held, _ in engine.asked)
    assert held == sorted(n for rows in lengths.values() for n in rows)
    rows = committed(run)
    assert [(row.guid, row.sibling) for row in rows] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for row in rows:
        held = lengths[row.guid][row.sibling]
        assert row.token_ids.tolist() == [7, 100 + row.guid, *WHOLE]
        assert row.version_runs.tolist() == [[2, 0], [2 + held, 1]]
        old, new = [-0.5] * held, [-1.5] * (len(WHOLE) - held)
        assert row.columns["rollout_logprobs"].tolist() == [0, 0, *old, *new]
        assert row.finish is FinishReason.STOP and row.reward == 1.0


@pytest.mark.parametrize(("most", "again"), [(None, 0), (1, 0), (0, 1)])
def test_what_was_gone_on_with_too_often_is_sampled_from_its_beginning(run, most, again):
    events, _, _ = task(run, Engine(stops_at=4), ends=announce(run))
    num_tokens = events.of("unfinished")[0]["num_tokens"]
    forget(run)
    engine = Engine()
    events, _, _ = task(run, engine, rollout__advanced__max_continuations=most)
    [said] = events.of("continued")
    assert said["num_dropped"] == num_tokens * again
    assert said["num_tokens"] == num_tokens * (1 - again)
    assert {held == [] for _, held, _ in engine.asked} == {bool(again)}


def test_what_nobody_has_gone_on_with_is_kept_as_it_was(run):
    """No engine came before the next end: the prompts are not asked for, and no token is lost."""
    _, kept, _ = task(run, Engine(stops_at=4), ends=announce(run))
    forget(run)
    engine = Engine(version=None)
    events, again, group = task(run, engine, ends=announce(run))
    assert engine.asked == [] and group.asked == {}
    [said] = events.of("unfinished")
    assert said["num_groups"] == 1, "the other was not the next one"
    assert said["num_lost"] == 0, "nothing was broken off"
    for guid, rows in kept.items():
        for row, before in zip(again[guid], rows, strict=True):
            assert row.token_ids.tolist() == before.token_ids.tolist()


def test_tokens_that_no_room_an_engine_or_damage_has_cost_are_counted(run, monkeypatch):
    class Unsent(Engine):
        async def sample(self, given, draft, how, **further):
            draft.num_unsent = 10  # of each of four responses
            return await super().sample(given, draft, how, **further)

    monkeypatch.setattr(Space, "write", lambda *_: False)
    events, kept, _ = task(run, Unsent(stops_at=4), ends=announce(run))
    [said] = events.of("unfinished")
    assert (kept, said["num_groups"], said["num_tokens"]) == ({}, 0, 0)
    assert 4 * (4 + 10) <= said["num_lost"] <= 4 * (5 + 10)
    monkeypatch.undo()
    forget(run)
    task(run, Engine(stops_at=4), ends=announce(run))
    forget(run)
    [record] = [r for r in read_log(run.bus.log("rollout-0")) if r.kind is RecordKind.PARTIAL]
    run.bus.shard("rollout-0", record.fence, record.seq).write_bytes(b"torn")
    engine = Engine()
    events, _, _ = task(run, engine)
    [said] = events.of("continued")
    assert said["num_damaged"] == record.tokens > 0
    assert {len(held) for _, held, _ in engine.asked} == {0}, "all of it is sampled again"


def test_a_turn_that_was_over_is_not_sampled_again(run):
    events, _, _ = task(run, Engine(stops_at=4), environment=Turns(), ends=announce(run))
    assert events.of("unfinished")[0]["num_groups"] == 2
    forget(run)

    # Second turns are broken off, too: the first is over and nobody says how.
    class StopsInTheSecond(Engine):
        async def sample(self, given, *others, **further):
            engine = Engine(stops_at=2 if 77 in given else None)
            return await engine.sample(given, *others, **further)

    task(run, StopsInTheSecond(), environment=Turns(), ends=announce(run))
    forget(run)
    last = Engine()
    task(run, last, environment=Turns())
    assert all(77 in given for given, _, _ in last.asked), "no first turn was asked for again"
    for row in committed(run):
        assert row.token_ids.tolist() == [7, 100 + row.guid, *WHOLE, 77, 78, *WHOLE]
        assert row.loss_mask.tolist() == [0, 0, *[1] * 6, 0, 0, *[1] * 6]
        assert row.turns.tolist() == [[0, 0], [2, 1], [8, 2], [10, 1]]


@pytest.fixture(scope="module")
def broken_off(tmp_path_factory):
    """A run whose end broke two groups off."""
    run = made_run(tmp_path_factory.mktemp("broken_off"))
    task(run, Engine(stops_at=4), ends=announce(run))
    forget(run)
    return run.root.parent


@pytest.mark.parametrize("name", [
    "config.json", "tokenizer.json", "chat_template.jinja", "preprocessor_config.json",
    "model.safetensors",
])  # fmt: skip
def test_a_partial_of_another_model_or_tokenizer_is_refused_by_name(broken_off, tmp_path, name):
    shutil.copytree(broken_off, tmp_path / "copy")
    run = RunPaths(tmp_path / "copy" / "run")
    (run.root.parent / "model" / name).write_text("another one")
    said = name.replace("model", r"\*")
    with pytest.raises(ConfigError, match=rf"model.path = .*/model': {said}: not as .* group 0 "):
        task(run, Engine())
