"""A layer of experts on stock Megatron-core: its place in the model; router, dispatch are ours."""

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from torch import Tensor

from relax_hpc.engines.megatron.attention.packed_attention import PackedRows
from relax_hpc.engines.megatron.layers import dense
from relax_hpc.engines.megatron.layers.dense import PackedLayer
from relax_hpc.engines.megatron.moe import dispatch, router
from relax_hpc.engines.megatron.moe.experts import Experts
from relax_hpc.engines.megatron.moe.router import PackedRouter
from relax_hpc.errors import ConfigError


def with_experts(layer: ModuleSpec) -> ModuleSpec:
    """The layer with experts for its MLP."""
    layer.module = ExpertLayer
    layer.submodules.mlp = ModuleSpec(
        module=MoELayer, submodules=MoESubmodules(experts=Experts, router=PackedRouter)
    )
    return layer


class ExpertLayer(PackedLayer):
    """Tells its router which documents the tokens are of, and where they are to go."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        super().__init__(*args, **kwargs)
        assert type(self.mlp) is MoELayer
        self.mlp.__class__ = PackedMoE  # Megatron warns of other classes in the specification

    def forward(self, *args: Any, packed_seq_params: PackedRows, **kwargs: Any) -> Any:  # noqa: ANN401
        self.mlp.router.documents = packed_seq_params.documents
        self.mlp.router.routes = packed_seq_params.routes
        return super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)


def check(config: TransformerConfig) -> None:
    """Refuses what a layer of experts cannot do here.

    Raises:
        ConfigError: a field of actor.transformer.
    """
    if config.num_moe_experts is None:
        return
    router.check(config)


def check_installed(config: TransformerConfig) -> None:
    """Refuses a dispatcher that this machine does not have.

    Raises:
        ConfigError: DeepEP is asked for, and not there.
    """
    if config.num_moe_experts is None or config.moe_token_dispatcher_type != "flex":
        return
    if not importlib.util.find_spec("deep_ep"):
        raise ConfigError(
            'actor.transformer.moe_token_dispatcher_type = "flex": needs the package deep_ep '
            '(DeepEP), which is not installed; use "alltoall" or "allgather"'
        )


class PackedMoE(MoELayer):  # type: ignore[misc]
    """Megatron's, with `dispatch` for both its "alltoall" and its "allgather".

    With `recompute_modules = ["moe"]` nothing but the layer's input is kept. For the gradient
    tokens are sent again and the first product is made again; the second, and the way back, are
    not. "moe_act" is always on: a product's input is made again from what is kept anyway.
    """

    recompute_norm = True

    def forward(
        self,
        hidden_states: Tensor,
        intermediate_tensors: None = None,
        padding_mask: None = None,
    ) -> tuple[Tensor, None]:
        """[t, 1, h] -> [t, 1, h]; no bias."""
        kind = self.config.moe_token_dispatcher_type
        if kind == "flex":
            out: tuple[Tensor, None] = super().forward(hidden_states)
            return out
        with dense.kept_input(hidden_states, self.recompute_norm):
            weights, chosen = self.router(hidden_states)
        found = dispatch.plan(
            weights, chosen,
            dispatch.Sharing(self.token_dispatcher.tp_ep_group, self.ep_group.size()),
            per_token=self.config.moe_router_topk, to_all=kind == "allgather",
        )  # fmt: skip
        again: Callable[[], Tensor] | None = None
        if self.moe_layer_recompute and torch.is_grad_enabled():
            again = partial(_sent_again, found, dense.made_again(hidden_states))
        sent = found.send(hidden_states.flatten(0, 1))
        rows, _ = self.experts(sent, found.groups, found.weights, again)
        return found.back(rows).view_as(hidden_states), None


def _sent_again(found: dispatch.Dispatch, hidden: Callable[[], Tensor]) -> Tensor:
    return found.send_again(hidden().flatten(0, 1))
