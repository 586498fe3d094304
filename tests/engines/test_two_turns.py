"""An environment of two turns with real (embedded) engines, from the session to the micro-batch."""

import asyncio
from itertools import pairwise

import numpy as np
import pytest
import torch
from engine_fixtures import reference_logprobs, started

from relax_hpc.bus.shards.encode import from_columns, to_columns
from relax_hpc.cli.demo import models
from relax_hpc.config import job_file
from relax_hpc.data.conversation import Conversation
from relax_hpc.data.source import Prompt
from relax_hpc.environments.environment import Outcome
from relax_hpc.inference.generation import GenerationClient, Sampling
from relax_hpc.inference.pool import Endpoint, Pool
from relax_hpc.roles.rollout.episodes import Episodes, Grouper
from relax_hpc.trainer.megatron import packing

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SIBLINGS, GROUPS = 4, 3


class Doubt:
    """Asks again whatever was answered."""

    async def rollout(self, prompt, session):
        first = await session.chat()
        again = {"role": "user", "content": "1+1="}
        second = await session.chat([*session.messages, again], max_new_tokens=5)
        return Outcome({"first": len(first.text), "second": float(second.text == "2")})


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder, tokens = tmp_path_factory.mktemp("model"), models.tokenizer()
    tokens.chat_template = TEMPLATE
    models.save(folder, models.model(tokens, seed=0), tokens)
    return folder, tokens


@pytest.fixture(scope="module")
def engines(model, tmp_path_factory):
    logs = tmp_path_factory.mktemp("engines")
    running = [started("embedded", model[0], logs / f"{n}.log") for n in range(2)]
    yield running
    for engine in running:
        engine.stop()


class Sampler:
    """The engines as one; notes which of them was asked for which episode."""

    def __init__(self, engines, stop_token):
        self.served, self.stop_token = {}, stop_token
        self.pool = Pool(self.connect, max_in_flight=64, patience_s=20)
        ends = [Endpoint(f"e{n}", "0", e.url, e.token) for n, e in enumerate(engines)]
        self.pool.enlist(dict.fromkeys(ends, "serving"))
        choose = self.pool._choose

        def noted(rid, request, attempts):
            if engine := choose(rid, request, attempts):
                self.served.setdefault(request.homes[0], []).append(engine.endpoint.id)
            return engine

        self.pool._choose = noted

    @staticmethod
    def connect(at):
        return GenerationClient(at.url, at.token, tokens_per_chunk=4)

    async def sample(self, given, draft, how, *, seed, homes):
        sampling = Sampling(how.temperature, how.max_new_tokens, (self.stop_token,))
        return await self.pool.sample(given, seed, sampling, homes=homes, draft=draft)


@pytest.fixture(scope="module")
def played(model, engines):
    """Three groups of two-turn episodes, and which engines served them."""
    _, tokens = model
    conversation = Conversation(tokens, chat_template=True)
    settings = job_file.validate(
        {
            "name": "t", "model": {"path": "m"}, "prompts": {"train": "t"},
            "rollout": {"samples_per_prompt": SIBLINGS, "max_new_tokens": 7},
            "schedule": {"num_steps": 1},
        },
        source="test",
    )  # fmt: skip

    async def run():
        sampler = Sampler(engines, tokens.eos_token_id)
        episodes = Episodes(settings, Doubt(), sampler, conversation, None, max_tokens=200)
        group = Grouper(settings, Prompts(conversation), episodes)
        made = await asyncio.gather(*(group(guid, 0) for guid in range(GROUPS)))
        await sampler.pool.aclose()
        return made, sampler.served

    return asyncio.run(run())


class Prompts:
    def __init__(self, conversation):
        self.conversation = conversation

    async def fetch(self, guid):
        messages = [{"role": "user", "content": f"{guid}+2="}]
        return Prompt(guid, self.conversation.encode("a test", messages), "", messages)


def test_every_turn_of_an_episode_is_answered_by_the_engine_that_has_its_prefix(played):
    _, served = played
    assert len(served) == GROUPS * SIBLINGS
    assert all(len(asked) == 2 and len(set(asked)) == 1 for asked in served.values())
    assert {asked[0] for asked in served.values()} == {"e0", "e1"}


def test_what_was_sampled_is_trained_on_as_it_was_and_nothing_else_is(played, model):
    """The engine's logprobs of both turns are the model's of the very tokens of the row."""
    folder, tokens = model
    for group in played[0]:
        for row in group.trajectories:
            kinds = [kind for _, kind in row.turns.tolist()]
            firsts = [first for first, _ in row.turns.tolist()]
            assert kinds == [0, 1, 2, 1] and firsts[1] == row.prompt_len
            ends = [*firsts[1:], len(row.token_ids)]
            expected = np.zeros(len(row.token_ids), np.uint8)
            expected[firsts[1] : ends[1]] = expected[firsts[3] : ends[3]] = 1
            assert row.loss_mask.tolist() == expected.tolist()
            assert row.version_runs.tolist() == [[firsts[1], 0], [firsts[3], 0]]
            between = tokens.decode(row.token_ids[firsts[2] : firsts[3]])
            assert between.endswith("user\n1+1=<|im_end|>\n<|im_start|>assistant\n")
            known = reference_logprobs(
                folder, row.token_ids[:1].tolist(), row.token_ids[1:].tolist()
            )
            mask = torch.from_numpy(row.loss_mask[1:]).bool()
            sampled = torch.from_numpy(row.columns["rollout_logprobs"][1:])
            torch.testing.assert_close(sampled[mask], known[mask], atol=1e-4, rtol=0)
            assert not row.columns["rollout_logprobs"][row.loss_mask == 0].any()


def test_two_turns_go_through_a_shard_into_a_micro_batch(played):
    groups = played[0]
    columns = to_columns(groups)
    rows = from_columns(columns)
    written = [row.turns.tolist() for group in groups for row in group.trajectories]
    ends = columns["index/offsets__turns"]
    found = [columns["ragged/turns"][a:b].tolist() for a, b in pairwise(ends)]
    assert found == written
    batch = packing.build(rows, range(len(rows)), device=torch.device("cpu"))
    mask = np.concatenate([row.loss_mask for group in groups for row in group.trajectories])
    assert batch.loss_mask.tolist() == mask.astype(bool).tolist()
    assert batch.token_ids.tolist() == np.concatenate([row.token_ids for row in rows]).tolist()
