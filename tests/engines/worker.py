"""The functions that ranks of a pool run: a trainer is opened, then asked and looked into."""

import gc
from collections import Counter
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core import tensor_parallel
from megatron.core.distributed import finalize_model_grads
from trainers import VOCAB, job, num_tokens, valued

from relax_hpc.algorithms.aggregation import row_weights
from relax_hpc.algorithms.algorithm import algorithm_of
from relax_hpc.algorithms.composition import Objective, cross_entropy, objective_of, value_loss
from relax_hpc.algorithms.part import LossOutput
from relax_hpc.errors import TrainingError
from relax_hpc.roles.actor.loop import Reference
from relax_hpc.roles.dealing.micro_batches import own_rows, plan_micro_batches
from relax_hpc.roles.dealing.portions import split_groups
from relax_hpc.roles.sft import loop as sft
from relax_hpc.roles.sft.loop import deal
from relax_hpc.roles.training.build import trainer_of
from relax_hpc.runtime.comm.bucket import BucketPlan, views
from relax_hpc.trainer.megatron import adam as adamw
from relax_hpc.trainer.megatron import cpu, grid, hf_stream, hf_weights, model, packing, updates
from relax_hpc.trainer.megatron import features as host_memory
from relax_hpc.trainer.megatron import settings as transformers
from relax_hpc.trainer.megatron.critic import MegatronCritic
from relax_hpc.trainer.megatron.grid import own_part, whole
from relax_hpc.trainer.megatron.layers import attention, attention_kernels, router
from relax_hpc.trainer.megatron.layers import logprobs as heads
from relax_hpc.trainer.megatron.scorer import MegatronScorer
from relax_hpc.trainer.models import registry
from relax_hpc.trainer.models.towers import SoundTower as Ears

CPU = torch.device("cpu")
_state = {}


class PoolWorld:
    """The ranks of a pool, by the group that they have anyway."""

    timeout_s = 300

    def __init__(self):
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def bcast(self, value):
        box = [value]
        dist.broadcast_object_list(box)
        return box[0]

    def allgather(self, value):
        values = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def barrier(self):
        dist.barrier()


# Trainers are opened.


def open_trainer(config):
    trainer = _opened(config, lambda: trainer_of(config, PoolWorld(), CPU))
    if trainer._encoder is None:
        return
    _state["read"], _state["encoded"], _state["places"] = [], Counter(), set()
    trainer.see_by(_pixels)
    encode = trainer._encoder.encode

    def placed(*args, **given):
        if features := encode(*args, **given):
            _state["places"].add(features.is_in_host_memory)
        return features

    trainer._encoder.encode = placed
    for tower in {encoder.tower for encoder in trainer._encoder._encoders.values()}:
        tower.register_forward_pre_hook(_note)


def open_critic(config):
    given = config.model, config.actor, config.actor.optimizer
    how = {"num_steps": config.num_steps, "seed": config.seed}
    _opened(config, lambda: MegatronCritic(*given, PoolWorld(), CPU, **how))


def open_scorer():
    """A model that only scores, beside the trainer, of the same job; the gradients it holds."""
    config = _state["config"]
    scorer = _state["scorer"] = MegatronScorer(
        config.model, config.actor, PoolWorld(), CPU, temperature=config.temperature
    )
    scorer.see_by(_pixels)
    parameters = [p for chunk in scorer._chunks for p in chunk.parameters()]
    return [p.grad for p in parameters if p.grad is not None or hasattr(p, "main_grad")]


def open_reference():
    _state["reference"] = Reference(_state["trainer"], None, refresh_every=1)


def _opened(config, make):
    set_grid(config.actor.layout)
    _state["config"], _state["trainer"] = config, make()
    return _state["trainer"]


def set_grid(layout):
    """Unmakes the groups of another grid."""
    sizes = layout.model_dump(exclude={"data_parallel"})
    if _state.get("grid") != sizes:  # making groups is slow
        leave_grid()
        _state["grid"] = sizes


def leave_grid():
    """Unmakes all groups but that of all ranks; Megatron only forgets them, and their threads run.

    Who holds one still, holds a trainer that must not be used again.
    """
    _state.clear()
    mpu.destroy_model_parallel()
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    gc.collect()


def _pixels(wanted):
    from seen_rows import pixels_of  # most ranks see nothing

    _state["read"] += [row.media[medium].canonical_xxh3 for row, medium in wanted]
    return [pixels_of(row.media[medium]) for row, medium in wanted]


def _note(tower, given):
    """Counts what a tower is given: patches [n, ...], or a spectrum [128, n]."""
    what = "heard" if isinstance(tower, Ears) else "seen"
    _state["encoded"][what, torch.is_grad_enabled()] += given[0].shape[what == "heard"]


# They train.


def surrogate():
    def loss(logprobs, micro_batch):
        mask, old = micro_batch.loss_mask, micro_batch.columns["old_logprobs"]
        ratio = torch.where(mask, logprobs - old, 0.0).exp()
        value = -(ratio * micro_batch.columns["advantages"] * mask).sum()
        return LossOutput(value, {"ratio": (ratio * mask).sum()})

    return loss


def _deal(lengths, load=None):
    """The micro-batches of every rank, that index these rows."""
    megatron = _state["trainer"]._megatron
    return plan_micro_batches(
        lengths,
        num_ranks=megatron.layout.data_parallel,
        budget=megatron.tokens_per_micro_batch,
        load=load,
        count_multiple_of=megatron.layout.micro_batches_multiple_of,
    )


def _shares(rows, num_portions=1):
    """(numbers of this rank's rows, micro-batches that index them) per portion."""
    trainer = _state["trainer"]
    load, shares = [0] * trainer._megatron.layout.data_parallel, []
    for portion in np.array_split(np.arange(len(rows)), num_portions):
        lengths = [len(rows[row].token_ids) for row in portion]
        plan = _deal(lengths, load)
        load = [
            before + sum(lengths[row] for batch in rank for row in batch)
            for before, rank in zip(load, plan, strict=True)
        ]
        shares.append((portion, plan[trainer.dp_rank]))
    return shares


def _own(rows):
    """This rank's micro-batches of all rows."""
    ((_, micro_batches),) = _shares(rows)
    return micro_batches


def _of_own(rows, compute):
    """The rank's own rows -> {row: what is computed of it}."""
    micro_batches = _own(rows)
    found = compute(rows, micro_batches)
    return {row: found[row] for batch in micro_batches for row in batch}


def train(rows, advantages, num_steps=1, num_portions=1, tell_last=True):
    trainer = _state["trainer"]
    for _ in range(num_steps):
        shares = _shares(rows, num_portions)
        for number, (portion, micro_batches) in enumerate(shares, 1):
            chosen = valued([rows[row] for row in portion], advantages[portion])
            last = tell_last and number == len(shares)
            trainer.accumulate(chosen, micro_batches, Objective(surrogate()), last=last)
        metrics = trainer.update()
    return metrics


def train_fails(rows, advantages):
    """Returns the message of the error that training ends with."""
    try:
        train(rows, advantages)
    except TrainingError as error:
        return str(error)
    raise AssertionError("it trained")


def engine_gap(rows, advantages, num_portions=1):
    """(what the trainer says before the update, its metrics)."""
    gaps, trainer = [], _state["trainer"]
    update = trainer.update

    def looked():
        gaps.append(trainer.engine_gap())
        return update()

    with mock.patch.object(trainer, "update", looked):
        metrics = train(rows, advantages, num_portions=num_portions)
    return gaps[0], metrics


def train_algorithms(rows, advantages, cases, num_portions=1):
    """(metrics, weights) after a step of each case of [algorithm], one after the other."""
    return [(step(rows, advantages, keys, num_portions), weights()) for keys in cases]


def step(rows, advantages, keys, num_portions=1, keeps_entropy=False):
    """The metrics of one step of an algorithm."""
    trainer, algorithm = _state["trainer"], algorithm_of(**keys)
    trainer._epochs_per_step = algorithm.epochs_per_step
    objective = objective_of(algorithm)
    if not keeps_entropy:
        trainer._notes.clear()
    groups = np.array([row.guid for row in rows])
    if algorithm.mini_batches > 1:  # they are of a whole batch
        num_portions = 1
    portions = np.array_split(np.arange(len(rows)), num_portions)
    for number, portion in enumerate(portions, 1):
        parts = split_groups(groups[portion], algorithm.mini_batches)
        dealt = [_dealt(rows, portion[part]) for part in parts]
        mine, micro_batches = own_rows([batch for part in dealt for batch in part])
        trainer.accumulate(
            _weighed(rows, groups, algorithm, portion, advantages)[mine].tolist(),
            micro_batches,
            objective,
            last=number == num_portions,
            mini_batches=[len(part) for part in dealt] if len(dealt) > 1 else [],
        )
    return trainer.update()


def _weighed(rows, groups, algorithm, portion, advantages):
    """[rows], those of the portion with what is known of them before they are read."""
    found = np.empty(len(rows), object)
    lengths = np.array([len(rows[row].token_ids) - rows[row].prompt_len for row in portion])
    weighed = row_weights(algorithm.aggregation, lengths, groups[portion], 16)
    for place, row in enumerate(portion):
        columns = {"advantages": advantages[row]}
        if weighed is not None:
            columns |= {name: of_row[place] for name, of_row in weighed._asdict().items()}
        values = {name: np.asarray(value, np.float32) for name, value in columns.items()}
        found[row] = rows[row].with_columns(**values)
    return found


def _dealt(rows, numbers):
    """Row numbers of this rank's micro-batches."""
    plan = _deal([len(rows[row].token_ids) for row in numbers])
    return [numbers[batch].tolist() for batch in plan[_state["trainer"].dp_rank]]


def learn(rows, num_steps=1, num_portions=1, clip=0.0):
    """Trains a critic on rows' rewards; `values` are what it held before each step."""
    trainer, objective = _state["trainer"], Objective(value_loss(clip=clip, gamma=1.0, lam=1.0))
    for _ in range(num_steps):
        shares = _shares(rows, num_portions)
        for number, (portion, micro_batches) in enumerate(shares, 1):
            chosen = [
                row.with_columns(
                    advantages=np.float32(row.reward), values=np.zeros(len(row.token_ids), "f4")
                )
                for row in (rows[number] for number in portion)
            ]
            trainer.accumulate(chosen, micro_batches, objective, last=number == len(shares))
        metrics = trainer.update()
    return metrics


def fine_tune(documents):
    """Micro-batches of a step on documents, and what it reported."""
    return _accumulate(documents), _state["trainer"].update()


def heldout_loss(documents):
    return sft.heldout_loss(PoolWorld(), _state["trainer"], _share(documents))


def _share(documents):
    trainer = _state["trainer"]
    return deal(trainer._megatron, documents)[trainer.dp_rank]


def _accumulate(documents):
    share = _share(documents)
    _state["trainer"].accumulate(share.rows, share.micro_batches, Objective(cross_entropy))
    return len(share.micro_batches)


def warm_up():
    _state["trainer"].warm_up()


def sums_of_warm_up():
    """How often a warm-up sums gradients, and their norms, over ranks."""
    with (
        mock.patch.object(updates, "finalize_model_grads", wraps=finalize_model_grads) as sums,
        mock.patch.object(adamw, "gradients", wraps=adamw.gradients) as norms,
    ):
        _state["trainer"].warm_up()
    return sums.call_count, norms.call_count


# They are asked.


def logprobs(rows):
    """The rank's own rows -> {row: logprobs}; of a critic {row: values}."""
    return _of_own(rows, _state["trainer"].forward_logprobs)


def kept_logprobs(rows):
    """Does as `logprobs` under the weights that were kept."""
    return _of_own(rows, lambda *given: _state["trainer"].forward_kept_logprobs("kept", *given))


def keep(folder=None):
    """Keeps the weights of now, or those of a folder."""
    _state["trainer"].keep("kept", folder)


def ref_logprobs(rows):
    return _of_own(
        rows, lambda *given: [r.columns["ref_logprobs"] for r in _state["reference"].fill(*given)]
    )


def refresh():
    _state["reference"].end_step(_state["trainer"].step)


def scorer_logprobs(rows, micro_batches):
    return _state["scorer"].forward_logprobs(rows, micro_batches)


def weights():
    return {
        name: tensor.float().numpy().copy() for name, tensor in _state["trainer"].stream_weights()
    }


def gradients(rows, advantages):
    """The gradient of the mean loss over the tokens of all ranks, by Hugging Face names."""
    trainer = _state["trainer"]
    trainer.accumulate(valued(rows, advantages), _own(rows), Objective(surrogate()))
    return _mean_gradients(num_tokens(rows))


def gradients_of_documents(documents):
    _accumulate(documents)
    return _mean_gradients(sum(document.num_trained for document in documents))


def _mean_gradients(count):
    trainer = _state["trainer"]
    # The whole buffers instead of a share for each data-parallel rank.
    finalize_model_grads(trainer._wrapped, force_all_reduce=True)
    with mock.patch.object(hf_stream, "merge_adapter", lambda parameter: parameter.main_grad):
        return {
            name: gradient.numpy() / count
            for name, gradient in hf_stream.stream_weights(trainer._chunks)
        }


def costs():
    return _state["trainer"].costs


def skip():
    return _state["trainer"].skip


def save(folder: Path):
    """Writes a checkpoint into `folder`, made if missing."""
    folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    part = _state["trainer"].checkpoint_part(copy=False)
    part.write(folder)
    dist.barrier()
    if dist.get_rank() == 0:
        part.write_names(folder, timeout_s=0.0)
    dist.barrier()
    return sorted(path.name for path in folder.iterdir())


def load(folder: Path):
    _state["trainer"].load(folder)
    return _state["trainer"].step


def gathered(bucket_bytes, again=False):
    """(specs, what rank 0 is brought of the weights, bucket by bucket, fixed buckets left out)."""
    trainer = _state["trainer"]
    specs = trainer.weight_specs()
    plan = BucketPlan.of(specs, bucket_bytes)
    if not again:
        _state["gather"] = trainer.gather(bucket_bytes)
        _state["flat"] = [torch.empty(size, dtype=torch.uint8) for size in plan.sizes]
    gather = _state["gather"]
    gather.begin()
    if dist.get_rank():
        gather.give(plan.fixed)
        return specs, {}
    found = {}
    for index, bucket in enumerate(plan.buckets):
        if index not in plan.fixed:
            flat = _state["flat"][index]
            gather.fill(index, flat)
            for spec, tensor in zip(bucket, views(flat, bucket), strict=True):
                found[spec.name] = tensor.float().numpy().copy()
    return specs, found


def lend():
    """Bytes of gradient buffers before, while they are lent, and after."""

    def held():
        return sum(buffer.grad_data.untyped_storage().nbytes() for buffer in _buffers())

    sizes = [held()]
    _state["trainer"].lend()
    sizes.append(held())
    _state["trainer"].reclaim()
    return [*sizes, held()]


# They are looked into.


def _buffers():
    for chunk in _state["trainer"]._wrapped:
        yield from (*chunk.buffers, *chunk.expert_parallel_buffers)


def _parameters():
    return [p for chunk in _state["trainer"]._chunks for p in chunk.parameters()]


def optimizers():
    return [part.optimizer for part in _state["trainer"]._optimizer.chained_optimizers]


def mains():
    """This rank's shares of main parameters."""
    return [p for each in optimizers() for group in each.param_groups for p in group["params"]]


def moments():
    """What Adam knows of this rank's shares."""
    return [state for optimizer in optimizers() for state in optimizer.state.values()]


def moment_types():
    """Types of Adam's moments on this rank."""
    return {str(state[key].dtype) for state in moments() for key in ("exp_avg", "exp_avg_sq")}


def held():
    """Elements of gradient buffers, and of what Adam has, on this rank."""
    return (
        sum(buffer.grad_data.numel() for buffer in _buffers()),
        sum(main.numel() for main in mains()),
    )


def kept_bytes():
    """(weights, gradients, main parameters and moments on the device) of this rank."""
    weights = _parameters()
    there, optimizer = {w.untyped_storage().data_ptr() for w in weights}, []
    for each in optimizers():
        for main, state in each.state.items():
            if main not in each._far:
                optimizer += [state["exp_avg"], state["exp_avg_sq"], main]
    own = [each for each in optimizer if each.untyped_storage().data_ptr() not in there]
    gradients = [w.main_grad for w in weights if w.requires_grad]
    return tuple(sum(each.nbytes for each in kind) for kind in (weights, gradients, own))


def micro_batches_of(rows, num_portions):
    """(guid, sibling) of every micro-batch of this rank's step."""
    return [
        [(rows[portion[i]].guid, rows[portion[i]].sibling) for i in batch]
        for portion, micro_batches in _shares(rows, num_portions)
        for batch in micro_batches
    ]


def break_embedding(token):
    for chunk in _state["trainer"]._chunks:
        if chunk.pre_process:
            with torch.no_grad():
                chunk.embedding.word_embeddings.weight[token] = float("nan")


def expert_biases():
    """[layers of this rank, experts]."""
    modules = (m for chunk in _state["trainer"]._chunks for m in chunk.modules())
    return [m.expert_bias.tolist() for m in modules if isinstance(m, router.PackedRouter)]


def read():
    """Numbers of the media whose pixels this rank has read since it was opened."""
    return [int.from_bytes(digest, "little") for digest in _state["read"]]


def encoded():
    """Patches, and mel frames, that went through this rank's towers since it was opened: [what is
    seen, heard], without and then with a graph."""
    return [[_state["encoded"][what, graph] for what in ("seen", "heard")] for graph in (0, 1)]


def places():
    """Whether features were in host memory, of all that this rank had."""
    return _state["places"]


def exchange_few_rows():
    host_memory._GATHERED_BYTES = 10_000


def media_of_micro_batches(rows):
    """How many media there are in each micro-batch of this rank."""
    return [sum(len(rows[row].media) for row in batch) for batch in _own(rows)]


# A model without a trainer, and its layers.


def _build(actor, folder, dtype):
    cpu.install()
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    shape = registry.read_architecture(folder)
    made = transformers.transformer_config(actor, shape, dtype)
    kernels = attention_kernels.choose("auto", CPU, made.params_dtype)
    return model.build(made, shape, CPU, kernels)


def load_model(config):
    """Builds the model, without a trainer, and loads model.path."""
    set_grid(config.actor.layout)
    grid.initialize(config.actor.layout)
    chunks = _state["chunks"] = _build(config.actor, config.model.path, config.model.dtype)
    for parameter in (each for chunk in chunks for each in chunk.parameters()):
        parameter.data.fill_(float("nan"))
    hf_weights.load(chunks, config.model.path)


def export():
    """[(name, weight)] as this rank is given them."""
    return [(n, t.numpy().copy()) for n, t in hf_stream.stream_weights(_state["chunks"])]


def gathered_twice(bucket_bytes, to_all):
    """Returns the stream's specs, and what this rank is brought of it, twice: every weight of the
    second version is doubled."""
    chunks = _state["chunks"]
    plan = BucketPlan.of(hf_stream.weight_specs(chunks), bucket_bytes)
    gather, versions = hf_stream.HfGather(chunks, plan, to_all=to_all), []
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


def packed_gradients(folder, documents, upstream, context_parallel=False):
    """Logprobs of all tokens, and the gradient of their sum times `upstream`, by HF's loading.

    With context parallelism every rank computes its chunks, and the gradients are summed.
    """
    size = dist.get_world_size() if context_parallel else 1
    leave_grid()
    mpu.initialize_model_parallel(context_parallel_size=size)
    (gpt,) = _build(job(folder).actor, folder, "float32")
    hf_weights.load([gpt], folder)
    ids = torch.from_numpy(np.concatenate(documents).astype(np.int64))
    lengths = [len(document) for document in documents]
    positions = torch.cat([torch.arange(length) for length in lengths])
    group = mpu.get_context_parallel_group() if size > 1 else None
    rows = attention.PackedRows.of(lengths, CPU, group)

    hidden = gpt(own_part(ids)[None], own_part(positions)[None], None, packed_seq_params=rows)
    head = heads.LogprobHead(1.0, mpu.get_tensor_model_parallel_group())
    values, _ = gpt.logprobs(hidden, own_part(ids.roll(-1)), head)
    values = whole(values)
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
    group = dist.group.WORLD
    slice_ = torch.from_numpy(weight).chunk(group.size())[group.rank()].clone().requires_grad_()
    hidden = torch.from_numpy(hidden).requires_grad_()
    with mock.patch.object(heads, "_CHUNK_BYTES", 3 * 2 * VOCAB):  # several, the last one short
        head = heads.LogprobHead(
            0.7, group, kept_gib=kept_gib, entropy_gradient=entropy_upstream is not None
        )
        values, entropy = heads.hidden_logprobs(hidden, slice_, torch.from_numpy(targets), head)
        assert entropy.requires_grad is (entropy_upstream is not None)
        loss = (values * torch.from_numpy(upstream)).sum()
        if entropy_upstream is not None:
            loss = loss + (entropy * torch.from_numpy(entropy_upstream)).sum()
        loss.backward()
    dist.all_reduce(hidden.grad)
    parts = (values, entropy, hidden.grad, slice_.grad)
    return tuple(part.detach().numpy() for part in parts)


def balance(logits, scores, chosen, documents, trained, weights, experts_per_token):
    """The three losses of `layers.router`, as they weigh and as they are measured, and the
    gradients of two of them."""
    of = packing.TokenDocuments(*map(torch.tensor, (documents, trained, weights)))
    found = []
    for make in (router.micro_batch_groups, router.document_groups):
        given = torch.tensor(scores, requires_grad=True)
        groups = make(given, torch.tensor(chosen), of, dist.group.WORLD)
        loss = router.balance_loss(groups, experts_per_token)
        loss.weighted.backward()
        found.append((*map(float, loss), given.grad.tolist()))
    z = router.z_loss(torch.tensor(logits), of, dist.group.WORLD)
    return *found, tuple(map(float, z))
