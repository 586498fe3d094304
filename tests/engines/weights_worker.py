"""The functions that test_megatron_weights runs on ranks of a pool."""

from contextlib import contextmanager
from typing import NamedTuple
from unittest import mock

from megatron_worker import _set_grid, _state


class Loaded(NamedTuple):
    num_read: int
    """Elements read of the checkpoint."""
    num_held: int
    """Elements of this rank's parameters."""
    num_opened: dict[str, int]
    """How often each file was opened."""


def load(config):
    """Builds the model, without a trainer, and loads model.path."""
    import torch
    from megatron.core import tensor_parallel

    from relax_hpc.engines.megatron import cpu, grid, model
    from relax_hpc.engines.megatron import transformer as transformers
    from relax_hpc.engines.megatron.attention import choice
    from relax_hpc.engines.megatron.hf import hf_weights
    from relax_hpc.models import registry

    cpu.install()
    shape = registry.read_architecture(config.model.path)
    made = transformers.transformer_config(config.actor, shape, config.model.dtype)
    _set_grid(config.actor.layout)
    grid.initialize(config.actor.layout)
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    device = torch.device("cpu")
    chunks = model.build(made, shape, device, choice.choose("auto", device, made.params_dtype))
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    for parameter in parameters:
        parameter.data.fill_(float("nan"))
    with _counted() as (read, opened):
        hf_weights.load(chunks, config.model.path)
    _state["chunks"] = chunks
    return Loaded(sum(read), sum(p.numel() for p in parameters), dict(opened))


@contextmanager
def _counted():
    from collections import Counter

    from relax_hpc.models import hf_files

    read, opened = [], Counter()
    safe_open, read_part = hf_files.safe_open, hf_files.HfFiles.read

    def counted_open(path, *args, **kwargs):
        opened[path.name] += 1
        return safe_open(path, *args, **kwargs)

    def counted_read(*args):
        part = read_part(*args)
        read.append(part.numel())
        return part

    with (
        mock.patch.object(hf_files, "safe_open", counted_open),
        mock.patch.object(hf_files.HfFiles, "read", counted_read),
    ):
        yield read, opened


def export(**options):
    """[(name, weight)] as this rank is given them; how many collectives that took."""
    import torch.distributed as dist

    from relax_hpc.engines.megatron.hf import hf_stream

    calls = []

    def counted(name):
        collective = getattr(dist, name)

        def call(*args, **kwargs):
            calls.append(name)
            return collective(*args, **kwargs)

        return mock.patch.object(dist, name, call)

    with counted("broadcast"), counted("all_gather_into_tensor"), counted("all_gather"):
        stream = list(hf_stream.named_weights(_state["chunks"], **options))
    return [(name, tensor.numpy().copy()) for name, tensor in stream], sorted(calls)


def gathered(bucket_bytes, to_all):
    """Returns the stream's specs, and what this rank is brought of it, twice: every weight of the
    second version is doubled."""
    import torch
    import torch.distributed as dist

    from relax_hpc.comm.bucket import BucketPlan, views
    from relax_hpc.engines.megatron.hf import hf_stream
    from relax_hpc.engines.megatron.hf.gather import HfGather

    chunks = _state["chunks"]
    plan = BucketPlan.of(hf_stream.weight_specs(chunks), bucket_bytes)
    gather, versions = HfGather(chunks, plan, to_all=to_all), []
    for factor in (2, 0.5):
        gather.begin()
        if dist.get_rank() and not to_all:
            gather.give()
        else:
            found = []
            for index, bucket in enumerate(plan.buckets):
                flat = torch.empty(plan.sizes[index], dtype=torch.uint8)
                gather.fill(index, flat)
                found += [tensor.numpy().copy() for tensor in views(flat, bucket)]
            versions.append(found)
        with torch.no_grad():
            for parameter in {id(p): p for chunk in chunks for p in chunk.parameters()}.values():
                parameter *= factor
    specs = [(spec.name, spec.shape) for bucket in plan.buckets for spec in bucket]
    return specs, versions


def export_squares():
    """Other values than the weights, of another type."""
    stream = export(value_of=lambda parameter: parameter.detach().double() ** 2)
    return stream[0]


def save_hf(folder, source, writer):
    """Every rank takes part, rank `writer` writes."""
    import torch.distributed as dist

    from relax_hpc.checkpoints.export import save_hf
    from relax_hpc.engines.megatron.hf.hf_stream import named_weights

    stream = named_weights(_state["chunks"], bucket_bytes=1000)
    save_hf(folder, stream, source, write=dist.get_rank() == writer, shard_bytes=20_000)
