"""Two engines, a trainer of two ranks, updates while requests run: nothing lost, all of it true."""

import asyncio
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

import psutil
import pytest
import sync_worker
import torch
from engine_fixtures import prompt_of, reference_logprobs
from megatron_worker import job
from rank_pool import Ranks
from sglang_under_test import SGLANG_PYTHON, SGLANG_VERSION
from transformers import AutoModelForCausalLM, DynamicCache

from relax_hpc.config.rollout import RolloutConfig
from relax_hpc.engines.generation import Draft, GenerationClient, Sampling
from relax_hpc.engines.process import start_engine
from relax_hpc.paths import RunPaths
from relax_hpc.schema import FinishReason
from relax_hpc.weights import members
from relax_hpc.weights.members import Member
from relax_hpc.weights.roster import Roster
from relax_hpc.weights.switches import Switches

IDS = ["rollout-0", "rollout-1"]
ENGINE_ARGS = {
    "embedded": {},
    "sglang": {"disable_overlap_schedule": False},  # as on GPUs: a step ends after the next began
}
if SGLANG_VERSION == "0.5.17":
    ENGINE_ARGS["sglang"]["disable_radix_cache"] = True  # it cannot be emptied in a pause
UPDATES, REQUESTS, TOKENS = 10, 64, 900
SMALL_BUCKETS = 40_000  # of 411 kB in all


class House(NamedTuple):
    engines: list
    paths: RunPaths
    config: object
    checkpoints: list
    start: Callable
    """number -> an engine of policy 0."""

    def start_again(self, number):
        self.engines[number].stop()
        self.engines[number] = self.start(number)

    def announce(self, epoch="1", transports=("collective", "collective"), ids=IDS):
        for name, engine, way in zip(IDS, self.engines, transports, strict=True):
            if name not in ids:
                continue
            record = Member(
                name, epoch, engine.url, "right", 1, self.kind, "HEALTHY", transport=way
            )
            members.announce(self.paths, record)

    def client(self, number):
        """As rollout tasks ask."""
        engine, name = self.engines[number], IDS[number]
        switches = Switches(self.paths, name, self.epoch) if self.kind == "sglang" else None
        return GenerationClient(engine.url, engine.token, switches=switches)

    @property
    def epoch(self):
        return members.find(self.paths, IDS[0]).epoch

    @property
    def version(self):
        """The last one that was published; 0 before the first."""
        roster = Roster.read(self.paths)
        return roster.version if roster else 0

    @property
    def kind(self):
        return self.config.rollout.engine


@contextmanager
def house_of(kind, checkpoints, folder):
    """Two engines of policy 0, announced in a run directory."""
    config = job(checkpoints[0], tp=2)
    rollout = config.rollout.model_copy(update={"engine": kind})
    config = config.model_copy(update={"run_root": folder, "rollout": rollout})

    def start(number):
        return start_engine(
            kind, checkpoints[0], host="127.0.0.1", token="right",
            rollout_config=RolloutConfig(
                engine=kind, start_timeout_s=300, engine_args=ENGINE_ARGS[kind]
            ),
            dtype="float32",
            log_path=folder / f"engine-{number}.log", seed=number,
            python=SGLANG_PYTHON if kind == "sglang" else None,
        )  # fmt: skip

    with ThreadPoolExecutor(2) as threads:  # an engine dies with the thread that started it
        house = House(
            list(threads.map(start, range(2))), RunPaths(config.run_dir), config, checkpoints,
            lambda number: threads.submit(start, number).result(),
        )  # fmt: skip
        house.announce()
        yield house
        for engine in house.engines:
            engine.stop()


@pytest.fixture(scope="module", params=["embedded", "sglang"])
def house(request, checkpoints, tmp_path_factory):
    with house_of(request.param, checkpoints, tmp_path_factory.mktemp(request.param)) as house:
        yield house


@contextmanager
def trainer(house, timeout_s=60, **control):
    ranks = Ranks(2)
    ranks.call(
        sync_worker.open_publisher, config=house.config, ids=IDS,
        bucket_bytes=SMALL_BUCKETS, timeout_s=timeout_s, **control,
    )  # fmt: skip
    yield ranks
    if all(process.is_alive() for process in ranks.processes):
        ranks.call(sync_worker.close)
        ranks.close()


def publish(ranks, house, version, *, check=False):
    """Version v of the weights is checkpoint v modulo 3."""
    folder = house.checkpoints[version % 3]
    return ranks.call(sync_worker.publish, version=version, folder=folder, check=check)[0]


def sample_all(house, num_tokens, first_token, requests=REQUESTS):
    """Responses, half of them by each engine; `first_token` is set when they all run."""
    sampling = Sampling(1.0, num_tokens, ignore_eos=True)
    started = set()

    async def ask(client, seed):
        draft = Draft()
        task = asyncio.create_task(client.sample(prompt_of(6, seed), seed, sampling, draft=draft))
        while not draft.token_ids and not task.done():
            await asyncio.sleep(0.02)
        started.add(seed)
        if len(started) == requests:
            first_token.set()
        return await task

    async def run():
        clients = [house.client(number) for number in range(2)]
        try:
            return await asyncio.gather(*(ask(clients[s % 2], s) for s in range(requests)))
        finally:
            for client in clients:
                client.close()

    return asyncio.run(run())


def recomputed(house, prompt, generation):
    """Logprobs of a response whose keys and values were made by the policies that it names."""
    models = [
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for folder in house.checkpoints
    ]
    runs = [*generation.version_runs, (len(generation.token_ids), None)]
    tokens = torch.tensor([prompt + generation.token_ids])
    cache, at, found = DynamicCache(), 0, []
    with torch.no_grad():
        for (_, version), (end, _) in itertools.pairwise(runs):
            until = len(prompt) + end - 1  # the input that samples the last token of this policy
            logits = models[version % 3](tokens[:, at:until], past_key_values=cache).logits[0]
            found.append(logits)
            at = until
    rows = torch.cat(found)[len(prompt) - 1 :].log_softmax(-1)
    return rows.gather(1, torch.tensor(generation.token_ids)[:, None])[:, 0]


def test_ten_updates_under_load_lose_nothing_and_every_token_names_its_policy(house):
    running = threading.Event()
    with trainer(house) as ranks, ThreadPoolExecutor(1) as pool:
        first = publish(ranks, house, 0, check=True)
        assert first["members"] == IDS
        assert first["verified"]["equal"]
        load = pool.submit(sample_all, house, TOKENS, running)
        assert running.wait(120)
        for version in range(1, UPDATES + 1):
            done = publish(ranks, house, version, check=version == UPDATES)
            assert (done["members"], done["fenced"], done["again"]) == (IDS, [], False)
        assert done["verified"]["equal"]
        assert not load.done(), "the requests ended before the last update"
        sampled = load.result()
    assert all(g.finish is FinishReason.LENGTH and len(g.token_ids) == TOKENS for g in sampled)
    for generation in sampled:
        firsts, versions = zip(*generation.version_runs, strict=True)
        assert versions == tuple(sorted(set(versions)))
        assert (firsts[0], versions[0], versions[-1]) == (0, 0, UPDATES)
    clients = [engine.client() for engine in house.engines]
    assert [client.version() for client in clients] == [UPDATES] * 2
    held = {client.checksum() for client in clients}
    clients[0].update_weights_from_disk(str(house.checkpoints[UPDATES % 3]), UPDATES)
    assert held == {clients[0].checksum()}
    for number in range(0, REQUESTS, 5):  # of both engines
        generation = sampled[number]
        expected = recomputed(house, prompt_of(6, number), generation)
        assert torch.tensor(generation.logprobs).sub(expected).abs().max() <= 1e-4


@pytest.mark.parametrize("recompute", [False, True])
def test_requests_go_on_with_keys_of_the_policy_before_or_of_the_new_one_as_is_asked(
    house, recompute
):
    version, running = house.version + 1, threading.Event()
    has_prefix_cache = "disable_radix_cache" not in ENGINE_ARGS[house.kind]
    settings = {"recompute": recompute, "has_prefix_cache": has_prefix_cache}
    with trainer(house, **settings) as ranks, ThreadPoolExecutor(1) as pool:
        publish(ranks, house, version)
        load = pool.submit(sample_all, house, 300, running, 8)
        assert running.wait(120)
        publish(ranks, house, version + 1)
        assert not load.done(), "the requests ended before the update"
        sampled = load.result()
    for number, generation in enumerate(sampled):
        assert len(generation.token_ids) == 300
        (_, old), (switch, new) = generation.version_runs
        assert (old, new) == (version, version + 1)
        found, prompt = torch.tensor(generation.logprobs), prompt_of(6, number)
        for_old, for_new = (
            reference_logprobs(house.checkpoints[v % 3], prompt, generation.token_ids)
            for v in (old, new)
        )
        assert (found - for_old)[:switch].abs().max() <= 1e-4
        error = (found - for_new)[switch:].abs().max()
        assert error <= 1e-4 if recompute else error > 1e-2


def test_a_trainer_killed_in_an_update_leaves_engines_that_the_next_one_can_update(house):
    before = house.version
    with trainer(house) as ranks:
        publish(ranks, house, before)
        pool = ThreadPoolExecutor(1)
        pool.submit(publish, ranks, house, before + 1)
        wait_until(lambda: not Roster.read(house.paths).done)
        for process in ranks.processes:
            os.kill(process.pid, signal.SIGKILL)
            process.join()
        pool.shutdown(wait=True)
    with trainer(house) as ranks:
        done = publish(ranks, house, before + 2, check=True)
        assert (done["members"], done["fenced"]) == (IDS, [])
        assert done["verified"]["equal"]
    assert all(engine.client().health(5) for engine in house.engines)


def test_a_tensor_of_another_shape_fences_the_engines_and_names_what_is_wrong(house):
    version = house.version + 1
    fenced, again = [], True
    with trainer(house, timeout_s=20) as ranks:
        ranks.call(sync_worker.wrong_shape)
        while again:
            done = publish(ranks, house, version)
            fenced, again = fenced + done["fenced"], done["again"]
            assert done["members"] == []
    assert sorted(fenced) == IDS
    roster = Roster.read(house.paths)
    assert all("64" in holding.reason for holding in roster.members.values()), roster
    assert all(engine.alive for engine in house.engines)
    house.announce(epoch="2")  # as their owners do, with engines that are new
    with trainer(house) as ranks:
        assert publish(ranks, house, version, check=True)["verified"]["equal"]


def test_an_engine_that_hangs_in_an_update_is_named_in_time_and_the_other_goes_on(house):
    version = house.version
    house.announce(epoch="3")
    with trainer(house, timeout_s=8) as ranks:
        assert publish(ranks, house, version + 1)["members"] == IDS
        with at_that_moment(ranks, house, "in", stop):
            done = publish(ranks, house, version + 2)
        assert done["fenced"] == ["rollout-1"]
        assert "rollout-1" in Roster.read(house.paths).members
        again = publish(ranks, house, version + 2, check=True)
        assert again["members"] == ["rollout-0"]
        assert again["verified"]["equal"]
    for process in tree_of(house.engines[1]):
        process.send_signal(signal.SIGCONT)


@pytest.mark.parametrize("moment", ["between", "in", "resuming"])
def test_an_engine_that_is_killed_at_an_update_does_not_keep_the_other_from_it(house, moment):
    """Between two updates it is left out; in one it is fenced, and the other is given all of it."""
    version = house.version + 1
    if not house.engines[1].alive:
        house.start_again(1)
    house.announce(epoch=f"killed {moment}")
    with trainer(house, timeout_s=30) as ranks:
        assert publish(ranks, house, version)["members"] == IDS
        if moment == "between":
            kill(house.engines[1])
            done = publish(ranks, house, version + 1)
        else:
            with at_that_moment(ranks, house, moment, kill):
                done = publish(ranks, house, version + 1)
        assert done["fenced"] == ([] if moment == "between" else ["rollout-1"])
        if moment == "in":  # half of it has come, so all of it comes again
            assert (done["members"], done["again"]) == ([], True)
            done = publish(ranks, house, version + 1)
        assert done["members"] == ["rollout-0"]
        done = publish(ranks, house, version + 2, check=True)
        assert (done["members"], done["fenced"], done["again"]) == (["rollout-0"], [], False)
        assert done["verified"]["equal"]


@contextmanager
def at_that_moment(ranks, house, moment, act):
    """Acts on the second engine while the next publication stands still at a moment of it."""
    reached, released = (house.paths.root / name for name in ("reached", "released"))
    for file in (reached, released):
        file.unlink(missing_ok=True)
    ranks.call(sync_worker.hold, place=moment, reached=reached, released=released)

    def run():
        wait_until(reached.exists)
        act(house.engines[1])
        released.touch()

    with ThreadPoolExecutor(1) as pool:
        acting = pool.submit(run)
        yield
        acting.result()


def stop(engine):
    for process in tree_of(engine):
        process.send_signal(signal.SIGSTOP)


def kill(engine):
    family = tree_of(engine)
    for process in family:
        process.kill()
    psutil.wait_procs(family[:-1], timeout=30)
    wait_until(lambda: not engine.alive)


def tree_of(engine):
    leader = psutil.Process(engine.pid)
    return [*leader.children(recursive=True), leader]


def wait_until(condition, timeout_s=60):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)
