"""Chooses a token's experts: Megatron-core's router with float32 logits, and losses that keep
experts busy.

t = tokens of this rank, E = experts, k = experts per token, h = hidden size. Megatron-core 0.14 to
0.16 cannot route without Transformer Engine (`NameError: te_general_gemm`, in the product for its
logits), so we use our own product.

Like all losses here those of balance are sums over trained tokens, in the same mean: a group of
tokens (a micro-batch, a document) counts as much as its trained tokens weigh, and padding counts
nothing. So a document's contribution does not depend on the number of micro-batches, and one
without trained tokens adds nothing.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core import utils
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    compute_routing_scores_for_aux_loss,
    topk_routing_with_score_function,
)
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

from relax_hpc.errors import ConfigError
from relax_hpc.trainer.megatron.layers import replay
from relax_hpc.trainer.megatron.layers.replay import RoutingReplay
from relax_hpc.trainer.megatron.packing import TokenDocuments
from relax_hpc.trainer.models.architecture import Architecture


class TokenGroupSums(NamedTuple):
    """Sums over groups of tokens: the whole micro-batch, or its documents."""

    counts: Tensor
    """[groups, E] how often an expert was chosen, by the tokens of all ranks that share them."""
    mass: Tensor
    """[groups, E] sum of the router's scores, with gradient, of this rank's tokens."""
    trained: Tensor
    """[groups] trained tokens of all ranks that share them."""
    weights: Tensor
    """[groups] sum of their weights in the loss."""


class BalanceLoss(NamedTuple):
    """A sum over trained tokens."""

    weighted: Tensor
    """[] this rank's part, weighted as in the loss; with gradient."""
    measured: Tensor
    """[] the same with every token counted once; without gradient."""

    @classmethod
    def of(cls, each: Tensor, weights: Tensor, trained: Tensor) -> "BalanceLoss":
        """Weights the losses of groups."""
        return cls((weights * each).sum(), (trained * each.detach()).sum())


def micro_batch_groups(
    scores: Tensor, chosen: Tensor, documents: TokenDocuments, sharing: dist.ProcessGroup
) -> TokenGroupSums:
    """Makes one group of all tokens but padding.

    Args:
        scores: [t, E] of the router, with gradient; they add up to 1.
        chosen: [t, E] bool.
        sharing: ranks that share the tokens of the micro-batch.
    """
    real = documents.is_real[:, None]
    counts = (chosen & real).sum(0, keepdim=True).float()
    dist.all_reduce(counts, group=sharing)
    mass = (scores * real).sum(0, keepdim=True)
    return TokenGroupSums(
        counts, mass, documents.trained.sum()[None], documents.weights.sum()[None]
    )


def document_groups(
    scores: Tensor, chosen: Tensor, documents: TokenDocuments, sharing: dist.ProcessGroup
) -> TokenGroupSums:
    """Makes a group per document; see `micro_batch_groups`."""
    none = scores.new_zeros(len(documents.trained), scores.shape[1])
    counts = none.index_add(0, documents.index, chosen.to(scores.dtype))[:-1]
    dist.all_reduce(counts, group=sharing)
    mass = none.index_add(0, documents.index, scores)[:-1]
    return TokenGroupSums(counts, mass, documents.trained[:-1], documents.weights[:-1])


def balance_loss(
    groups: TokenGroupSums, experts_per_token: int, busy: Tensor | None = None
) -> BalanceLoss:
    """Returns the sum over groups of weight x E x sum over experts of (share of choices) x (mean
    score).

    Args:
        busy: [E] choices for the shares, if not the groups' own.

    Returns:
        1 x its weight per trained token when all experts are equally busy.

    Source: Switch Transformer (arXiv:2101.03961) eq. 4, with k choices per token as Megatron-core;
    `busy` over the global batch: arXiv:2501.11873.
    """
    choices = groups.counts.sum(1, keepdim=True).clamp(min=1)
    counts = groups.counts if busy is None else busy[None]
    share = counts / counts.sum(1, keepdim=True).clamp(min=1)
    mean = groups.mass * (experts_per_token / choices)
    num_experts = groups.counts.shape[1]
    each = (share * mean).sum(1)
    return BalanceLoss.of(each, groups.weights * num_experts, groups.trained * num_experts)


def z_loss(logits: Tensor, documents: TokenDocuments, sharing: dist.ProcessGroup) -> BalanceLoss:
    """[t, E] -> weight of trained tokens x mean of logsumexp^2 over all tokens but padding.

    Source: ST-MoE (arXiv:2202.08906) eq. 5.
    """
    real = documents.is_real
    tokens = real.sum().float()
    dist.all_reduce(tokens, group=sharing)
    squares = (logits.float().logsumexp(-1).square() * real).sum()
    tokens = tokens.clamp(min=1)
    return BalanceLoss.of(
        squares, documents.weights.sum() / tokens, documents.trained.sum() / tokens
    )


_REPLAYED = ("replayed", "differs", "missing")
_KINDS = ("aux_loss", "seq_aux_loss", "global_aux_loss")


def check(config: TransformerConfig) -> None:
    """Checks that the router supports the balance losses.

    Raises:
        ConfigError: names the field of actor.transformer.
    """
    kinds = config.moe_router_load_balancing_type
    for kind in [kinds] if isinstance(kinds, str) else kinds:
        if kind not in (*_KINDS, "none"):
            raise ConfigError(
                f"actor.transformer.moe_router_load_balancing_type = {kind!r}: "
                f"is none of {', '.join(_KINDS)}, none"
            )


class PackedRouter(TopKRouter):  # type: ignore[misc]
    """Megatron's, for packed micro-batches; counts the experts' load in a step."""

    documents: TokenDocuments | None = None
    """Documents of this rank's tokens, set before every forward that may train."""
    routes: Tensor | None = None
    """[t, layers, k] experts of this rank's tokens, if replayed."""
    place = 0
    """Index of this layer in `routes`."""
    is_normalised = False
    """Whether the weights of a token's experts add up to 1, even for a single one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        super().__init__(*args, **kwargs)
        self.load = torch.zeros(self.num_experts, dtype=torch.float64)
        self.losses: dict[str, Tensor] = {}
        self.replayed = torch.zeros(len(_REPLAYED), dtype=torch.float64)

    def gating(self, input: Tensor) -> Tensor:
        """[..., h] -> [..., E] float32 logits."""
        return _logits(input, self.weight)

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """[t, 1, E] -> [t, E] weights, 0 for unchosen experts, and [t, E] bool."""
        logits = logits.view(-1, self.num_experts)
        documents = self.documents if self.training and torch.is_grad_enabled() else None
        if documents is not None and self.config.moe_z_loss_coeff:
            loss = z_loss(logits, documents, self.tp_cp_group)
            logits = self._with_loss(logits, "z_loss", loss, self.config.moe_z_loss_coeff)
        recorded = None if self.routes is None else RoutingReplay(self.routes[:, self.place])
        weights, chosen = topk_routing_with_score_function(
            logits, self.topk,
            use_pre_softmax=self.config.moe_router_pre_softmax and not self.is_normalised,
            num_groups=self.config.moe_router_num_groups,
            group_topk=self.config.moe_router_group_topk,
            scaling_factor=self.config.moe_router_topk_scaling_factor,
            score_function=self.score_function, expert_bias=self.expert_bias,
            router_replay=recorded,
        )  # fmt: skip
        if documents is not None:
            weights = self._balance(weights, logits, documents)
            self._count(chosen, documents, recorded)
        return weights, chosen

    def _balance(self, weights: Tensor, logits: Tensor, documents: TokenDocuments) -> Tensor:
        """Returns `weights`, with the gradient of the losses attached."""
        coefficients = {kind: self.get_aux_loss_coeff(kind) for kind in _KINDS}
        if not any(coefficients.values()):
            return weights
        chosen, scores = compute_routing_scores_for_aux_loss(logits, self.topk, self.score_function)
        for kind, coefficient in coefficients.items():
            if coefficient:
                make = document_groups if "seq" in kind else micro_batch_groups
                groups = make(scores, chosen, documents, self.tp_cp_group)
                busy = self._busy(groups.counts[0]) if "global" in kind else None
                loss = balance_loss(groups, self.topk, busy)
                weights = self._with_loss(weights, kind, loss, coefficient)
        return weights

    def _busy(self, counts: Tensor) -> Tensor:
        """Returns [E] choices in this step so far, over all data-parallel ranks' micro-batches."""
        counts = counts.clone()
        dist.all_reduce(counts, group=mpu.get_data_parallel_group())
        self.global_tokens_per_expert += counts  # finalize_model_grads sets it to 0
        so_far: Tensor = self.global_tokens_per_expert.clone()
        return so_far

    def _with_loss(
        self, carrier: Tensor, kind: str, loss: BalanceLoss, coefficient: float
    ) -> Tensor:
        self.losses[kind] = self.losses.get(kind, 0) + loss.measured
        carried: Tensor = MoEAuxLossAutoScaler.apply(carrier, coefficient * loss.weighted)
        return carried

    def _count(
        self, chosen: Tensor, documents: TokenDocuments, recorded: RoutingReplay | None
    ) -> None:
        counts = (chosen & documents.is_real[:, None]).sum(0)
        self.load = self.load.to(counts.device) + counts
        if recorded is not None:
            kinds = torch.stack([recorded.is_known, recorded.differs, recorded.is_missing])
            self.replayed = self.replayed.to(kinds.device) + (kinds & documents.is_real).sum(1)
        if self.expert_bias is not None:
            self.local_tokens_per_expert += counts  # finalize_model_grads reads it


def set_shares(model: nn.Module, *, normalised: bool) -> None:
    """Sets whether the weights of a token's experts add up to 1."""
    for module in model.modules():
        if isinstance(module, PackedRouter):
            module.is_normalised = normalised


def number_layers(chunks: Iterable[nn.Module], shape: Architecture) -> replay.Layers | None:
    """Numbers the layers of a rank's routers for replay; returns its layers."""
    routers = [m for chunk in chunks for m in chunk.modules() if isinstance(m, PackedRouter)]
    for place, router in enumerate(routers):
        router.place = place
    return replay.layers_of(shape, (router.layer_number - 1 for router in routers))


def take_metrics(chunks: Iterable[nn.Module], num_tokens: int) -> dict[str, float]:
    """Returns the routers' counts since the last call, the same on every rank; collective.

    Returns:
        Nothing for a model without experts, else `moe/max_load`: choices of the busiest expert over
        those of an average one, in the worst layer; and for each active loss `moe/` and its name,
        per trained token without its coefficient, mean over the layers. With replay,
        `routing/differs`:
        share of replayed choices that the router would have made otherwise; and `routing/missing`:
        share of choices without a record.
    """
    routers = [m for chunk in chunks for m in chunk.modules() if isinstance(m, PackedRouter)]
    kinds = [*_KINDS, "z_loss"]
    config = utils.get_model_config(next(iter(chunks)))
    if config.num_moe_experts is None:
        return {}
    device = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
    width = config.num_moe_experts + len(kinds) + len(_REPLAYED)
    sums = torch.zeros(config.num_layers, width, dtype=torch.float64)
    sums = sums.to(device)
    for router in routers:
        losses = [torch.as_tensor(router.losses.get(kind, 0.0), device=device) for kind in kinds]
        loss_sums = torch.stack([x.double() for x in losses])
        row = torch.cat([router.load.to(device), loss_sums, router.replayed.to(device)])
        sums[router.layer_number - 1] += row
        router.load, router.losses = torch.zeros_like(router.load), {}
        router.replayed = torch.zeros_like(router.replayed)
    dist.all_reduce(sums, group=mpu.get_tensor_and_data_parallel_group(with_context_parallel=True))
    dist.all_reduce(sums, group=mpu.get_pipeline_model_parallel_group())
    return _metrics(sums.cpu(), kinds, config, num_tokens)


def _metrics(
    sums: Tensor, kinds: list[str], config: TransformerConfig, num_tokens: int
) -> dict[str, float]:
    sizes = [config.num_moe_experts, len(kinds), len(_REPLAYED)]
    load, losses, replayed = torch.split(sums, sizes, dim=1)
    routed = load.sum(1) > 0
    if not routed.any():
        return {"moe/max_load": 0.0}
    load, losses = load[routed], losses[routed]
    found = {"moe/max_load": float((load.amax(1) / load.mean(1)).max())}
    means = losses.mean(0) / max(num_tokens, 1)
    found |= {f"moe/{kind}": float(mean) for kind, mean in zip(kinds, means, strict=True) if mean}
    known, differs, missing = replayed.sum(0).tolist()
    if known + missing:
        found["routing/differs"] = differs / max(known, 1)
        found["routing/missing"] = missing / (known + missing)
    return found


class _Logits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(hidden, weight)
        rows = hidden.flatten(0, -2)
        if hidden.is_cuda and hidden.dtype != torch.float32:
            out = torch.mm(rows, weight.t(), out_dtype=torch.float32)
        else:
            out = rows.float() @ weight.float().t()
        return out.view(*hidden.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ANN401
        hidden, weight = ctx.saved_tensors
        grad = grad.flatten(0, -2)
        hidden_grad = (grad @ weight.float()).to(hidden.dtype).view_as(hidden)
        weight_grad = grad.t() @ hidden.flatten(0, -2).float()
        main_grad = getattr(weight, "main_grad", None)
        if main_grad is None:
            return hidden_grad, weight_grad.to(weight.dtype)
        main_grad += weight_grad
        weight.grad_added_to_main_grad = True  # Megatron's hook then adds nothing
        return hidden_grad, torch.empty_like(weight)


_logits: Callable[[Tensor, Tensor], Tensor] = _Logits.apply
