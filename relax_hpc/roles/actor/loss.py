"""The loss of a run's settings."""

from torch import Tensor

from relax_hpc.algorithms.losses import LossOutput, grpo, with_kl
from relax_hpc.config.run import RunConfig
from relax_hpc.engines.megatron.packing import MicroBatch
from relax_hpc.engines.training_engine import Loss


def loss_of(config: RunConfig) -> Loss:
    """The policy loss of this run, with a KL term if there is a reference."""
    algorithm = config.algorithm

    def loss(logprobs: Tensor, tokens: MicroBatch) -> LossOutput:
        output = grpo(
            logprobs,
            tokens.columns["old_logprobs"],
            tokens.columns["rollout_logprobs"],
            tokens.columns["advantages"],
            tokens.loss_mask,
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            importance_cap=algorithm.importance_cap,
        )
        if config.reference.placement == "none":
            return output
        return with_kl(
            output,
            logprobs,
            tokens.columns["ref_logprobs"],
            tokens.loss_mask,
            coefficient=algorithm.kl_coefficient,
        )

    return loss
