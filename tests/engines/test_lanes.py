"""Weights through shared memory, from each rank of a trainer to the engine's rank beside it."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

import pytest
import sync_worker
import torch
from engine_fixtures import EOS, prompt_of, reference_logprobs
from megatron_worker import job
from rank_pool import Ranks
from sglang_under_test import SGLANG_PYTHON
from test_weights_sync import at_that_moment, kill, stop, tree_of

from relax_hpc.config.rollout import RolloutConfig
from relax_hpc.engines.generation import Sampling
from relax_hpc.engines.process import start_engine
from relax_hpc.paths import RunPaths
from relax_hpc.weights import members
from relax_hpc.weights.members import Member
from relax_hpc.weights.roster import Roster

SMALL_BUCKETS = 40_000  # of 411 kB in all
LAYOUTS = {"embedded": (2, 1), "sglang": (1, 2)}
"""Engines, and ranks of each, beside the two ranks of the trainer."""


class House(NamedTuple):
    kind: str
    engines: list
    paths: RunPaths
    config: object
    checkpoints: list

    @property
    def ids(self):
        return [f"rollout-{number}" for number in range(len(self.engines))]

    def announce(self, epoch):
        ranks = LAYOUTS[self.kind][1]
        for number, (name, engine) in enumerate(zip(self.ids, self.engines, strict=True)):
            record = Member(
                name, epoch, engine.url, "right", ranks, self.kind, "HEALTHY", lane=number * ranks
            )
            members.announce(self.paths, record)


@pytest.fixture(scope="module", params=["embedded", "sglang"])
def house(request, checkpoints, tmp_path_factory):
    kind, folder = request.param, tmp_path_factory.mktemp(request.param)
    ranks = LAYOUTS[kind][1]
    config = job(checkpoints[0], tp=2).model_copy(update={"run_root": folder})
    args = {"tp_size": ranks} if kind == "sglang" else {}
    rollout = RolloutConfig(engine=kind, engine_args=args, start_timeout_s=300)

    def start(number):
        return start_engine(
            kind, checkpoints[0], host="127.0.0.1", token="right", rollout_config=rollout,
            dtype="float32", log_path=folder / f"engine-{number}.log", seed=number,
            python=SGLANG_PYTHON if kind == "sglang" else None,
        )  # fmt: skip

    # SGLang wants to be told, where there are fewer sockets than ranks.
    cores = "|".join(str(core % os.cpu_count()) for core in range(ranks))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_CPU_OMP_THREADS_BIND", cores)
        yield from _running(kind, start, folder, config, checkpoints)


def _running(kind, start, folder, config, checkpoints):
    count = LAYOUTS[kind][0]
    with ThreadPoolExecutor(count) as threads:  # an engine dies with the thread that started it
        engines = list(threads.map(start, range(count)))
        yield House(kind, engines, RunPaths(config.run_dir), config, checkpoints)
        for engine in engines:
            engine.stop()


@contextmanager
def trainer(house, epoch, timeout_s=60):
    house.announce(epoch)
    ranks = Ranks(2)
    ranks.call(
        sync_worker.open_publisher, config=house.config, ids=house.ids,
        bucket_bytes=SMALL_BUCKETS, timeout_s=timeout_s, lanes=True,
    )  # fmt: skip
    yield ranks
    ranks.call(sync_worker.close)
    ranks.close()


def publish(ranks, house, version, *, check=False):
    """Version v of the weights is checkpoint v modulo 3."""
    folder = house.checkpoints[version % 3]
    return ranks.call(sync_worker.publish, version=version, folder=folder, check=check)[0]


def logprobs_are_those_of(house, engine, checkpoint):
    import asyncio

    async def ask():
        async with engine.generation_client() as client:
            return await client.sample(prompt_of(7), 1, Sampling(1.0, 12, (EOS,)))

    found = asyncio.run(ask())
    expected = reference_logprobs(checkpoint, prompt_of(7), found.token_ids)
    return torch.tensor(found.logprobs).sub(expected).abs().max() <= 1e-4


def test_every_version_reaches_every_rank_of_every_engine_bit_for_bit(house):
    with trainer(house, "1") as ranks:
        for version in (0, 1, 2, 4):
            done = publish(ranks, house, version, check=True)
            assert (done["members"], done["fenced"], done["again"]) == (house.ids, [], False)
            assert done["verified"]["equal"]
            for engine in house.engines:
                assert engine.client().version() == version
                assert logprobs_are_those_of(house, engine, house.checkpoints[version % 3])
        publish(ranks, house, 5)  # without a check it is the same
        assert logprobs_are_those_of(house, house.engines[0], house.checkpoints[2])


def test_weights_of_a_trainer_that_follows_are_taken_although_the_first_one_vanished(house):
    version = Roster.read(house.paths).version
    with trainer(house, "1") as ranks:
        assert publish(ranks, house, version, check=True)["verified"]["equal"]
    with trainer(house, "1") as ranks:
        assert publish(ranks, house, version + 1, check=True)["verified"]["equal"]


@pytest.mark.parametrize("house", ["embedded"], indirect=True)
@pytest.mark.parametrize(("act", "timeout_s"), [(stop, 4), (kill, 30)])
def test_an_engine_that_stops_in_an_update_is_fenced_and_the_other_gets_all_of_it(
    house, act, timeout_s
):
    """The last test of a house: it has one engine less afterwards."""
    version = Roster.read(house.paths).version + 1
    with trainer(house, act.__name__, timeout_s) as ranks:
        assert publish(ranks, house, version)["members"] == house.ids
        with at_that_moment(ranks, house, "in", act):
            done = publish(ranks, house, version + 1)
        assert (done["members"], done["fenced"], done["again"]) == ([], ["rollout-1"], True)
        done = publish(ranks, house, version + 1, check=True)
        assert (done["members"], done["again"]) == (["rollout-0"], False)
        assert done["verified"]["equal"]
    if act is stop:
        for process in tree_of(house.engines[1]):
            process.send_signal(signal.SIGCONT)
