"""How a rollout task is put together from the settings, and what ends it."""

import asyncio
import time
from contextlib import asynccontextmanager, contextmanager
from types import SimpleNamespace

import pytest
from role_fakes import Events, Journal, config

from relax_hpc.bus import layout
from relax_hpc.data.conversation import Conversation
from relax_hpc.data.order import VERSION
from relax_hpc.data.rows import TaskShare
from relax_hpc.data.source import Prompt
from relax_hpc.environments.record import Call, EpisodeRecord
from relax_hpc.environments.session import Outcome
from relax_hpc.errors import EngineError, RelaxError
from relax_hpc.inference.generation import Draft
from relax_hpc.roles.context import TaskContext
from relax_hpc.roles.engine import host
from relax_hpc.roles.rollout import build as rollout_task
from relax_hpc.roles.rollout import episodes, prompt_check, sampling, skips
from relax_hpc.roles.rollout.prompt_check import Files
from relax_hpc.runtime.paths import RunPaths


class Tokenizer:
    eos_token_id = 2

    def decode(self, response, *, skip_special_tokens):
        return "".join(chr(token) for token in response if token > 2 or not skip_special_tokens)


def test_a_rollout_task_samples_the_training_prompts_shuffled_and_scores_by_the_named_reward(
    tmp_path, monkeypatch
):
    journal, given = Journal(), {}

    class Source:
        media_tokens = None

        def __init__(self, path, tokenizer, **settings):
            self.path, self.tokenizer = str(path), tokenizer
            self.conversation = Conversation(tokenizer, chat_template=False)
            journal.note(self.path, settings)

        def __len__(self):
            return 8

        async def fetch(self, index):
            return f"{self.path} {index}"

    @asynccontextmanager
    async def sampler(settings, paths, *, own, stop_token, events):
        journal.note("sampler", own, stop_token)
        yield "the sampler"

    async def loop(config, engines, group, evaluator, folders, credits, events, end, skips):
        given.update(locals())
        right = [ord(letter) for letter in r"\boxed{75}"]
        said = [[*right, 2], [*right[:-2], 2, *right[-2:]], right[1:]]  # 2 is no text
        assert await scores(group, "75", said) == [1.0, 1.0, 0.0]
        assert await scores(group, "7", said) == [0.0, 0.0, 0.0]

    monkeypatch.setattr(prompt_check, "PromptSource", Source)
    monkeypatch.setattr(sampling, "client_of", sampler)
    monkeypatch.setattr(rollout_task.rollout, "run", loop)
    architecture = SimpleNamespace(max_positions=20000, vocab_size=2**20)
    monkeypatch.setattr(prompt_check, "read_architecture", lambda path: architecture)
    monkeypatch.setattr(skips, "CreditTail", lambda paths, num_steps, every_s: "the credits")
    settings = config(
        engines__rollout__count=6, engines__rollout__engines_per_task=2,
        eval__heldout__num_prompts=5,
        seed=5, prompts__max_prompt_tokens=70, prompts__chat_template=False,
    )  # fmt: skip
    own = ["rollout-1.0", "rollout-1.1"]
    sources = prompt_check.sources_of(settings, Files("train", {"heldout": "heldout"}), Tokenizer())
    paths, folders = RunPaths(tmp_path), SimpleNamespace()
    context = TaskContext("rollout", 1, 3, 0, attempt="7.0", start=1, node="n2")
    share = TaskShare(1, settings.rollout_pool.num_hosts)
    parts = context, share, own, sources, folders, Events()
    asyncio.run(rollout_task._loop(settings, paths, *parts))
    each = {"settings": settings.prompts, "media": None, "vocab_size": 2**20}
    assert journal == [
        ("train", each | {"shuffle_seed": 5}),
        ("heldout", each | {"shuffle_seed": None}),
        ("sampler", own, 2),
    ]
    group, evaluator = given["group"], given["evaluator"]
    assert asyncio.run(group._prompts.fetch(1)) == "train 1"
    # Of five; a task has every third.
    assert evaluator._shares == {"heldout": ["heldout 1", "heldout 4"]}
    assert (given["engines"], given["folders"]) == ("the sampler", folders)
    assert (group._episodes.how(0.5).max_tokens, evaluator._episodes.how(0.5).max_tokens) == (
        16384, 20000
    )  # fmt: skip


async def scores(group, answer, said):
    """The job's reward for responses."""
    prompt, played = Prompt(0, [1], answer), [episodes._check_played(Outcome())] * len(said)
    records = [EpisodeRecord([Call([1], draft=Draft(tokens))]) for tokens in said]
    made = await group._episodes._score_episodes(prompt, records, played, {})
    return [episode.score.value for episode in made]


@pytest.mark.parametrize("fails", ["engine", "itself", "both", None])
def test_a_rollout_task_ends_with_its_loop_or_with_an_engine_that_does_not_come_back(fails):
    ended = []

    class Frail:
        async def failure(self):
            if fails in ("engine", "both"):
                raise EngineError("ended 3 times")
            await asyncio.sleep(60)

    async def loop():
        try:
            if fails == "both":
                raise ValueError("bug")
            if fails == "itself":
                raise asyncio.CancelledError
            await asyncio.sleep(0.01 if fails is None else 60)
        finally:
            ended.append(True)

    running = rollout_task.while_kept([Frail(), Frail()], loop())

    async def run():
        await asyncio.wait_for(running, 10)

    if fails is None:
        asyncio.run(run())
    else:
        match = "was cancelled by" if fails == "itself" else "ended 3 times"
        with pytest.raises(RelaxError, match=match):
            asyncio.run(run())
    assert ended == [True]


@pytest.mark.parametrize(("blocks_s", "is_told"), [(0.25, True), (0.02, False)])
def test_a_loop_that_stands_still_is_told_of_once_in_a_while(
    blocks_s, is_told, monkeypatch, caplog
):
    monkeypatch.setattr(host, "BEAT_S", 0.01)
    monkeypatch.setattr(host, "_STILL_S", 0.15)

    async def loop():
        for _ in range(3):
            time.sleep(blocks_s)
            await asyncio.sleep(0.05)

    asyncio.run(rollout_task.while_kept([], loop()))
    said = [each for each in caplog.messages if "stood still for 0." in each]
    assert len(said) == is_told


class Host:
    """An engine's host; its hosts' journal is the class's."""

    journal, attends = Journal(), "none"

    def __init__(self, hosting, paths, context, events):
        self.id = hosting.slot.id

    def __enter__(self):
        self.journal.note("start", self.id)
        return self

    def __exit__(self, *_): ...

    def wait_until_healthy(self):
        self.journal.note("healthy", self.id)

    def ask_to_stop(self):
        self.journal.note("ask", self.id)

    async def failure(self):
        await asyncio.sleep(60)


@pytest.fixture
def rolled_out(tmp_path, monkeypatch):
    """Runs a rollout task of four with everything around it a fake; returns what it was given."""
    made = {}

    @contextmanager
    def opened(bus, task, size, provenance, **settings):
        made.update(task=task, size=size, provenance=provenance, **settings)
        yield "the folders"

    async def loop(config, paths, context, share, own, sources, folders, events):
        made.update(share=share, own=own, sources=sources)

    def gate(config, paths, sources, share):
        return SimpleNamespace(settle=lambda: Host.journal.note("checked", sources, *share))

    monkeypatch.setattr(Host, "journal", Journal())
    monkeypatch.setattr(rollout_task, "EngineHost", Host)
    monkeypatch.setattr(rollout_task.Folders, "open", opened)
    monkeypatch.setattr(rollout_task, "_loop", loop)
    monkeypatch.setattr(prompt_check.tokenizers, "load", lambda path: f"tokenizer of {path}")
    monkeypatch.setattr(prompt_check, "open_files", lambda config: "the files")
    monkeypatch.setattr(prompt_check, "sources_of", lambda _, *files: files)
    monkeypatch.setattr(rollout_task, "RowGate", gate)
    layout.create(RunPaths(tmp_path).bus, ["rollout-0"], {"order": VERSION})

    def run(rank, **settings):
        context = TaskContext("rollout", rank, 4, 0, attempt="7.0", start=3, node="n2")
        rollout_task.main(config(**settings), RunPaths(tmp_path), context, Events())
        return made

    return run


OVER_NODES = {
    "kind": "sglang", "count": 2, "nodes_per_engine": 2, "resources": {"nodes": 4},
    "args": {"tp_size": 2},
}  # fmt: skip


def test_a_task_of_an_engine_over_several_nodes_is_the_producer_of_its_engine(rolled_out):
    made = rolled_out(2, engines__rollout=OVER_NODES, bus__advanced__compress=["ragged/token_ids"])
    assert (made["task"], made["size"]) == (1, 2)
    assert (made["share"], made["own"]) == ((1, 2), ["rollout-1"])
    assert (made["compress"], made["spares"]) == (["ragged/token_ids"], rollout_task.SPARES)
    told = made["provenance"]
    assert (told["run"], told["rank"], told["start"], told["node"]) == ("test", 2, 3, "n2")


def test_the_further_tasks_of_an_engine_run_their_part_of_it_and_are_no_producers(
    rolled_out, monkeypatch
):
    served = []
    monkeypatch.setattr(rollout_task, "serve_part", lambda *args: served.append(args[0].slot))
    made = rolled_out(3, engines__rollout=OVER_NODES)
    assert made == {} and Host.journal == []
    assert [(slot.id, slot.part) for slot in served] == [("rollout-1", 1)]


def test_the_engines_of_a_task_are_started_together_and_asked_to_stop_together(rolled_out):
    made = rolled_out(1, engines__rollout__count=4, engines__rollout__engines_per_task=2)
    names = ["rollout-1.0", "rollout-1.1"]
    assert (made["task"], made["own"]) == (1, names)
    kinds = ("start", "healthy", "ask")
    told = [(kind, name) for kind in kinds for name in names]
    share = ("checked", ("the files", "tokenizer of model"), 1, 2)
    assert Host.journal[:7] == [*told[:2], share, *told[2:]]  # while engines start
    assert made["sources"] == share[1]
