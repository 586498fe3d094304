"""The functions that tests of the trainer run on ranks of a pool, and the batches they feed it."""

import gc
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import discounted
import numpy as np
import sequence_ratio
import surprise

from relax_hpc.algorithms.algorithm import algorithm_of
from relax_hpc.algorithms.composition import Objective, objective_of
from relax_hpc.config.run import RunConfig
from relax_hpc.roles.dealing.micro_batches import plan_micro_batches
from relax_hpc.schema import FinishReason, Trajectory

VOCAB = 128
_state = {}


class Output(NamedTuple):
    loss: object
    metrics: dict
    denominator: object = None


class FixedWorld:
    """The ranks of a pool; only its size and patience matter to a trainer."""

    timeout_s = 300

    def __init__(self, rank, size):
        self.rank, self.size = rank, size


def job(folder, *, tp=1, dp=1, budget=64, **tables):
    """A RunConfig; `tables` are merged into its sections."""
    tree = {
        "name": "test",
        "model": {"path": str(folder), "dtype": tables.pop("dtype", "float32")},
        "prompts": {"train": "unused"},
        "rollout": {"temperature": tables.pop("temperature", 1.0)},
        "actor": {
            "layout": {"tensor_parallel": tp, "data_parallel": dp} | tables.pop("layout", {}),
            "tokens_per_micro_batch": budget,
            "optimizer": {"lr": 1e-3, "clip_grad": 0.0} | tables.pop("optimizer", {}),
            "transformer": tables.pop("transformer", {}),
        }
        | tables.pop("actor", {}),
        "algorithm": tables.pop("algorithm", {}),
        "schedule": {"num_steps": 100} | tables.pop("schedule", {}),
    }
    assert not tables
    return RunConfig.model_validate(tree)


def trajectories(num, seed=0, longest=20):
    """Random ones, and advantages; some have a tool's tokens between those that were sampled."""
    rng = np.random.default_rng(seed)
    made = []
    for guid in range(num):
        prompt = int(rng.integers(2, 5))
        length = prompt + int(rng.integers(1, longest - 4))
        mask = np.zeros(length, np.uint8)
        mask[prompt:] = rng.random(length - prompt) < 0.8
        logprobs = np.where(mask, rng.normal(-3, 1, length), 0).astype(np.float32)
        made.append(
            Trajectory(
                guid=guid,
                sibling=0,
                prompt_index=guid,
                seed=0,
                token_ids=rng.integers(0, VOCAB, length).astype(np.int32),
                prompt_len=prompt,
                loss_mask=mask,
                columns={"rollout_logprobs": logprobs},
                version_runs=np.array([[prompt, 0]], np.int32),
                finish=FinishReason.STOP,
                reward=0.0,
            )
        )
    return made, rng.normal(size=num).astype(np.float32)


def num_tokens(rows):
    return int(sum(row.loss_mask.sum() for row in rows))


# What follows runs on the ranks.


def open_trainer(config):
    import torch
    import torch.distributed as dist

    from relax_hpc.roles.training.build import trainer_of

    _set_grid(config.actor.layout)
    world = FixedWorld(dist.get_rank(), dist.get_world_size())
    _state["config"] = config
    _state["trainer"] = trainer_of(config, world, torch.device("cpu"))


def _set_grid(layout):
    """Unmakes the groups of another grid."""
    grid = (
        layout.tensor_parallel, layout.pipeline_parallel, layout.virtual_pipeline,
        layout.context_parallel, layout.expert_parallel, layout.expert_tensor_parallel,
    )  # fmt: skip
    if _state.get("grid") != grid:  # making groups is slow
        leave_grid()
        _state["grid"] = grid


def leave_grid():
    """Unmakes all groups but that of all ranks; Megatron only forgets them, and their threads run.

    Who holds one still, holds a trainer that must not be used again.
    """
    import torch.distributed as dist
    from megatron.core import parallel_state as mpu

    _state.clear()
    mpu.destroy_model_parallel()
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    gc.collect()


def bench(task, work):
    """The figures of a `bench.train.Task` for one of its works."""
    import torch
    import torch.distributed as dist

    from relax_hpc.bench import train_rank

    leave_grid()
    world = FixedWorld(dist.get_rank(), dist.get_world_size())
    return train_rank.measure(task, work, world, torch.device("cpu"))


def surrogate():
    import torch

    def loss(logprobs, micro_batch):
        mask, old = micro_batch.loss_mask, micro_batch.columns["old_logprobs"]
        ratio = torch.where(mask, logprobs - old, 0.0).exp()
        value = -(ratio * micro_batch.columns["advantages"] * mask).sum()
        return Output(value, {"ratio": (ratio * mask).sum()})

    return loss


def poisoned():
    def loss(logprobs, micro_batch):
        return Output(logprobs.sum() * float("nan"), {})

    return loss


def exploding():
    """A finite loss whose gradient is not: sqrt at 0."""

    def loss(logprobs, micro_batch):
        return Output((logprobs - logprobs.detach()).square().sum().sqrt(), {})

    return loss


def of_parts(keys, *columns):
    """The loss of the parts that a job's keys name."""

    def made():
        return objective_of(algorithm_of(**keys()), frozenset(columns)).loss

    return made


LOSSES = {
    "discounted": of_parts(discounted.algorithm),
    "sequence_ratio": of_parts(sequence_ratio.algorithm),
    "surprise": of_parts(surprise.algorithm, "surprise"),
    "surrogate": surrogate, "poisoned": poisoned,
    "exploding": exploding,
}  # fmt: skip


def _shares(rows, num_portions=1):
    """(numbers of this rank's rows, micro-batches that index them) per portion."""
    trainer = _state["trainer"]
    load, shares = [0] * trainer.dp_size, []
    for portion in np.array_split(np.arange(len(rows)), num_portions):
        lengths = [len(rows[row].token_ids) for row in portion]
        budget = trainer._megatron.tokens_per_micro_batch
        plan = plan_micro_batches(
            lengths,
            num_ranks=trainer.dp_size,
            budget=budget,
            load=load,
            count_multiple_of=trainer._megatron.layout.micro_batches_multiple_of,
        )
        load = [
            before + sum(lengths[row] for batch in rank for row in batch)
            for before, rank in zip(load, plan, strict=True)
        ]
        shares.append((portion, plan[trainer.dp_rank]))
    return shares


def valued(rows, advantages):
    """The rows with what they are worth."""
    return [
        row.with_columns(advantages=np.asarray(worth, np.float32))
        for row, worth in zip(rows, advantages, strict=True)
    ]


def train(
    rows, advantages, num_steps=1, loss="surrogate", num_portions=1, tell_last=True, weights=None
):
    trainer = _state["trainer"]
    for _ in range(num_steps):
        shares = _shares(rows, num_portions)
        for number, (portion, micro_batches) in enumerate(shares, 1):
            chosen = valued([rows[row] for row in portion], advantages[portion])
            if weights is not None:  # of the tokens of each row; every row counts once
                one = np.ones((), np.float32)
                chosen = [
                    row.with_columns(weights=np.asarray(weights[place], np.float32), counts=one)
                    for place, row in zip(portion, chosen, strict=True)
                ]
            last = tell_last and number == len(shares)
            trainer.accumulate(chosen, micro_batches, Objective(LOSSES[loss]()), last=last)
        metrics = trainer.update()
    return metrics


def train_fails(rows, advantages):
    """Returns the message of the error that training ends with."""
    from relax_hpc.errors import TrainingError

    try:
        train(rows, advantages)
    except TrainingError as error:
        return str(error)
    raise AssertionError("it trained")


def engine_gap(rows, advantages, num_portions=1):
    """(what the trainer says before the update, its metrics)."""
    trainer = _state["trainer"]
    gaps = []
    update = trainer.update

    def and_measure():
        gaps.append(trainer.engine_gap())
        return update()

    with mock.patch.object(trainer, "update", and_measure):
        metrics = train(rows, advantages, num_portions=num_portions)
    return gaps[0], metrics


def check(rows, advantages, limit):
    """Returns the end of the comparison with the engines, before the first update."""
    from relax_hpc.errors import MismatchError
    from relax_hpc.roles.actor.logprob_check import LogprobCheck

    trainer = _state["trainer"]
    tree = _state["config"].model_dump()
    tree["weights"]["max_logprob_gap"] = limit
    compare, update = LogprobCheck(RunConfig.model_validate(tree), trainer), trainer.update

    def and_check():
        compare()
        return update()

    with mock.patch.object(trainer, "update", and_check):
        try:
            train(rows, advantages)
        except MismatchError as error:
            return str(error)
    return "it trained"


def warm_up():
    _state["trainer"].warm_up()


def sums_of_warm_up():
    """How often a warm-up sums gradients, and their norms, over ranks."""
    from unittest.mock import patch

    from relax_hpc.engines.megatron import updates
    from relax_hpc.engines.megatron.optimizer import distributed_adam

    with (
        patch.object(updates, "finalize_model_grads", wraps=updates.finalize_model_grads) as sums,
        patch.object(distributed_adam, "gradients", wraps=distributed_adam.gradients) as norms,
    ):
        _state["trainer"].warm_up()
    return sums.call_count, norms.call_count


def lend():
    """Bytes of gradient buffers before, while they are lent, and after."""

    def held():
        buffers = [b for c in trainer._wrapped for b in (*c.buffers, *c.expert_parallel_buffers)]
        return sum(buffer.grad_data.untyped_storage().nbytes() for buffer in buffers)

    trainer = _state["trainer"]
    sizes = [held()]
    trainer.lend()
    sizes.append(held())
    trainer.reclaim()
    return [*sizes, held()]


def logprobs(rows):
    """The rank's own rows -> {row: logprobs}."""
    ((_, micro_batches),) = _shares(rows)
    found = _state["trainer"].forward_logprobs(rows, micro_batches)
    return {row: found[row] for batch in micro_batches for row in batch}


def weights():
    return {
        name: tensor.float().numpy().copy() for name, tensor in _state["trainer"].named_weights()
    }


def gradients(rows, advantages):
    """This rank's part of the gradient of the mean loss, reduced over ranks."""
    from megatron.core.distributed import finalize_model_grads

    from relax_hpc.engines.megatron.hf.hf_stream import named_weights

    trainer = _state["trainer"]
    ((_, micro_batches),) = _shares(rows)
    trainer.accumulate(valued(rows, advantages), micro_batches, Objective(surrogate()))
    # The whole buffers instead of a share for each data-parallel rank.
    finalize_model_grads(trainer._wrapped, force_all_reduce=True)
    stream = named_weights(trainer._chunks, value_of=lambda parameter: parameter.main_grad)
    return {name: gradient.numpy() / num_tokens(rows) for name, gradient in stream}


def adam():
    """(step counts, sum of |first moments|) of this rank's part."""
    states = [
        state
        for part in _state["trainer"]._optimizer.chained_optimizers
        for state in part.optimizer.state.values()
    ]
    return {float(s["step"]) for s in states}, sum(float(s["exp_avg"].abs().sum()) for s in states)


def costs():
    return _state["trainer"].costs


def skip():
    return _state["trainer"].skip


def micro_batches_of(rows, num_portions):
    """(guid, sibling) of every micro-batch of this rank's step."""
    return [
        [(rows[portion[i]].guid, rows[portion[i]].sibling) for i in batch]
        for portion, micro_batches in _shares(rows, num_portions)
        for batch in micro_batches
    ]


def break_embedding(token):
    import torch

    for chunk in _state["trainer"]._chunks:
        if chunk.pre_process:
            with torch.no_grad():
                chunk.embedding.word_embeddings.weight[token] = float("nan")


def gradient_types():
    """Types of this rank's gradient buffers."""
    return {
        str(parameter.main_grad.dtype)
        for chunk in _state["trainer"]._wrapped
        for parameter in chunk.parameters()
    }


def moment_types():
    """Types of Adam's moments on this rank."""
    return {
        str(state[key].dtype)
        for part in _state["trainer"]._optimizer.chained_optimizers
        for state in part.optimizer.state.values()
        for key in ("exp_avg", "exp_avg_sq")
    }


def kept_bytes():
    """(weights, gradients, main parameters and moments on the device) of this rank."""
    trainer = _state["trainer"]
    weights = [p for chunk in trainer._chunks for p in chunk.parameters()]
    there, optimizer = {w.untyped_storage().data_ptr() for w in weights}, []
    for part in trainer._optimizer.chained_optimizers:
        for main, state in part.optimizer.state.items():
            if main not in part.optimizer._far:
                optimizer += [state["exp_avg"], state["exp_avg_sq"], main]
    own = [each for each in optimizer if each.untyped_storage().data_ptr() not in there]
    gradients = [w.main_grad for w in weights if w.requires_grad]
    return tuple(sum(each.nbytes for each in kind) for kind in (weights, gradients, own))


def save(folder: Path):
    _state["trainer"].save(folder)
    return sorted(path.name for path in folder.iterdir())


def load(folder: Path):
    _state["trainer"].load(folder)
    return _state["trainer"].step


def _small_chunks(module):
    """Several, the last one short."""
    return mock.patch.object(module, "_CHUNK_BYTES", 3 * 2 * VOCAB)


def packed_gradients(folder, documents, upstream, context_parallel=False, transformer=None):
    """Logprobs of all tokens, and the gradient of their sum times `upstream`, by HF's loading.

    With context parallelism every rank computes its chunks, and the gradients are summed.
    """
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state as mpu
    from megatron.core import tensor_parallel

    from relax_hpc.engines.megatron import cpu, model
    from relax_hpc.engines.megatron import transformer as transformers
    from relax_hpc.engines.megatron.attention import choice, packed_attention
    from relax_hpc.engines.megatron.attention.context_parallel import gather_parts, own_part
    from relax_hpc.engines.megatron.hf import hf_weights
    from relax_hpc.models import registry

    cpu.install()
    size = dist.get_world_size() if context_parallel else 1
    leave_grid()
    mpu.initialize_model_parallel(context_parallel_size=size)
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    device = torch.device("cpu")
    shape = registry.read_architecture(folder)
    made = transformers.transformer_config(
        job(folder, transformer=transformer or {}).actor, shape, "float32"
    )
    (gpt,) = model.build(made, shape, device, choice.choose("auto", device, torch.float32))
    hf_weights.load([gpt], folder)
    ids = torch.from_numpy(np.concatenate(documents).astype(np.int64))
    lengths = [len(document) for document in documents]
    positions = torch.cat([torch.arange(length) for length in lengths])
    group = mpu.get_context_parallel_group() if size > 1 else None
    rows = packed_attention.PackedRows.of(lengths, device, group)

    def mine(values):
        return own_part(values, group) if group else values

    hidden = gpt(mine(ids)[None], mine(positions)[None], None, packed_seq_params=rows)
    values, _ = gpt.logprobs(hidden, mine(ids.roll(-1)), temperature=1.0)
    values = gather_parts(values, group) if group else values
    (values * torch.from_numpy(upstream)).sum().backward()
    gradients = {}
    for name, parameter in gpt.named_parameters():
        if group:
            dist.all_reduce(parameter.grad, group=group)
        gradients[name] = parameter.grad.numpy().copy()
    leave_grid()
    return values.detach().numpy(), gradients


def hidden_logprobs(hidden, weight, targets, upstream, kept_gib=0.0, entropy_upstream=None):
    """Logprobs, entropy, the summed gradient of `hidden` and that of this rank's weight slice."""
    import torch
    import torch.distributed as dist

    from relax_hpc.engines.megatron.layers import logprobs as module

    group = dist.group.WORLD
    slice_ = torch.from_numpy(weight).chunk(group.size())[group.rank()].clone().requires_grad_()
    hidden = torch.from_numpy(hidden).requires_grad_()
    with _small_chunks(module):
        values, entropy = module.hidden_logprobs(
            hidden, slice_, torch.from_numpy(targets), temperature=0.7, group=group,
            kept_gib=kept_gib, entropy_gradient=entropy_upstream is not None,
        )  # fmt: skip
        assert entropy.requires_grad is (entropy_upstream is not None)
        loss = (values * torch.from_numpy(upstream)).sum()
        if entropy_upstream is not None:
            loss = loss + (entropy * torch.from_numpy(entropy_upstream)).sum()
        loss.backward()
    dist.all_reduce(hidden.grad)
    parts = (values, entropy, hidden.grad, slice_.grad)
    return tuple(part.detach().numpy() for part in parts)


def balance(logits, scores, chosen, documents, trained, weights, experts_per_token):
    """The three losses of `engines.megatron.balance`, as they weigh and as they are measured, and
    the gradients of two of them."""
    import torch
    import torch.distributed as dist

    from relax_hpc.engines.megatron.attention import balance as module

    of = module.Documents(*map(torch.tensor, (documents, trained, weights)))
    found = []
    for make in (module.micro_batch_groups, module.document_groups):
        given = torch.tensor(scores, requires_grad=True)
        groups = make(given, torch.tensor(chosen), of, dist.group.WORLD)
        loss = module.balance_loss(groups, experts_per_token)
        loss.weighted.backward()
        found.append((*map(float, loss), given.grad.tolist()))
    z = module.z_loss(torch.tensor(logits), of, dist.group.WORLD)
    return *found, tuple(map(float, z))


def expert_biases():
    """[layers of this rank, experts]."""
    from relax_hpc.engines.megatron.moe.router import PackedRouter

    modules = (m for chunk in _state["trainer"]._chunks for m in chunk.modules())
    return [m.expert_bias.tolist() for m in modules if isinstance(m, PackedRouter)]
