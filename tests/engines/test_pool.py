"""Streams of one engine, and several engines as one, with real (embedded) engines."""

import asyncio
import base64
import time

import numpy as np
import psutil
import pytest
import torch
from engine_fixtures import prompt_of, reference_logprobs, started

from relax_hpc.errors import EngineError, EngineLostError
from relax_hpc.inference.generation import Draft, GenerationClient, Load, ReplyAssembler, Sampling
from relax_hpc.inference.pool import Endpoint, Pool, next_limit
from relax_hpc.schema import FinishReason

LONG = Sampling(1.0, 300, ignore_eos=True)


@pytest.fixture(scope="module")
def start(checkpoints, tmp_path_factory):
    running, logs = [], tmp_path_factory.mktemp("engines")

    def start(**args):
        running.append(started("embedded", checkpoints[0], logs / f"{len(running)}.log", args=args))
        return running[-1]

    yield start
    for engine in running:
        engine.stop()


@pytest.fixture(scope="module")
def engines(start):
    return start(), start()


@pytest.fixture
def pair(engines, checkpoints):
    """Two engines with policy 0; they start slowly, so tests share them."""
    for engine in engines:
        engine.client().resume()  # a test that fails may leave one paused
        engine.client().update_weights_from_disk(str(checkpoints[0]), 0)
    return engines


def endpoint(engine, name):
    return Endpoint(name, "0", engine.url, engine.token)


def make_pool(engines, patience_s=20.0, max_in_flight=64, state="serving"):
    pool = Pool(
        lambda at: GenerationClient(at.url, at.token, tokens_per_chunk=4),
        max_in_flight=max_in_flight,
        patience_s=patience_s,
    )
    pool.enlist({endpoint(e, f"e{i}"): state for i, e in enumerate(engines)})
    return pool


async def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


async def sample_all(pool, groups, siblings=4, sampling=LONG, **kwargs):
    return await asyncio.gather(
        *(
            pool.sample(
                prompt_of(9, group), 10 * group + sibling, sampling, homes=(group,), **kwargs
            )
            for group in range(groups)
            for sibling in range(siblings)
        )
    )


async def undisturbed(engine, groups, **kwargs):
    pool = make_pool([engine])
    responses = await sample_all(pool, groups, **kwargs)
    await pool.aclose()
    return [response.token_ids for response in responses]


def assert_same_draws(responses, expected):
    """Equal tokens; but a draw may fall so close to the border of two neighbours in the
    cumulative distribution that the order of a sum in another batch decides."""
    split = []
    for response, tokens in zip(responses, expected, strict=True):
        assert len(response.token_ids) == len(tokens)
        pairs = zip(response.token_ids, tokens, strict=True)
        if (first := next((pair for pair in pairs if pair[0] != pair[1]), None)) is not None:
            split.append(abs(first[0] - first[1]))
    assert split in ([], [1], [1, 1]), "first tokens that differ, apart"


def test_a_request_says_what_is_to_be_sampled_from_what_by_which_policy():
    client = GenerationClient("http://127.0.0.1:1", "", tokens_per_chunk=1)
    draft = Draft([7, 8], [-0.5, -1.0], [(0, 3)])
    sampling = Sampling(0.7, 20, stop_token_ids=(2, 5), ignore_eos=True)
    assert client._body([4, 5, 6], 11, sampling, draft, 3, "rid") == {
        "rid": "rid", "input_ids": [4, 5, 6, 7, 8], "stream": True, "return_logprob": True,
        "extra_key": "v3",
        "sampling_params": {
            "temperature": 0.7, "max_new_tokens": 18, "stop_token_ids": [2, 5], "ignore_eos": True,
            "top_p": 1.0, "top_k": -1, "sampling_seed": 11, "stream_interval": 1,
        },
    }  # fmt: skip


@pytest.mark.parametrize("tokens_per_chunk", [1, 16])
def test_no_token_counts_as_newer_than_it_is_where_only_the_newest_version_is_reported(
    start, checkpoints, tokens_per_chunk
):
    engine, prompt = start(version_spans=False), prompt_of(6)
    control = engine.client()

    async def run():
        async with GenerationClient(
            engine.url, engine.token, tokens_per_chunk=tokens_per_chunk
        ) as client:
            draft = Draft()
            task = asyncio.create_task(client.sample(prompt, 1, LONG, draft=draft))
            await until(lambda: len(draft.token_ids) > 20)
            await asyncio.to_thread(control.pause)
            await asyncio.to_thread(control.update_weights_from_disk, str(checkpoints[1]), 1)
            await asyncio.to_thread(control.resume)
            return await task

    generation = asyncio.run(run())
    old = reference_logprobs(checkpoints[0], prompt, generation.token_ids)
    error = torch.tensor(generation.logprobs).sub(old).abs()
    truth = int((error > 1e-3).nonzero()[0])  # the first token that policy 0 did not sample
    assert error[:truth].max() < 1e-4
    (first, zero), (switch, one) = generation.version_runs
    assert (first, zero, one) == (0, 0, 1)
    assert truth <= switch <= truth + tokens_per_chunk
    assert len(generation.token_ids) == len(generation.logprobs) == 300


def test_samples_of_an_engine_that_is_killed_go_on_elsewhere_as_if_nothing_had_happened(
    start, checkpoints
):
    one, two = start(), start()

    async def run():
        expected = await undisturbed(one, 4)
        pool = make_pool([one, two])
        task = asyncio.create_task(sample_all(pool, 4))
        await until(lambda: pool.in_flight == {"e0": 8, "e1": 8})
        await asyncio.sleep(0.2)
        for process in (*psutil.Process(one.pid).children(recursive=True), psutil.Process(one.pid)):
            process.kill()
        responses = await task
        await pool.aclose()
        return expected, responses

    expected, responses = asyncio.run(run())
    assert_same_draws(responses, expected)
    for index in (0, 5):
        reference = reference_logprobs(
            checkpoints[0], prompt_of(9, index // 4), responses[index].token_ids
        )
        assert torch.tensor(responses[index].logprobs).sub(reference).abs().max() < 1e-4
    assert all(response.version_runs == [(0, 0)] for response in responses)


def test_aborted_samples_go_on_where_they_were(pair):
    one, _ = pair

    async def run():
        expected = await undisturbed(one, 1)
        pool = make_pool([one])
        task = asyncio.create_task(sample_all(pool, 1))
        await until(lambda: pool.in_flight == {"e0": 4})
        await asyncio.sleep(0.1)
        await asyncio.to_thread(one.client().abort_all)
        responses = await task
        await pool.aclose()
        return expected, responses

    expected, responses = asyncio.run(run())
    assert_same_draws(responses, expected)


def test_siblings_share_an_engine_while_it_has_room_and_groups_spread(pair):
    one, two = pair

    async def run(max_in_flight):
        pool, seen = make_pool([one, two], max_in_flight=max_in_flight), {}
        choose = pool._choose

        def spy(rid, request, attempts):
            if engine := choose(rid, request, attempts):
                seen.setdefault(request.homes, []).append(engine.endpoint.id)
            return engine

        pool._choose = spy
        await sample_all(pool, 2, sampling=LONG._replace(max_new_tokens=100))
        await pool.aclose()
        return sorted(seen.values())

    assert asyncio.run(run(64)) == [["e0"] * 4, ["e1"] * 4]
    # Of the first group, two find no room at home and go next door; so do two of the second.
    assert [sorted(ids[:4]) for ids in asyncio.run(run(3))] != [["e0"] * 4, ["e1"] * 4]


def test_an_engine_is_given_as_many_samples_as_it_may_have_and_no_more(pair):
    async def run():
        pool = make_pool(pair[:1], max_in_flight=3)
        short = LONG._replace(max_new_tokens=40)
        samples, seen = asyncio.create_task(sample_all(pool, 1, sampling=short)), set()
        while not samples.done():
            seen.add(pool.in_flight["e0"])
            await asyncio.sleep(0.001)
        await pool.aclose()
        return seen

    assert max(asyncio.run(run())) == 3


def test_a_sample_waits_for_an_engine_of_a_policy_that_is_new_enough(pair, checkpoints):
    one, two = pair
    two.client().update_weights_from_disk(str(checkpoints[1]), 1)

    async def run():
        pool = make_pool([one, two], patience_s=0.5)
        assert await pool.version() == 0
        short = LONG._replace(max_new_tokens=5)
        responses = await sample_all(pool, 3, sampling=short._replace(min_version=1))
        with pytest.raises(EngineError, match=r"version 2 or newer: e0 .* version 0, e1"):
            await sample_all(pool, 1, sampling=short._replace(min_version=2))
        await pool.aclose()
        return responses

    assert {tuple(response.version_runs) for response in asyncio.run(run())} == {((0, 1),)}


def test_samples_in_flight_follow_the_cache():
    assert next_limit(100, Load(100, 0, 0.97), 80, 256) == 72  # a tenth less than there are
    assert next_limit(100, Load(100, 0, 0.5), 100, 256) == 112  # an eighth more
    assert next_limit(250, Load(250, 0, 0.5), 250, 256) == 256  # and no more than that
    assert next_limit(100, Load(90, 10, 0.5), 100, 256) == 100  # the engine queues already
    assert next_limit(100, Load(100, 0, 0.9), 100, 256) == 100
    assert next_limit(1, Load(1, 0, 0.99), 1, 256) == 1


def chunk(tokens, completion, version="0", finish=None, **meta):
    pairs = [[-0.5, token, None] for token in tokens]
    return {
        "output_ids": tokens,
        "meta_info": {
            "completion_tokens": completion, "output_token_logprobs": pairs,
            "weight_version": version, "finish_reason": finish and {"type": finish}, **meta,
        },
    }  # fmt: skip


def test_a_reply_that_breaks_off_is_lost_and_its_draft_keeps_what_came():
    draft = Draft()
    reply = ReplyAssembler("x", draft, 3)
    reply.add(chunk([5], 1))
    with pytest.raises(EngineLostError, match="broke off"):
        reply.finish()
    assert draft.token_ids == [5]


def test_tokens_are_counted_to_the_policy_that_sampled_them_where_the_changes_are_known():
    draft, ours = Draft(), {"rid": 5}
    reply = ReplyAssembler("x", draft, 3)
    reply.add(chunk([5] * 4, 4))
    reply.add(chunk([5] * 16, 20, version="3"))  # in which policy 1, 2 and 3 came
    assert draft.version_runs == [(0, 0)]  # the oldest, until they are known
    reply.settle("rid", {1: ours, 2: {"rid": 19}, 3: {"rid": 20}})
    reply.add(chunk([5] * 4, 24, version="3"))
    spans = [{"version": "3", "start": 0, "end": 24}]  # of no account
    reply.add(chunk([5], 25, version="4", finish="length", weight_versions=spans))
    reply.settle("rid", {4: {"rid": 25}})  # it was sampled, and booked after the change
    expected = [(0, 0), (5, 1), (19, 2), (20, 3)]
    assert draft.finish(reply.finish()).version_runs == expected

    goes_on = ReplyAssembler("x", draft, 28, version=3)
    goes_on.add(chunk([5], 1, version="4"))
    goes_on.settle("another", {4: {}})  # the engine had not begun with it
    assert draft.version_runs == [*expected, (25, 4)]
    goes_on.add(chunk([5] * 9, 10, version="6"))
    goes_on.settle("another", None)
    spans = [{"version": "4", "start": 0, "end": 7}, {"version": "6", "start": 7, "end": 10}]
    goes_on.add(chunk([], 10, version="6", finish="length", weight_versions=spans))
    goes_on.finish()
    assert draft.version_runs == [*expected, (25, 4), (32, 6)]


def test_experts_of_a_response_in_two_pieces_are_those_of_every_token_once():
    """2 layers x 1 expert; 3 prompt tokens, 2 + 2 response tokens."""

    def encoded(first, rows):
        values = np.arange(2 * first, 2 * (first + rows), dtype=np.int32)
        return base64.b64encode(values.tobytes()).decode()

    draft = Draft()
    reply = ReplyAssembler("x", draft, 3)
    reply.add(chunk([5, 6], 2, finish="abort", routed_experts=encoded(0, 4)))
    assert reply.finish() is FinishReason.ABORT
    assert sum(map(len, draft.experts)) == 4  # the last token has not been through the model
    reply = ReplyAssembler("x", draft, 5, version=1)
    reply.add(chunk([7, 8], 2, version="1", finish="stop", routed_experts=encoded(4, 2)))
    generation = draft.finish(reply.finish())
    expected = np.arange(12).reshape(6, 2)
    assert np.array_equal(generation.routed_experts[:6], expected)
    assert np.array_equal(generation.routed_experts[6], expected[5])
    assert generation.token_ids == [5, 6, 7, 8]
    assert generation.version_runs == [(0, 0), (2, 1)]
