"""The promises of the embedded engine alone: reproducible sampling, and nothing half-done."""

import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from engine_fixtures import prompt_of, reference_logprobs

from relax_hpc.errors import EngineError
from relax_hpc.inference.embedded import scheduler as embedded
from relax_hpc.inference.embedded.model import Decoder, ModelShape
from relax_hpc.runtime.comm.bucket import digest
from relax_hpc.schema import FinishReason


def load(folder) -> Decoder:
    model = Decoder(ModelShape.read(folder), torch.float32, torch.device("cpu"))
    model.load_folder(folder)
    return model


@contextmanager
def scheduling(folder, max_running=8):
    scheduler = embedded.Scheduler(load(folder), max_running=max_running, version="0")
    thread = threading.Thread(target=scheduler.run)
    thread.start()
    try:
        yield scheduler
    finally:
        scheduler.stop()
        thread.join(30)
    assert not thread.is_alive()


def answer(scheduler, *given, **settings):
    return submitted(scheduler, *given, **settings).done.result(30)


def submitted(scheduler, *given, **settings):
    made = request(*given, **settings)
    scheduler.submit([made])
    return made


def request(prompt, seed=0, max_new_tokens=20, stop_ids=(), rid="r", temperature=1.0):
    return embedded.SequenceRequest(
        rid, prompt, seed, temperature, max_new_tokens, frozenset(stop_ids)
    )


def test_a_seed_draws_the_same_tokens_whatever_else_is_running(checkpoints):
    prompt = prompt_of(7)
    with scheduling(checkpoints[0]) as scheduler:
        expected = answer(scheduler, prompt, seed=5, max_new_tokens=60).token_ids
        crowd = [request(prompt_of(3 + i), i, max_new_tokens=5 + 11 * i) for i in range(20)]
        same = request(prompt, seed=5, max_new_tokens=60)
        scheduler.submit([*crowd[:10], same, *crowd[10:]])
        assert same.done.result(30).token_ids == expected
        assert [len(r.done.result(30).token_ids) for r in crowd] == [5 + 11 * i for i in range(20)]


def test_a_response_continued_from_its_own_tokens_goes_on_as_it_would_have(checkpoints):
    prompt = prompt_of(7)
    with scheduling(checkpoints[0]) as scheduler:
        tokens = answer(scheduler, prompt, seed=5, max_new_tokens=30).token_ids
        rest = answer(scheduler, prompt + tokens[:12], seed=5, max_new_tokens=18)
    assert rest.token_ids == tokens[12:]


def test_more_requests_than_slots_all_get_their_own_answers(checkpoints):
    requests = [request(prompt_of(2 + i % 5, seed=i), i, 3 + i % 17) for i in range(40)]
    with scheduling(checkpoints[0], max_running=3) as scheduler:
        scheduler.submit(requests)
        for each in requests:
            done = each.done.result(60)
            reference = reference_logprobs(checkpoints[0], list(each.prompt), done.token_ids)
            assert torch.tensor(done.logprobs).sub(reference).abs().max() <= 1e-5


def test_no_more_requests_run_than_were_allowed(checkpoints):
    requests = [request(prompt_of(4), i, 400) for i in range(5)]
    with scheduling(checkpoints[0], max_running=2) as scheduler:
        scheduler.submit(requests)
        while scheduler.load != (2, 3):
            assert scheduler.load == (0, 5)
            time.sleep(0.001)
        assert scheduler.call(lambda: scheduler.abort(None)).result(30) == 5
    done = [each.done.result(30) for each in requests]
    assert {each.finish for each in done} == {FinishReason.ABORT}
    assert [(each.token_ids, each.spans) for each in done[2:]] == [([], [])] * 3  # never ran


def test_requests_that_were_retracted_go_first_in_their_order(checkpoints):
    requests = [request(prompt_of(4), i, 400) for i in range(4)]
    with scheduling(checkpoints[0], max_running=2) as scheduler:
        scheduler.submit(requests)
        while scheduler.load != (2, 2):
            time.sleep(0.001)

        def retracted():
            scheduler.set_paused(True)
            scheduler.retract()
            return scheduler.load, list(scheduler._waiting)

        load, waiting = scheduler.call(retracted).result(30)
        scheduler.call(lambda: scheduler.abort(None)).result(30)
    assert (load, [each.seed for each in waiting]) == ((0, 4), [0, 1, 2, 3])


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [
        ("model.layers.0.mlp.up_proj.bias", (96,), "no such weight"),
        ("model.norm.weight", (63,), r"shape \(63,\)"),
    ],
)
def test_a_bucket_with_one_wrong_tensor_changes_nothing(checkpoints, name, shape, said):
    model = load(checkpoints[0])
    before = digest(model.weights.items())
    good = ("model.embed_tokens.weight", torch.zeros(128, 64))
    with pytest.raises(EngineError, match=said):
        model.load([good, (name, torch.zeros(shape))])
    assert digest(model.weights.items()) == before


def test_sampling_inverts_the_cumulative_distribution():
    # p = 0, 1/2, 1/4, 1/4: cut at 0, 0.5 and 0.75; what has no probability is never drawn
    logits = torch.tensor([-torch.inf, 2.0, 1.0, 1.0]) * torch.log(torch.tensor(2.0))
    draws = torch.tensor([0.0, 0.49, 0.51, 0.74, 0.76, 1 - 2**-53], dtype=torch.float64)
    tokens, logprobs = embedded.sample(logits.expand(6, 4), torch.ones(6), draws)
    assert tokens.tolist() == [1, 1, 2, 2, 3, 3]
    half, quarter = np.log([0.5, 0.25])
    assert logprobs.tolist() == pytest.approx([half] * 2 + [quarter] * 4, abs=1e-6)


def test_temperature_scales_and_zero_is_greedy():
    logits = torch.log(torch.tensor([[0.2, 0.5, 0.3]])).expand(2, 3)
    draws = torch.tensor([0.999, 0.999], dtype=torch.float64)
    tokens, logprobs = embedded.sample(logits, torch.tensor([0.0, 0.5]), draws)
    assert tokens.tolist() == [1, 2]
    # squares at temperature 1/2: 0.04, 0.25, 0.09 of 0.38
    assert logprobs.tolist() == pytest.approx(np.log([0.5, 0.09 / 0.38]), abs=1e-6)


def limits(top_p=1.0, top_k=4, rows=1):
    return embedded.SamplingLimits(
        torch.full((rows,), top_p, dtype=torch.float64), torch.full((rows,), top_k)
    )


PROBABILITIES = [0.125, 0.5, 0.125, 0.25]


@pytest.mark.parametrize(
    ("top_p", "top_k", "left"),
    [
        (1.0, 3, [0, 1, 3]),  # of equally likely ones the lower id
        (1.0, 1, [1]),
        (0.01, 4, [1]),  # never none
        (0.51, 4, [1, 3]),
        (0.75, 4, [1, 3]),
        (0.9, 4, [0, 1, 2, 3]),
        (0.7, 2, [1, 3]),  # the part of all, not of the top two, of which one has 0.67
    ],
)
def test_top_p_and_top_k_leave_the_likeliest_tokens(top_p, top_k, left):
    logits = torch.log(torch.tensor([PROBABILITIES]))
    assert embedded.mask_kept(logits, limits(top_p, top_k))[0].nonzero()[:, 0].tolist() == left


def test_a_request_that_is_limited_changes_nothing_for_others_beside_it(checkpoints):
    prompt = prompt_of(7)
    with scheduling(checkpoints[0]) as scheduler:
        expected = answer(scheduler, prompt, seed=5, max_new_tokens=40).token_ids
        free, one = (request(prompt, seed=5, max_new_tokens=40) for _ in range(2))
        greedy = request(prompt, temperature=0.0, max_new_tokens=40)
        one.top_k = 1
        scheduler.submit([free, one, greedy])
        assert free.done.result(30).token_ids == expected
        assert one.done.result(30).token_ids == greedy.done.result(30).token_ids != expected


def test_uniforms_are_uniform_over_seeds_and_positions_and_do_not_repeat():
    seeds, positions = np.meshgrid(np.arange(200), np.arange(200))
    draws = embedded.uniforms(seeds.ravel(), positions.ravel())
    assert len(np.unique(draws)) == 40_000
    assert draws.min() >= 0 and draws.max() < 1
    # 5 standard deviations of a mean and of a lag correlation of 40,000 numbers
    assert abs(draws.mean() - 0.5) < 5 * np.sqrt(1 / 12 / 40_000)
    grid = draws.reshape(200, 200) - 0.5
    for other in (np.roll(grid, 1, 0), np.roll(grid, 1, 1), np.roll(grid, (1, 1), (0, 1))):
        assert abs((grid * other).mean()) < 5 / 12 / np.sqrt(40_000)
    assert (embedded.uniforms(np.array([-1]), np.array([0])) < 1).all()


def test_released_memory_comes_back_as_garbage_until_weights_are_loaded(checkpoints):
    with scheduling(checkpoints[0]) as scheduler:
        model = scheduler.model
        before = digest((name, weight.clone()) for name, weight in model.weights.items())
        scheduler.call(lambda: scheduler.release_memory(["kv_cache", "weights"])).result(10)
        assert sum(each.untyped_storage().nbytes() for each in model.weights.values()) == 0
        scheduler.call(lambda: scheduler.resume_memory(["weights"])).result(10)
        assert all(bool(each.isnan().all()) for each in model.weights.values())
        scheduler.call(lambda: model.load_folder(checkpoints[0])).result(10)
        scheduler.call(lambda: scheduler.resume_memory(["kv_cache"])).result(10)
        assert digest(model.weights.items()) == before
        assert len(answer(scheduler, prompt_of(5)).token_ids) == 20


def test_a_busy_engine_keeps_its_memory_and_a_sleeping_one_keeps_requests_waiting(checkpoints):
    with scheduling(checkpoints[0]) as scheduler:
        scheduler.call(lambda: scheduler.set_paused(True)).result(10)
        asked = submitted(scheduler, prompt_of(5))
        release = scheduler.call(lambda: scheduler.release_memory(["kv_cache"]))
        with pytest.raises(EngineError, match="1 waiting; only an idle engine releases memory"):
            release.result(10)
        scheduler.call(lambda: scheduler.set_paused(False)).result(10)
        assert asked.done.result(30).finish is FinishReason.LENGTH
        scheduler.call(lambda: scheduler.release_memory(["kv_cache"])).result(10)
        late = submitted(scheduler, prompt_of(5))
        with pytest.raises(TimeoutError):
            late.done.result(0.3)
        scheduler.call(lambda: scheduler.resume_memory(["kv_cache"])).result(10)
        assert late.done.result(30).token_ids == asked.done.result().token_ids
        again = scheduler.call(lambda: scheduler.resume_memory(["kv_cache"]))
        with pytest.raises(EngineError, match="memory of kv_cache was not released"):
            again.result(10)
