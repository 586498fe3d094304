"""Implements the critic: a model with a value per token instead of logprobs."""

from typing import Any, ClassVar

import torch
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group
from torch import Tensor, nn
from torch.nn import functional

from relax_hpc.trainer.megatron import grid, packing
from relax_hpc.trainer.megatron.model import PackedGPT
from relax_hpc.trainer.megatron.packing import MicroBatch
from relax_hpc.trainer.megatron.trainer import MegatronTrainer


class ValueHead(nn.Module):
    """Computes a number per hidden state, in float32; 0 at first."""

    def __init__(self, config: Any) -> None:  # noqa: ANN401
        super().__init__()
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        kind = {"dtype": config.params_dtype, "device": device}
        self.weight = nn.Parameter(torch.zeros(1, config.hidden_size, **kind))
        self.bias = nn.Parameter(torch.zeros(1, **kind))
        for parameter in (self.weight, self.bias):
            # Tensor-parallel ranks have gradients of their own tokens, to be added up.
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., h] -> [...]"""
        return functional.linear(hidden.float(), self.weight.float(), self.bias.float())[..., 0]


class ValueGPT(PackedGPT):
    """A GPT with a value head in place of the output layer."""

    has_vocabulary: ClassVar[bool] = False

    def __init__(self, **settings: Any) -> None:  # noqa: ANN401
        super().__init__(**settings)
        if self.post_process:
            del self.output_layer
            self.value_head = ValueHead(self.config)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Does as any module: a language model's own needs the output layer."""
        complete = ensure_metadata_has_dp_cp_group(metadata)
        found: dict[str, Any] = super(LanguageModule, self).sharded_state_dict(
            prefix, sharded_offsets, complete
        )
        return found

    def values(self, hidden: Tensor) -> Tensor:
        """Returns [T] values of the state behind each token, with gradient; T of this rank.

        Args:
            hidden: [T, 1, h], or this rank's part of T under sequence parallelism.
        """
        values: Tensor = self.value_head(hidden).squeeze(1)
        if self.config.sequence_parallel:
            # Every rank computes the same loss of the whole: its own part of the gradient is all.
            values = gather_from_sequence_parallel_region(
                values, tensor_parallel_output_grad=False, group=self.pg_collection.tp
            )
        return values


class MegatronCritic(MegatronTrainer):
    """A trainer of values V in place of logprobs.

    V of a token is that of the state in which it was chosen, i.e. of the tokens before it. A loss
    gets V [T] with gradient, and `old_logprobs` are V before the step. `forward_logprobs` returns
    V, 0 for the first token.
    """

    _kind: ClassVar[type[PackedGPT]] = ValueGPT

    def _logprobs(
        self, hidden: Tensor, micro_batch: MicroBatch, *, entropy_gradient: bool = False
    ) -> tuple[Tensor, Tensor]:
        model = self._chunks[-1]
        assert isinstance(model, ValueGPT)
        values = packing.at_predicted_token(grid.whole(model.values(hidden)), micro_batch.is_first)
        return values, torch.zeros_like(values)
