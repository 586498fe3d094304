"""Held-out evaluations: when, of which prompts, by which policies, and beside what."""

import asyncio
import json
import math
from datetime import date

import pytest
from episode_fakes import Board, answer, episodes
from role_fakes import Events, Journal, config

from relax_hpc.data.source import Prompt
from relax_hpc.environments.record import Call, EpisodeRecord
from relax_hpc.environments.rewards.contract import Score
from relax_hpc.errors import EngineError
from relax_hpc.roles.rollout import heldout
from relax_hpc.roles.rollout.heldout import Due, Evaluator
from relax_hpc.roles.rollout.heldout import ScoreBoard as RealBoard
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.schema import FinishReason


class Greedy:
    """Answers a prompt with its own token, by policy `now`; may be held up, before or after the
    first token."""

    def __init__(self, journal):
        self.journal, self.now, self.asked, self.begins = journal, 0, 0, False
        self.oldest = set()
        self.free = asyncio.Event()
        self.free.set()

    async def sample(self, given, draft, how, *, seed, homes):
        self.journal.note(given, how.temperature)
        self.oldest.add(how.min_version)
        self.asked += 1
        draft.token_ids += [7] * self.begins
        await self.free.wait()
        return answer(draft, list(given), [-0.5], [(0, self.now)])


def right(response, prompt):
    return float(str(response[0]) == prompt.answer and response[0] in (1, 3, 4))


METADATA = {"tests": ["x" * 3000], "day": date(2026, 11, 30), "odd": math.nan}


class Made:
    """An evaluator of five prompts and what stands around it."""

    def __init__(self, *, rank=0, size=1, sets=("heldout",), board=None, schedule=None,
                 score=None, on_error="zero", **settings):  # fmt: skip
        self.journal, self.events, self.board = Journal(), Events(), board or Board(size=size)
        self.sampler = Greedy(self.journal)
        prompts = [
            Prompt(i, [i], str(i), source=f"s{i}", metadata=METADATA | {"level": i})
            for i in range(5)
        ]
        each_own = sets if isinstance(sets, dict) else {name: {} for name in sets}
        tables = {name: {"path": "p"} | settings | own for name, own in each_own.items()}
        pace = {f"schedule__{key}": value for key, value in (schedule or {}).items()}
        made = config(eval=tables, engines__rollout__max_running_requests=8,
                      reward__on_error=on_error, **pace)  # fmt: skip
        shares = {name: prompts[rank::size] for name in sets}
        each = episodes(made, self.sampler, score or right)
        self.config, self.trained = made, {}
        self.evaluator = Evaluator(
            made, shares, each, self.events, self.board, trained=self.trained
        )

    async def visit(self, version, trained):
        self.sampler.now = version
        self.evaluator.consider(version, trained=trained)
        still = 0
        while still < 20:
            asked = self.sampler.asked
            await asyncio.sleep(0.001)
            still = still + 1 if asked == self.sampler.asked else 0

    @property
    def said(self):
        return [(e["when"], e["version"]) for e in self.events.of("eval")]


def evaluate(visits, *, finish=None, **settings):
    async def run():
        made = Made(**settings)
        for version, trained in visits:
            await made.visit(version, trained)
        made.sampler.now = finish
        await made.evaluator.finish(finish)
        return made

    return asyncio.run(run())


def test_a_task_evaluates_its_own_share_of_the_held_out_prompts_greedily():
    made = evaluate([(0, 0)], rank=1, size=2, every=0)
    assert made.journal == [([1], 0.0), ([3], 0.0)]
    [event] = made.events.of("eval")
    assert event.pop("seconds") > 0
    assert event == {
        "name": "heldout", "headline": True, "tasks": 2, "when": "before", "number": 0,
        "version": 0, "version_max": 0, "correct": 2.0, "num_samples": 2, "num_masked": 0,
        "num_tokens": 2, "num_truncated": 0,
    }  # fmt: skip
    made = evaluate([(0, 0)], rank=0, size=2, every=0)
    assert [given for given, _ in made.journal] == [[0], [2], [4]]
    [event] = made.events.of("eval")
    assert (event["correct"], event["num_samples"]) == (1.0, 3)


@pytest.mark.parametrize(("on_error", "score"), [("mask", None), ("zero", -1.0)])
def test_a_reward_that_failed_is_in_no_mean_if_it_is_masked(on_error, score):
    """Of prompt 1 it fails, and would count -1."""

    def failing(response, prompt):
        if response[0] == 1:
            return Score(-1.0, error="a bug")
        return right(response, prompt)

    made = evaluate([(0, 0)], every=0, score=failing, on_error=on_error)
    [event] = made.events.of("eval")
    found = event["correct"], event["num_samples"], event["num_masked"]
    assert found == ((2.0, 4, 1) if on_error == "mask" else (1.0, 5, 0))
    [(_, _, rows)] = made.board.added
    assert [row.score for row in rows] == [0, score, 0, 1, 1]
    assert [row.failed for row in rows] == [False, True, False, False, False]


def test_a_policy_is_evaluated_when_a_multiple_has_been_passed_since_the_last():
    visits = [(None, 0), (0, 0), (3, 3), (4, 4), (5, 5), (9, 9), (10, 10), (13, 13)]
    assert evaluate(visits, every=4, finish=14).said == [
        ("before", 0), ("during", 4), ("during", 9), ("during", 13), ("after", 14),
    ]  # fmt: skip
    assert evaluate(visits, every=0).said == [("before", 0)]


@pytest.mark.parametrize(("every", "visits", "during"), [
    (7, (7, 13, 14), [7]), (7, (8, 14), [8]), (14, (9, 14), []),
    (4, (8, 14), [8, 14]),  # that of policy 12, which other tasks may have made by then
    (4, (12, 14), [12]),
])  # fmt: skip
def test_the_last_policy_is_evaluated_once_where_it_is_due_during_training_too(
    every, visits, during
):
    seen = [(0, 0), *((version, version) for version in visits)]
    made = evaluate(seen, every=every, finish=14, schedule={"num_steps": 14})
    assert made.said == [("before", 0), *(("during", each) for each in during), ("after", 14)]


ONE_POLICY = {"every": 4, "advanced": {"one_policy": True}}


def test_a_policy_for_which_training_waits_is_evaluated_whenever_it_is_there_and_nothing_else():
    visits = [(0, 0), (3, 3), (4, 4), (5, 5), (9, 9), (12, 12), (13, 13)]
    made = evaluate(visits, finish=16, schedule={"num_steps": 16}, **ONE_POLICY)
    assert made.said == [("before", 0), ("during", 4), ("during", 12), ("after", 16)]
    assert made.sampler.oldest == {0, 4, 12}, "no older policy may sample"
    awaited = {v: [each[1:] for each in heldout.awaited_at(made.config, v)] for v in range(17)}
    assert {v: dues for v, dues in awaited.items() if dues} == {
        0: [("before", 0)], 4: [("during", 1)], 8: [("during", 2)], 12: [("during", 3)]
    }  # fmt: skip
    assert evaluate([(0, 5), (5, 5)], **ONE_POLICY).said == [], "not yet the trainer's policy"


@pytest.mark.parametrize("placement", ["own", "actor"])
def test_training_waits_for_evaluations_as_told_and_else_where_engines_share_its_gpus(placement):
    sets = {n: {"path": "p", "advanced": {"one_policy": v}} for n, v in (("y", True), ("n", False))}
    sets["unset"] = {"path": "p"}
    made = config(eval=sets, engines__rollout__placement=placement, schedule__max_staleness=0)
    waits = {"y": True, "n": False, "unset": placement == "actor"}
    assert {name: made.waits_for_eval(name) for name in sets} == waits


def test_an_engine_that_starts_in_the_middle_is_not_taken_for_the_first_policy():
    assert evaluate([(0, 5), (5, 5), (8, 8)], every=8).said == [("during", 8)]


async def test_every_sample_is_kept_with_the_policies_that_sampled_it():
    """The policy changes while the second of two samples is under way."""

    made = Made(samples_per_prompt=2, temperature=0.6, every=0)
    sample = made.sampler.sample

    async def changing(given, draft, how, *, seed, homes):
        done = await sample(given, draft, how, seed=seed, homes=homes)
        if made.sampler.asked == 10:
            draft.token_ids, draft.logprobs = draft.token_ids * 2, draft.logprobs * 2
            draft.version_runs.append((1, 3))
        return done

    made.sampler.sample = changing
    await made.visit(2, 0)
    [(due, share, rows)] = made.board.added
    assert due == Due("heldout", "before", 0)
    assert [(row.prompt, row.sample) for row in rows] == [(p, s) for p in range(5) for s in (0, 1)]
    assert [(row.version, row.version_max, row.num_tokens) for row in rows].count((2, 2, 1)) == 9
    [mixed] = [row for row in rows if row.version_max == 3]
    assert (mixed.version, mixed.num_tokens, mixed.finish) == (2, 2, "stop")
    assert [row.score for row in rows] == [0, 0, 1, 1, 0, 0, 1, 1, 1, 1]
    assert rows[2].parts == {"boxed_number": 1.0} and rows[2].texts == ["1"]
    assert [row.source for row in rows[::2]] == ["s0", "s1", "s2", "s3", "s4"]
    assert (share.version, share.version_max, share.correct, share.num_samples) == (2, 3, 6.0, 10)


ALONE = {"a": {"advanced": {"one_policy": True}}}


@pytest.mark.parametrize(
    ("sets", "settings", "asking", "begins", "share"),
    [
        ("a", {}, 8, True, 2),  # a quarter of eight places
        ("abc", {}, 8, True, 2),  # for all sets together
        ({"a": {"samples_per_prompt": 4}, "b": {}}, {}, 8, True, 4),  # one prompt, though it wants
        ("a", {"max_staleness": 0}, 8, True, 1),  # a quarter of four that training has in flight
        ("a", {}, 5, True, 3),  # what training leaves free
        ("a", {}, 0, False, 2),  # and no more than a quarter waits for an engine
        (ALONE, {}, 6, True, 2), (ALONE, {}, 8, True, 1),  # training waits: it goes first till then
    ],
)  # fmt: skip
async def test_while_training_goes_on_evaluations_have_a_share_of_the_places(
    sets, settings, asking, begins, share, monkeypatch
):
    monkeypatch.setattr(heldout, "_LOOK_S", 0.001)
    over = [EpisodeRecord([Call([1], finish=FinishReason.STOP)])] * 9
    trained = [[EpisodeRecord() for _ in range(asking)], over] if asking else []
    made = Made(every=4, sets=sets, schedule=settings)
    made.sampler.begins = begins
    made.sampler.free.clear()
    await made.visit(0, 0)
    before = made.sampler.asked
    made.sampler.free.set()
    await made.visit(1, 1)
    all_before = made.sampler.asked
    made.trained |= enumerate(trained)
    made.sampler.free.clear()
    await made.visit(4, 4)
    during = made.sampler.asked - all_before
    made.trained.clear()
    made.sampler.free.set()
    await made.evaluator.finish(None)
    evaluations = made.sampler.asked / all_before
    assert before == min(8, 5 * len(sets))  # all places, or all that there are prompts for
    assert during == share
    assert evaluations == 2  # who waits for a place gets one


async def test_what_an_evaluation_raises_ends_the_loop():
    with pytest.raises(EngineError, match=r"group heldout/before/0/\d+: refused"):
        made = Made()

        async def sample(*_, **__):
            raise EngineError("refused")

        made.sampler.sample = sample
        await made.visit(0, 0)
        await made.visit(0, 0)


class Life:
    """A task that may be killed, and started again over what it left."""

    def __init__(self, root, **settings):
        self.paths, self.settings, self.asked, self.events = RunPaths(root), settings, [], []

    async def live(self, visits, *, answers=None, finish=None):
        """Answers so many requests in all, and is killed then if that is not all."""
        made = Made(board=RealBoard(self.paths, 0, 1), **self.settings)
        sample, left = (
            made.sampler.sample,
            asyncio.Semaphore(1 << 30 if answers is None else answers),
        )

        async def until_killed(given, draft, how, **each):
            self.asked.append(given[0])
            await left.acquire()
            return await sample(given, draft, how, **each)

        made.sampler.sample = until_killed
        for version, trained in visits:
            await made.visit(version, trained)
            running = made.evaluator._running.values()
            while not (left.locked() or all(task.done() for task in running)):
                await asyncio.sleep(0.002)
        if left.locked():
            await asyncio.sleep(0.5)  # what was answered is kept by now
        if finish is not None:
            made.sampler.now = finish
            last = asyncio.create_task(made.evaluator.finish(finish))
            done, _ = await asyncio.wait({last}, timeout=0.3 if answers is not None else 10)
            assert bool(done) == (answers is None)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        self.events += made.said

    def rows(self, name="heldout"):
        """Samples of each complete evaluation: prompt, sample, version."""
        found = {}
        for path in sorted(self.paths.root.glob(f"eval/{name}/*.jsonl")):
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            found[path.name] = [(row["prompt"], row["sample"], row["version"]) for row in rows]
        return found


def test_a_sample_is_kept_with_what_its_row_holds_and_of_long_fields_the_ends(tmp_path):
    life = Life(tmp_path)
    asyncio.run(life.live([(0, 0), (1, 1)]))
    rows = [json.loads(line) for path in tmp_path.glob("eval/*/*.jsonl") for line in path.open()]
    assert [(row["answer"], row["source"]) for row in rows] == [(str(n), f"s{n}") for n in range(5)]
    for n, row in enumerate(rows):
        tests = row["metadata"].pop("tests")
        assert tests == f'["{"x" * 998} [... 1004 letters ...] {"x" * 998}"]'
        assert row["metadata"] == {"level": n, "day": "2026-11-30", "odd": None}


def test_an_evaluation_that_was_killed_is_completed_once_and_asks_only_for_what_is_missing(
    tmp_path,
):
    life = Life(tmp_path, every=4)
    asyncio.run(life.live([(0, 0)], answers=2))
    assert life.rows() == {} and life.events == []
    part = life.paths.eval_part("heldout", "before", 0, 0, 1)
    part.write_text(part.read_text() + '[{"prompt": 4, "sam')  # the kill came while it wrote
    life.asked.clear()
    asyncio.run(life.live([(1, 1), (1, 1)]))
    assert sorted(life.asked) == [2, 3, 4]
    versions = {0: 0, 1: 0, 2: 1, 3: 1, 4: 1}
    assert life.rows() == {"000000-before-0.0.jsonl": [(p, 0, v) for p, v in versions.items()]}
    assert life.events == [("before", 0)]
    life.asked.clear()
    asyncio.run(life.live([(1, 1), (2, 2)]))
    assert life.asked == [] and not part.exists()


def test_an_evaluation_that_fell_due_while_the_task_was_dead_is_made_and_none_twice(tmp_path):
    life = Life(tmp_path, every=4)
    asyncio.run(life.live([(0, 0), (3, 3)]))
    asyncio.run(life.live([(5, 5)]))
    assert life.events == [("before", 0), ("during", 5)]
    asyncio.run(life.live([(6, 6), (7, 7)]))
    asyncio.run(life.live([(8, 8)], answers=0))  # killed before the first answer
    asyncio.run(life.live([(9, 9)], answers=3))  # and again
    asyncio.run(life.live([(9, 9)], finish=10))
    asyncio.run(life.live([], finish=10))
    assert life.events[2:] == [("during", 9), ("after", 10)]
    assert [len({row[:2] for row in rows}) for rows in life.rows().values()] == [5] * 4
    assert {len(rows) for rows in life.rows().values()} == {5}


def test_what_was_left_of_one_policy_waits_for_it_to_come_again_unless_it_has_passed(tmp_path):
    """Killed with one prompt each of policies 4 and 8; the trainer goes on from step 3."""
    life = Life(tmp_path, **ONE_POLICY)
    asyncio.run(life.live([(0, 0), (4, 4)], answers=6))
    asyncio.run(life.live([(3, 3)]))
    assert life.events == [("before", 0)]
    asyncio.run(life.live([(4, 4)]))
    asyncio.run(life.live([(8, 8)], answers=1))
    asyncio.run(life.live([(9, 9)]))
    assert life.events == [("before", 0), ("during", 4), ("during", 8)]
    versions = [sorted({row[2] for row in rows}) for rows in life.rows().values()]
    assert versions == [[0], [4], [8, 9]]


def test_a_run_that_is_given_more_steps_evaluates_its_new_last_policy_and_no_old_one_again(
    tmp_path,
):
    life = Life(tmp_path, every=4, schedule={"num_steps": 4})
    asyncio.run(life.live([(0, 0)], finish=4))
    life.settings["schedule"] = {"num_steps": 10}
    asyncio.run(life.live([(4, 4), (8, 8)], finish=10))
    asyncio.run(life.live([], finish=10))
    assert life.events == [("before", 0), ("after", 4), ("during", 8), ("after", 10)]
    assert sorted(life.rows()) == [
        "000000-before-0.0.jsonl", "000004-after-4.0.jsonl", "000008-during-2.0.jsonl",
        "000010-after-10.0.jsonl",
    ]  # fmt: skip
