"""The functions that `houses` runs on ranks of a pool: a trainer that publishes checkpoints."""

import threading
import time
from functools import partial

import torch.distributed as dist
from worker import CPU, PoolWorld, _state, set_grid

from relax_hpc.config.rollout import WeightsConfig
from relax_hpc.inference.client import EngineClient
from relax_hpc.inference.members import EngineRegistry
from relax_hpc.runtime.comm.bucket import BucketPlan
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.trainer.megatron import hf_weights
from relax_hpc.trainer.megatron.scorer import MegatronScorer
from relax_hpc.weights.publish import Publisher
from relax_hpc.weights.same_gpu import LaneLink, give_lane
from relax_hpc.weights.snapshot import SnapshotWriter
from relax_hpc.weights.staging import Outgoing, give_gathered
from relax_hpc.weights.transport import TrainerRanks, call_timeout_s


def open_publisher(
    config, ids, bucket_bytes, timeout_s, lanes=0, bend=None, waits_for_loads=True, frozen=(),
    **control,
):  # fmt: skip
    """Builds the model; on rank 0 a publisher for the members `ids` of the run of `config`.

    Of the engines, `lanes` are on each rank's own GPU, as it were. With `bend` the first tensor is
    announced by another "shape" or "name" than engines know. `control` is for clients. `frozen`
    parts do not learn.
    """
    set_grid(config.actor.layout)
    world = PoolWorld()
    scorer = _state["scorer"] = MegatronScorer(config.model, config.actor, world, CPU)
    scorer._frozen = frozen
    specs, paths = scorer.weight_specs(), RunPaths(config.run_dir)
    weights = WeightsConfig(advanced={"bucket_bytes": bucket_bytes, "timeout_s": timeout_s})
    plan = bent(BucketPlan.of(specs, bucket_bytes), bend)
    link, gather = None, scorer.gather(bucket_bytes, to_all=lanes > 0)
    others = {"collective": partial(give_gathered, gather)}
    if lanes:
        link = LaneLink(world, plan, CPU, weights, lanes)
        others = {"lanes": partial(give_lane, link, gather)}
    snapshots = SnapshotWriter(paths.weights, specs, world, config.model.path)
    ranks = _state["ranks"] = TrainerRanks(world, snapshots, others)
    if dist.get_rank() == 0:
        registry = EngineRegistry(
            paths,
            lambda: ids,
            lambda member: EngineClient(
                member.url, "right", timeout_s=call_timeout_s(timeout_s), **control
            ),
        )
        _state["publisher"] = Publisher(
            weights, registry, plan, device=CPU, ranks=ranks, link=link, gather=gather,
            waits_for_loads=waits_for_loads,
        )  # fmt: skip


def bent(plan, how):
    """The plan with another first tensor, of as many bytes."""
    [[first, *rest], *others] = plan.buckets
    if how == "shape":
        first = first._replace(shape=first.shape[::-1])
    if how == "name":
        first = first._replace(name="model.nothing.weight")
    return type(plan)(((first, *rest), *others))


def publish(version, folder, check):
    """Publishes a checkpoint as `version`; rank 0 tells what came of it.

    Once, though members may be left for a further publication.
    """
    scorer = _state["scorer"]
    hf_weights.load(scorer._chunks, folder)
    tensors = scorer.stream_weights()
    if dist.get_rank():
        return _state["ranks"].publish(tensors)
    published = _state["publisher"].publish(version, tensors, check=check)
    return published._asdict() | {"verified": published.verified and published.verified._asdict()}


def wait_for_loads():
    """On rank 0: whether somebody lacks the version; (id, version, equal) of loads that ended."""
    if publisher := _state.get("publisher"):
        lacks = publisher.wait_for_loads()
        return lacks, [
            (ended.member.id, ended.version, ended.verified and ended.verified.equal)
            for ended in publisher.take_ended_loads()
        ]
    return None


def hold(place, reached, released, url=None):
    """Makes the next publication stop at a place: it makes the file `reached` there, and goes on
    when `released` is there. With `url` only what is done with that engine."""
    owner, name = {
        "in": (Outgoing, "send"),  # when the first of its buckets has been sent
        "resuming": (EngineClient, "resume"),  # when all of them are in their places
        "loading": (EngineClient, "update_weights_from_disk"),  # when they stand still
    }[place]
    plain, lock = getattr(owner, name), threading.Lock()

    def stop():
        with lock:
            reached.touch()
            deadline = time.monotonic() + 60
            while not released.exists():
                assert time.monotonic() < deadline, "nobody let it go on"
                time.sleep(0.01)
            setattr(owner, name, plain)

    def send(*args):
        for index, transfer in enumerate(plain(*args)):
            if index == 1:
                stop()
            yield transfer

    def call(client, *args):
        if url in (None, client.url):
            stop()
        return plain(client, *args)

    setattr(owner, name, send if place == "in" else call)


def close():
    _state.pop("ranks", None)
    if publisher := _state.pop("publisher", None):
        publisher.close()
