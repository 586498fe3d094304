"""Keys of older jobs and of other trainers: refused, with what they are called here."""

from collections.abc import Sequence

MOVED: dict[str, str] = {
    "actor.ddp": "actor.optimizer.ddp",
    "algorithm.num_steps": "schedule.num_steps",
    "algorithm.prompts_per_step": "schedule.prompts_per_step",
    "algorithm.max_staleness": "schedule.max_staleness",
    "algorithm.over_age": "schedule.over_age",
    "algorithm.max_logprob_gap": "weights.max_logprob_gap",
    "algorithm.name": "algorithm.preset",
    "algorithm.clip_low": "algorithm.loss.clip_low",
    "algorithm.clip_high": "algorithm.loss.clip_high",
    "algorithm.importance_cap": "algorithm.correction.cap",
    "algorithm.kl_coefficient": "algorithm.kl.coefficient",
    "rollout.engine": "engines.rollout.kind",
    "rollout.num_engines": "engines.rollout.count",
    "rollout.engines_per_task": "engines.rollout.engines_per_task",
    "rollout.nodes_per_engine": "engines.rollout.nodes_per_engine",
    "rollout.placement": "engines.rollout.placement",
    "rollout.max_running_requests": "engines.rollout.max_running_requests",
    "rollout.start_timeout_s": "engines.rollout.start_timeout_s",
    "rollout.hang_timeout_s": "engines.rollout.hang_timeout_s",
    "rollout.engine_args": "engines.rollout.args",
    "rollout.resources": "engines.rollout.resources",
    "prompts.heldout": "eval.heldout.path",
    "eval.every": "eval.heldout.every",
    "eval.num_prompts": "eval.heldout.num_prompts",
    "actor.tensor_parallel": "actor.layout.tensor_parallel",
    "actor.pipeline_parallel": "actor.layout.pipeline_parallel",
    "actor.virtual_pipeline": "actor.layout.virtual_pipeline",
    "actor.context_parallel": "actor.layout.context_parallel",
    "actor.expert_parallel": "actor.layout.expert_parallel",
    "actor.expert_tensor_parallel": "actor.layout.expert_tensor_parallel",
    "actor.data_parallel": "actor.layout.data_parallel",
    "reference.tensor_parallel": "reference.layout.tensor_parallel",
    "reference.pipeline_parallel": "reference.layout.pipeline_parallel",
    "reference.virtual_pipeline": "reference.layout.virtual_pipeline",
    "reference.context_parallel": "reference.layout.context_parallel",
    "reference.expert_parallel": "reference.layout.expert_parallel",
    "reference.expert_tensor_parallel": "reference.layout.expert_tensor_parallel",
    "reference.data_parallel": "reference.layout.data_parallel",
    "actor.optimizer.adam_beta1": "actor.optimizer.megatron.adam_beta1",
    "actor.optimizer.adam_beta2": "actor.optimizer.megatron.adam_beta2",
}
"""Old dotted key -> the new one."""

_EVERY_5_S = "a load event is written every 5 s; remove it"
_COMPARED = "engines and trainer are compared at each start; weights.max_logprob_gap is the limit"
_ALWAYS_ON = "it is on wherever layout.tensor_parallel is above 1; remove it"
GONE: dict[str, str] = {
    "actor.sequence_parallel": _ALWAYS_ON,
    "reference.sequence_parallel": _ALWAYS_ON,
    "actor.async_save": "training waits for a checkpoint only where host memory does not hold a "
    "copy of it; remove it",
    "algorithm.logprob_check": _COMPARED,
    "algorithm.normalize_std": "algorithm.advantage.name = 'grpo' divides by the deviation, "
    "'group_mean' does not",
    "weights.logprob_check": _COMPARED,
    "actor.max_skipped_updates": "3 skipped updates in a row end the actor; remove it",
    "rollout.load_every_s": _EVERY_5_S,
    "engines.<name>.load_every_s": _EVERY_5_S,
    "engines.<name>.weights": "the pool rollout follows the policy and no other does; remove it",
    "reference.tokens_per_micro_batch": "it is the actor's; remove it",
    "launch.restart_delay_s": "it is half a second, then twice as long each time; remove it",
    "prompts.shuffle_seed": "the order of the prompts is drawn by seed; use that",
}
"""Old dotted key -> why it is none any more, and what to do; <name> is any name of the user's."""

ELSEWHERE: dict[str, str] = {
    "train_batch_size": "schedule.prompts_per_step",
    "rollout_batch_size": "schedule.prompts_per_step",
    "num_prompts_per_step": "schedule.prompts_per_step",
    "n": "rollout.samples_per_prompt",
    "n_samples_per_prompt": "rollout.samples_per_prompt",
    "num_generations": "rollout.samples_per_prompt",
    "num_generations_per_prompt": "rollout.samples_per_prompt",
    "rollouts_per_example": "rollout.samples_per_prompt",
    "group_size": "rollout.samples_per_prompt",
    "max_response_length": "rollout.max_new_tokens",
    "rollout_max_response_len": "rollout.max_new_tokens",
    "max_completion_length": "rollout.max_new_tokens",
    "max_async_level": "schedule.max_staleness",
    "async_level": "schedule.max_staleness",
    "max_off_policy_steps": "schedule.max_staleness",
    "max_head_offpolicyness": "schedule.max_staleness",
    "staleness_threshold": "schedule.max_staleness",
    "max_steps": "schedule.num_steps",
    "total_training_steps": "schedule.num_steps",
    "num_rollout": "schedule.num_steps",
    "ppo_epochs": "algorithm.epochs_per_step",
    "num_iterations": "algorithm.epochs_per_step",
    "num_mini_batches": "algorithm.mini_batches",
    "adv_estimator": "algorithm.advantage.name",
    "advantage_estimator": "algorithm.advantage.name",
    "loss_type": "algorithm.loss.name",
    "policy_loss": "algorithm.loss.name",
    "loss_agg_mode": "algorithm.aggregation",
    "clip_ratio_low": "algorithm.loss.clip_low",
    "clip_ratio_high": "algorithm.loss.clip_high",
    "eps_clip": "algorithm.loss.clip_low",
    "eps_clip_high": "algorithm.loss.clip_high",
    "epsilon": "algorithm.loss.clip_low",
    "epsilon_high": "algorithm.loss.clip_high",
    "beta": "algorithm.kl.coefficient",
    "kl_coef": "algorithm.kl.coefficient",
    "kl_loss_coef": "algorithm.kl.coefficient",
    "kl_loss_type": "algorithm.kl.name",
    "opd_kl_coef": "algorithm.distill.coefficient",
    "use_tis": "algorithm.correction.name",
    "tis_imp_ratio_cap": "algorithm.correction.cap",
    "learning_rate": "actor.optimizer.lr",
    "lr_warmup_steps": "actor.optimizer.warmup_steps",
    "max_grad_norm": "actor.optimizer.clip_grad",
    "max_tokens_per_gpu": "actor.tokens_per_micro_batch",
    "ppo_max_token_len_per_gpu": "actor.tokens_per_micro_batch",
    "tensor_model_parallel_size": "<component>.layout.tensor_parallel",
    "pipeline_model_parallel_size": "<component>.layout.pipeline_parallel",
    "context_parallel_size": "<component>.layout.context_parallel",
    "expert_model_parallel_size": "<component>.layout.expert_parallel",
    "save_freq": "actor.save_every",
    "save_steps": "actor.save_every",
    "save_interval": "actor.save_every",
    "test_freq": "eval.<name>.every",
    "eval_steps": "eval.<name>.every",
    "eval_interval": "eval.<name>.every",
    "gpu_memory_utilization": "engines.rollout.args.mem_fraction_static",
    "hf_checkpoint": "model.path",
    "model_name_or_path": "model.path",
    "experiment_name": "name",
    "run_name": "name",
    "n_gpus_per_node": "<component>.resources.gpus_per_node",
    "slurm_partition": "<component>.resources.partition",
    "slurm_additional_parameters": "<component>.resources.sbatch",
}
"""Last part of a name in verl, slime, TRL, NeMo-RL, prime-rl, AReaL or submitit -> the key here."""


def refusal(key: Sequence[int | str]) -> str | None:
    """Says what is wrong with an old key, and what to do; None of any other.

    Args:
        key: names on the way to it.
    """
    dotted = ".".join(map(str, key))
    of_any_name = ".".join([*map(str, key[:1]), "<name>", *map(str, key[2:])])
    if new := MOVED.get(dotted):
        return f"is {new} now; use that"
    why = GONE.get(dotted) or GONE.get(of_any_name)
    return f"is gone, {why}" if why else None
