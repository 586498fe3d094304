"""What test_weights_sync runs on the ranks of a pool: a trainer that publishes checkpoints."""

import threading
import time

import torch
from megatron_worker import FixedWorld, _set_grid, _state


class PoolWorld(FixedWorld):
    """The ranks of a pool, with what a lane's link needs of them."""

    def bcast(self, value):
        import torch.distributed as dist

        box = [value]
        dist.broadcast_object_list(box)
        return box[0]

    def barrier(self):
        import torch.distributed as dist

        dist.barrier()


def open_publisher(config, ids, bucket_bytes, timeout_s, lanes=False):
    """Builds the model; on rank 0 a publisher for the members `ids` of the run of `config`.

    With `lanes` the engines are on the ranks' own GPUs, as it were.
    """
    import torch.distributed as dist

    from relax_hpc.comm.bucket import BucketPlan
    from relax_hpc.config.rollout import WeightsConfig
    from relax_hpc.engines.client import EngineClient
    from relax_hpc.engines.megatron.scorer import MegatronScorer
    from relax_hpc.paths import RunPaths
    from relax_hpc.weights.lanes import LaneHelper, LaneLink
    from relax_hpc.weights.publish import Publisher
    from relax_hpc.weights.staging import Giver

    _set_grid(config.actor)
    device = torch.device("cpu")
    world = PoolWorld(dist.get_rank(), dist.get_world_size())
    scorer = _state["scorer"] = MegatronScorer(config, world, device)
    specs = scorer.weight_specs()
    weights = WeightsConfig(bucket_bytes=bucket_bytes, timeout_s=timeout_s)
    link, gather = None, scorer.gather(bucket_bytes, to_all=lanes)
    _state["helper"] = Giver(gather)
    if lanes:
        link = LaneLink(world, BucketPlan.of(specs, bucket_bytes), device, weights)
        _state["helper"] = LaneHelper(link, gather)
    if dist.get_rank() == 0:
        _state["publisher"] = Publisher(
            weights,
            RunPaths(config.run_dir),
            lambda: ids,
            lambda member: EngineClient(member.url, member.token, timeout_s=timeout_s),
            specs,
            device=device,
            model_folder=config.model.path,
            link=link,
            gather=gather,
        )


def publish(version, folder, check):
    """Publishes a checkpoint as `version`; rank 0 tells what came of it."""
    import torch.distributed as dist

    from relax_hpc.engines.megatron import hf_names

    scorer = _state["scorer"]
    hf_names.load(scorer._chunks, folder)
    tensors = scorer.named_weights()
    if dist.get_rank():
        return _state["helper"].publish(version, tensors)
    published = _state["publisher"].publish(version, tensors, check=check)
    return published._asdict() | {"verified": published.verified and published.verified._asdict()}


def wrong_shape():
    """Makes the publisher announce one tensor with another shape than the engines have."""
    from relax_hpc.comm.bucket import BucketPlan

    publisher = _state.get("publisher")
    if publisher is None:
        return
    plan = publisher._buffers.plan
    [first, *rest] = plan.buckets[0]
    bent = first._replace(shape=(first.shape[1], first.shape[0]))
    publisher._buffers.plan = BucketPlan(((bent, *rest), *plan.buckets[1:]))


def hold(place, reached, released):
    """Makes the next publication stop at a place: it makes the file `reached` there, and goes on
    when `released` is there."""
    from relax_hpc.engines.client import EngineClient
    from relax_hpc.weights.staging import Outgoing

    owner, name = {
        "in": (Outgoing, "send"),  # when the first of its buckets has been sent
        "resuming": (EngineClient, "resume"),  # when all of them are in their places
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

    def resume(*args):
        stop()
        return plain(*args)

    setattr(owner, name, {"in": send, "resuming": resume}[place])


def close():
    _state.pop("helper", None)
    if publisher := _state.pop("publisher", None):
        publisher.close()
