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
    "eval.path": "eval.heldout.path",
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
    "gen_batch_size": "schedule.prompts_per_step",
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
    "max_prompt_length": "prompts.max_prompt_tokens",
    "rollout_max_prompt_len": "prompts.max_prompt_tokens",
    "filter_overlong_prompts": "prompts.bad_rows",
    "train_files": "prompts.train",
    "prompt_data": "prompts.train",
    "val_files": "eval.<name>.path",
    "eval_prompt_data": "eval.<name>.path",
    "n_samples_per_eval_prompt": "eval.<name>.samples_per_prompt",
    "eval_max_response_len": "eval.<name>.max_new_tokens",
    "eval_temperature": "eval.<name>.temperature",
    "eval_top_p": "eval.<name>.top_p",
    "eval_top_k": "eval.<name>.top_k",
    "prompt_key": "prompts.columns.prompt",
    "input_key": "prompts.columns.prompt",
    "label_key": "prompts.columns.answer",
    "tool_key": "prompts.columns.tools",
    "data_source_key": "prompts.columns.source",
    "apply_chat_template": "prompts.chat_template",
    "apply_chat_template_kwargs": "prompts.template_args",
    "chat_template_kwargs": "prompts.template_args",
    "enable_thinking": "prompts.template_args.enable_thinking",
    "system_prompt": "prompts.system",
    "rollout_temperature": "rollout.temperature",
    "rollout_stop": "rollout.stop",
    "stop_strings": "rollout.stop",
    "use_rollout_routing_replay": "rollout.routed_experts",
    "custom_generate_function_path": "rollout.environment",
    "agent_command": "rollout.program.command",
    "agent_cwd": "rollout.program.folder",
    "agent_timeout": "rollout.program.timeout_s",
    "over_sampling_batch_size": "rollout.over_sampling",
    "rollout_seed": "seed",
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
    "use_kl_loss": "algorithm.kl.name",
    "kl_penalty": "algorithm.kl.name",
    "use_kl_in_reward": "algorithm.kl.place",
    "entropy_coef": "algorithm.entropy.coefficient",
    "entropy_coeff": "algorithm.entropy.coefficient",
    "clip_ratio": "algorithm.loss.clip_low",
    "clip_ratio_c": "algorithm.loss.dual",
    "eps_clip_c": "algorithm.loss.dual",
    "tis_clip": "algorithm.correction.cap",
    "use_opsm": "algorithm.correction.name",
    "opsm_delta": "algorithm.correction.delta",
    "lambd": "algorithm.advantage.lam",
    "normalize_advantages": "algorithm.advantage.whiten",
    "scale_rewards": "algorithm.advantage.name",
    "norm_adv_by_std_in_grpo": "algorithm.advantage.name",
    "disable_grpo_std_normalization": "algorithm.advantage.name",
    "calculate_per_token_loss": "algorithm.aggregation",
    "filter_groups": "algorithm.groups.name",
    "dynamic_sampling_filter_path": "algorithm.groups.name",
    "use_dynamic_sampling": "algorithm.groups.name",
    "mask_truncated_completions": "algorithm.groups.truncated",
    "overlong_filtering": "algorithm.groups.truncated",
    "overlong_buffer_cfg": "algorithm.groups.truncated",
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
    "reward_fn": "reward.name",
    "reward_model_type": "reward.name",
    "rm_type": "reward.name",
    "custom_rm_path": "reward.name",
    "custom_reward_function": "reward.name",
    "reward_kwargs": "reward.args",
    "reward_num_workers": "reward.workers",
    "learning_rate": "actor.optimizer.lr",
    "lr_warmup_steps": "actor.optimizer.warmup_steps",
    "lr_warmup_iters": "actor.optimizer.warmup_steps",
    "lr_decay_style": "actor.optimizer.decay",
    "lr_scheduler": "actor.optimizer.decay",
    "lr_scheduler_type": "actor.optimizer.decay",
    "lr_decay_iters": "actor.optimizer.decay_steps",
    "min_lr_ratio": "actor.optimizer.final_lr_fraction",
    "adam_beta1": "actor.optimizer.megatron.adam_beta1",
    "adam_beta2": "actor.optimizer.megatron.adam_beta2",
    "adam_eps": "actor.optimizer.megatron.adam_eps",
    "optimizer_cpu_offload": "actor.optimizer.offload",
    "optimizer_offload": "actor.optimizer.offload",
    "use_precision_aware_optimizer": "actor.optimizer.moments",
    "gradient_checkpointing": "actor.transformer.recompute_granularity",
    "enable_gradient_checkpointing": "actor.transformer.recompute_granularity",
    "recompute_granularity": "actor.transformer.recompute_granularity",
    "deterministic_mode": "actor.transformer.deterministic_mode",
    "freeze_vision_tower": "actor.frozen",
    "freeze_vision_model": "actor.frozen",
    "freeze_language_model": "actor.frozen",
    "lora_rank": "actor.lora.rank",
    "lora_alpha": "actor.lora.alpha",
    "target_modules": "actor.lora.targets",
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
    "save_hf": "actor.save_hf_every",
    "max_actor_ckpt_to_keep": "actor.keep_checkpoints",
    "save_total_limit": "actor.keep_checkpoints",
    "keep_latest_k": "actor.keep_checkpoints",
    "ref_load": "reference.path",
    "ref_update_interval": "reference.refresh_every",
    "ref_model_sync_steps": "reference.refresh_every",
    "critic_lr": "critic.lr",
    "num_critic_only_steps": "critic.warmup_steps",
    "critic_warmup": "critic.warmup_steps",
    "cliprange_value": "critic.value_clip",
    "teacher_hf_checkpoint": "teachers.<name>.path",
    "colocate": "engines.rollout.placement",
    "tp": "engines.rollout.args.tp_size",
    "rollout_num_gpus_per_engine": "engines.rollout.args.tp_size",
    "logger": "boards.export",
    "use_wandb": "boards.export",
    "report_to": "boards.export",
    "wandb_project": "boards.project",
    "project_name": "boards.project",
    "wandb_mode": "boards.offline",
    "notify_urls": "notify.webhook",
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
"""Last part of a name in verl, slime, Relax, TRL, NeMo-RL, prime-rl, AReaL or submitit -> the key
here."""

_WHOLE = (
    "what is trained on is sampled from the whole distribution, whose logprobs the trainer has; "
)
_EPOCHS = "a run has schedule.num_steps: rows x epochs / schedule.prompts_per_step"
_EPISODE = "an episode says it itself, in rollout.environment (docs/extending.md); remove it"
ABSENT: dict[str, str] = {
    "rollout.top_p": f"{_WHOLE}held-out sets have eval.<name>.top_p",
    "rollout.top_k": f"{_WHOLE}held-out sets have eval.<name>.top_k",
    "rollout_top_p": f"{_WHOLE}held-out sets have eval.<name>.top_p",
    "rollout_top_k": f"{_WHOLE}held-out sets have eval.<name>.top_k",
    "min_p": f"{_WHOLE}remove it",
    "repetition_penalty": f"{_WHOLE}the reward 'repetition' lowers what repeats itself",
    "presence_penalty": f"{_WHOLE}remove it",
    "frequency_penalty": f"{_WHOLE}remove it",
    "stop_token_ids": "use rollout.stop, with the texts of these tokens",
    "rollout_stop_token_ids": "use rollout.stop, with the texts of these tokens",
    "sft.num_train_epochs": "use sft.epochs",
    "sft.num_epochs": "use sft.epochs",
    "schedule.epochs": _EPOCHS,
    "total_epochs": _EPOCHS,
    "num_epoch": _EPOCHS,
    "num_epochs": _EPOCHS,
    "num_train_epochs": _EPOCHS,
    "schedule.batch_size": "use schedule.prompts_per_step",
    "per_device_train_batch_size": "a batch is schedule.prompts_per_step prompts, in micro-batches "
    "of actor.tokens_per_micro_batch tokens",
    "critic.optimizer": "its rate is critic.lr; all else is as the actor's",
    "truncation": "no prompt is cut; prompts.bad_rows = 'skip' leaves out those that are too long",
    "gradient_accumulation_steps": "a batch is schedule.prompts_per_step prompts, in micro-batches "
    "of actor.tokens_per_micro_batch tokens",
    "micro_batch_size": "micro-batches are packed, up to actor.tokens_per_micro_batch tokens",
    "ppo_micro_batch_size_per_gpu": "micro-batches are packed, up to "
    "actor.tokens_per_micro_batch tokens",
    "use_dynamic_batch_size": "it always is so, up to actor.tokens_per_micro_batch; remove it",
    "use_dynamic_bsz": "it always is so, up to actor.tokens_per_micro_batch; remove it",
    "use_remove_padding": "rows are always packed, without padding; remove it",
    "packing": "rows are always packed, without padding; remove it",
    "balance_data": "rows are always dealt to ranks by their tokens; remove it",
    "balance_batch": "rows are always dealt to ranks by their tokens; remove it",
    "ppo_mini_batch_size": "algorithm.mini_batches says into how many updates a batch is split",
    "global_batch_size": "a batch is schedule.prompts_per_step x rollout.samples_per_prompt rows, "
    "split into algorithm.mini_batches updates",
    "val_before_train": "held-out sets are scored before, too, while training begins; remove it",
    "skip_eval_before_train": "held-out sets are scored before, too, while training begins; "
    "remove it",
    "partial_rollout": "responses always go on under new weights; weights.kv_cache says with which "
    "keys and values",
    "use_fault_tolerance": "it always is so; launch.max_restarts bounds it",
    "resume_mode": "relax-hpc resume RUN goes on; model.weights starts from another checkpoint",
    "load_debug_rollout_data": "relax-hpc replay RUN --step N trains a step again; remove it",
    "debug_rollout_only": "relax-hpc eval MODEL samples without training; remove it",
    "debug_train_only": "relax-hpc replay RUN --step N trains without engines; remove it",
    "save_debug_rollout_data": "rollouts are on the bus; relax-hpc bus export writes them as rows",
    "rollout_data_dir": "rollouts are on the bus; relax-hpc bus export writes them as rows",
    "log_val_generations": "relax-hpc eval and view show them, and TensorBoard's Text; remove it",
    "multi_turn": _EPISODE,
    "max_turns": _EPISODE,
    "max_assistant_turns": _EPISODE,
}
"""Last part of a name elsewhere, or a dotted one, that has no key here -> why, and what to do."""


def answer_to(key: Sequence[int | str], value: object = None) -> str | None:
    """Says of an unknown key that others have what it is here; None of any other.

    Args:
        key: names on the way to it.
        value: what it is set to. Of a table of others the first name in it that is known is told.
    """
    names = [str(part) for part in key]
    for name in (".".join(names), names[-1]):
        if why := ABSENT.get(name):
            return why
    if here := ELSEWHERE.get(names[-1]):
        return f"here it is {here}"
    for name, inside in value.items() if isinstance(value, dict) else ():
        if said := answer_to([*names, str(name)], inside):
            return f"{name}: {said}"
    return None


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
