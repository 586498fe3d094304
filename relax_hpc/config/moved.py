"""Maps keys of older jobs and of other trainers to the keys here, for error messages."""

import copy
from collections.abc import Iterator, Sequence
from typing import Any


def _below(old: str, new: str, keys: str) -> dict[str, str]:
    return {f"{old}.{key}": f"{new}.{key}" for key in keys.split()}


_OF_LAYOUT = (
    "tensor_parallel pipeline_parallel virtual_pipeline context_parallel expert_parallel "
    "expert_tensor_parallel data_parallel"
)
_OF_POOL = "engines_per_task nodes_per_engine placement max_running_requests resources"
_ADVANCED = {
    "actor": (
        "attention float32_logits recomputed_passes kept_logits_gib tower_patches features_gib "
        "portion_micro_batches keep_best"
    ),
    "launch": "bootstrap idle_s network peer_timeout_s hang_timeout_s share kernel_cache",
    "boards": "tracking_uri offline",
    "notify": "plateau_steps",
    "prompts.media": "store workers folder broken audio_max_s audio_in_video",
    "reward": "memory_gib most_errors solved_at workers",
    "rollout": "max_continuations groups_per_shard over_sampling routed_experts",
    "engines.<name>": "start_timeout_s hang_timeout_s drain_slow engines_per_gpu",
    "eval.<name>": "one_policy",
    "critic": "weights value_clip returns_lambda",
    "bus": "compress",
    "weights": (
        "kv_cache modules_to_not_convert bucket_bytes checksum_every max_logprob_gap timeout_s"
    ),
}
"""Section -> the keys in its `advanced`, most of which were in it before."""
MOVED = {
    "actor.ddp": "actor.optimizer.ddp",
    "algorithm.name": "algorithm.preset",
    "algorithm.max_logprob_gap": "weights.advanced.max_logprob_gap",
    "algorithm.importance_cap": "algorithm.correction.cap",
    "algorithm.kl_coefficient": "algorithm.kl.coefficient",
    "rollout.engine": "engines.rollout.kind",
    "rollout.num_engines": "engines.rollout.count",
    "rollout.engine_args": "engines.rollout.args",
    "prompts.heldout": "eval.heldout.path",
    **_below("algorithm", "schedule", "num_steps prompts_per_step max_staleness over_age"),
    **_below("algorithm", "algorithm.loss", "clip_low clip_high"),
    **_below("rollout", "engines.rollout", _OF_POOL),
    **_below("rollout", "engines.rollout.advanced", "start_timeout_s hang_timeout_s"),
    **_below("eval", "eval.heldout", "path every num_prompts"),
    **_below("actor", "actor.layout", _OF_LAYOUT),
    **_below("reference", "reference.layout", _OF_LAYOUT),
    **_below("actor.optimizer", "actor.optimizer.megatron", "adam_beta1 adam_beta2"),
    **{
        old: new
        for section, keys in _ADVANCED.items()
        for old, new in _below(section, f"{section}.advanced", keys).items()
    },
}
"""Old dotted key -> the new one; <name> is any user-defined name."""

_EVERY_5_S = "a load event is written every 5 s; remove it"
_COMPARED = (
    "engines and trainer are compared at each start; weights.advanced.max_logprob_gap is the limit"
)
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
"""Removed dotted key -> why, and what to do; <name> is any user-defined name."""

_NAMES_ELSEWHERE = {
    "schedule.prompts_per_step": (
        "train_batch_size gen_batch_size rollout_batch_size num_prompts_per_step"
    ),
    "rollout.samples_per_prompt": (
        "n n_samples_per_prompt num_generations num_generations_per_prompt rollouts_per_example "
        "group_size"
    ),
    "rollout.max_new_tokens": "max_response_length rollout_max_response_len max_completion_length",
    "prompts.max_prompt_tokens": "max_prompt_length rollout_max_prompt_len",
    "prompts.bad_rows": "filter_overlong_prompts",
    "prompts.train": "train_files prompt_data",
    "eval.<name>.path": "val_files eval_prompt_data",
    "eval.<name>.samples_per_prompt": "n_samples_per_eval_prompt",
    "eval.<name>.max_new_tokens": "eval_max_response_len",
    "eval.<name>.temperature": "eval_temperature",
    "eval.<name>.top_p": "eval_top_p",
    "eval.<name>.top_k": "eval_top_k",
    "prompts.columns.prompt": "prompt_key input_key",
    "prompts.columns.answer": "label_key",
    "prompts.columns.tools": "tool_key",
    "prompts.columns.source": "data_source_key",
    "prompts.chat_template": "apply_chat_template",
    "prompts.template_args": "apply_chat_template_kwargs chat_template_kwargs",
    "prompts.template_args.enable_thinking": "enable_thinking",
    "prompts.system": "system_prompt",
    "rollout.temperature": "rollout_temperature",
    "rollout.stop": "rollout_stop stop_strings",
    "rollout.advanced.routed_experts": "use_rollout_routing_replay",
    "rollout.environment": "custom_generate_function_path",
    "rollout.program.command": "agent_command",
    "rollout.program.folder": "agent_cwd",
    "rollout.program.timeout_s": "agent_timeout",
    "rollout.advanced.over_sampling": "over_sampling_batch_size",
    "seed": "rollout_seed",
    "schedule.max_staleness": (
        "max_async_level async_level max_off_policy_steps max_head_offpolicyness "
        "staleness_threshold"
    ),
    "schedule.num_steps": "max_steps total_training_steps num_rollout",
    "algorithm.epochs_per_step": "ppo_epochs num_iterations",
    "algorithm.mini_batches": "num_mini_batches",
    "algorithm.advantage.name": (
        "adv_estimator advantage_estimator scale_rewards norm_adv_by_std_in_grpo "
        "disable_grpo_std_normalization"
    ),
    "algorithm.kl.name": "use_kl_loss kl_penalty kl_loss_type",
    "algorithm.kl.place": "use_kl_in_reward",
    "algorithm.entropy.coefficient": "entropy_coef entropy_coeff",
    "algorithm.loss.clip_low": "clip_ratio clip_ratio_low eps_clip epsilon",
    "algorithm.loss.dual": "clip_ratio_c eps_clip_c",
    "algorithm.correction.cap": "tis_clip tis_imp_ratio_cap",
    "algorithm.correction.name": "use_opsm use_tis",
    "algorithm.correction.delta": "opsm_delta",
    "algorithm.advantage.lam": "lambd",
    "algorithm.advantage.whiten": "normalize_advantages",
    "algorithm.aggregation": "calculate_per_token_loss loss_agg_mode",
    "algorithm.groups.name": "filter_groups dynamic_sampling_filter_path use_dynamic_sampling",
    "algorithm.groups.truncated": (
        "mask_truncated_completions overlong_filtering overlong_buffer_cfg"
    ),
    "algorithm.loss.name": "loss_type policy_loss",
    "algorithm.loss.clip_high": "clip_ratio_high eps_clip_high epsilon_high",
    "algorithm.kl.coefficient": "beta kl_coef kl_loss_coef",
    "algorithm.distill.coefficient": "opd_kl_coef",
    "reward.name": "reward_fn reward_model_type rm_type custom_rm_path custom_reward_function",
    "reward.args": "reward_kwargs",
    "reward.advanced.workers": "reward_num_workers",
    "actor.optimizer.lr": "learning_rate",
    "actor.optimizer.warmup_steps": "lr_warmup_steps lr_warmup_iters",
    "actor.optimizer.decay": "lr_decay_style lr_scheduler lr_scheduler_type",
    "actor.optimizer.decay_steps": "lr_decay_iters",
    "actor.optimizer.final_lr_fraction": "min_lr_ratio",
    "actor.optimizer.megatron.adam_beta1": "adam_beta1",
    "actor.optimizer.megatron.adam_beta2": "adam_beta2",
    "actor.optimizer.megatron.adam_eps": "adam_eps",
    "actor.optimizer.offload": "optimizer_cpu_offload optimizer_offload",
    "actor.optimizer.moments": "use_precision_aware_optimizer",
    "actor.transformer.recompute_granularity": (
        "gradient_checkpointing enable_gradient_checkpointing recompute_granularity"
    ),
    "actor.frozen": "freeze_vision_tower freeze_vision_model freeze_language_model",
    "actor.lora.rank": "lora_rank",
    "actor.lora.alpha": "lora_alpha",
    "actor.lora.targets": "target_modules",
    "actor.optimizer.clip_grad": "max_grad_norm",
    "actor.tokens_per_micro_batch": "max_tokens_per_gpu ppo_max_token_len_per_gpu",
    "<component>.layout.tensor_parallel": "tensor_model_parallel_size",
    "<component>.layout.pipeline_parallel": "pipeline_model_parallel_size",
    "<component>.layout.context_parallel": "context_parallel_size",
    "<component>.layout.expert_parallel": "expert_model_parallel_size",
    "actor.save_every": "save_freq save_steps save_interval",
    "actor.save_hf_every": "save_hf",
    "actor.keep_checkpoints": "max_actor_ckpt_to_keep save_total_limit keep_latest_k",
    "reference.path": "ref_load",
    "reference.refresh_every": "ref_update_interval ref_model_sync_steps",
    "critic.lr": "critic_lr",
    "critic.warmup_steps": "num_critic_only_steps critic_warmup",
    "critic.advanced.value_clip": "cliprange_value",
    "teachers.<name>.path": "teacher_hf_checkpoint",
    "engines.rollout.placement": "colocate",
    "engines.rollout.args.tp_size": "tp rollout_num_gpus_per_engine",
    "boards.export": "logger use_wandb report_to",
    "boards.project": "wandb_project project_name",
    "boards.advanced.offline": "wandb_mode",
    "notify.webhook": "notify_urls",
    "eval.<name>.every": "test_freq eval_steps eval_interval",
    "engines.rollout.args.mem_fraction_static": "gpu_memory_utilization",
    "model.path": "hf_checkpoint model_name_or_path",
    "name": "experiment_name run_name",
    "<component>.resources.gpus_per_node": "n_gpus_per_node",
    "<component>.resources.partition": "slurm_partition",
    "<component>.resources.sbatch": "slurm_additional_parameters",
}
"""Key here -> last parts of its names in verl, slime, Relax, TRL, NeMo-RL, prime-rl, AReaL or
submitit."""
ELSEWHERE = {name: here for here, names in _NAMES_ELSEWHERE.items() for name in names.split()}

_WHOLE = (
    "what is trained on is sampled from the whole distribution, whose logprobs the trainer has; "
)
_WHY_ABSENT = {
    "rollout.top_p rollout_top_p": f"{_WHOLE}held-out sets have eval.<name>.top_p",
    "rollout.top_k rollout_top_k": f"{_WHOLE}held-out sets have eval.<name>.top_k",
    "min_p presence_penalty frequency_penalty": f"{_WHOLE}remove it",
    "repetition_penalty": f"{_WHOLE}the reward 'repetition' lowers what repeats itself",
    "stop_token_ids rollout_stop_token_ids": "use rollout.stop, with the texts of these tokens",
    "sft.num_train_epochs sft.num_epochs": "use sft.epochs",
    "schedule.epochs total_epochs num_epoch num_epochs num_train_epochs": (
        "a run has schedule.num_steps: rows x epochs / schedule.prompts_per_step"
    ),
    "schedule.batch_size": "use schedule.prompts_per_step",
    "per_device_train_batch_size gradient_accumulation_steps": (
        "a batch is schedule.prompts_per_step prompts, in micro-batches of "
        "actor.tokens_per_micro_batch tokens"
    ),
    "critic.optimizer": "its rate is critic.lr; all else is as the actor's",
    "truncation": "no prompt is cut; prompts.bad_rows = 'skip' leaves out those that are too long",
    "micro_batch_size ppo_micro_batch_size_per_gpu": (
        "micro-batches are packed, up to actor.tokens_per_micro_batch tokens"
    ),
    "use_dynamic_batch_size use_dynamic_bsz": (
        "it always is so, up to actor.tokens_per_micro_batch; remove it"
    ),
    "use_remove_padding packing": "rows are always packed, without padding; remove it",
    "balance_data balance_batch": "rows are always dealt to ranks by their tokens; remove it",
    "ppo_mini_batch_size": "algorithm.mini_batches says into how many updates a batch is split",
    "global_batch_size": (
        "a batch is schedule.prompts_per_step x rollout.samples_per_prompt rows, split into "
        "algorithm.mini_batches updates"
    ),
    "val_before_train skip_eval_before_train": (
        "held-out sets are scored before, too, while training begins; remove it"
    ),
    "partial_rollout": (
        "responses always go on under new weights; weights.advanced.kv_cache says with which keys "
        "and values"
    ),
    "use_fault_tolerance": "it always is so; launch.max_restarts bounds it",
    "resume_mode": "relax-hpc resume RUN goes on; model.weights starts from another checkpoint",
    "load_debug_rollout_data": "relax-hpc replay RUN --step N trains a step again; remove it",
    "debug_rollout_only": "relax-hpc eval MODEL samples without training; remove it",
    "debug_train_only": "relax-hpc replay RUN --step N trains without engines; remove it",
    "save_debug_rollout_data rollout_data_dir": (
        "rollouts are on the bus; relax-hpc bus export writes them as rows"
    ),
    "log_val_generations": "relax-hpc eval and view show them, and TensorBoard's Text; remove it",
    "multi_turn max_turns max_assistant_turns": (
        "an episode says it itself, in rollout.environment (docs/how-to/extending.md); remove it"
    ),
}
"""Names elsewhere (last parts, or dotted) without a key here -> why, and what to do."""
ABSENT = {name: why for names, why in _WHY_ABSENT.items() for name in names.split()}


def answer_to(key: Sequence[int | str], value: object = None) -> str | None:
    """Translates an unknown key that other trainers use; None for any other.

    Args:
        key: names on the way to it.
        value: its value; in a foreign table the first known name is translated.
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
    """Explains an old key, with the remedy; None for any other.

    Args:
        key: names on the way to it.
    """
    dotted = ".".join(map(str, key))
    of_any_name = ".".join([*map(str, key[:1]), "<name>", *map(str, key[2:])])
    if new := MOVED.get(dotted) or MOVED.get(of_any_name):
        return f"is {new.replace('<name>', '.'.join(map(str, key[1:2])))} now; use that"
    why = GONE.get(dotted) or GONE.get(of_any_name)
    return f"is gone, {why}" if why else None


def with_advanced(tree: dict[str, Any]) -> dict[str, Any]:
    """Returns the job of an older run with its keys where they are now."""
    found = copy.deepcopy(tree)
    for section, keys in _ADVANCED.items():
        for table in _tables(found, section.split(".")):
            if old := {key: table.pop(key) for key in keys.split() if key in table}:
                table["advanced"] = old | table.get("advanced", {})
    return found


def _tables(node: Any, path: Sequence[str]) -> Iterator[dict[str, Any]]:  # noqa: ANN401
    if not isinstance(node, dict):
        return
    if not path:
        yield node
        return
    for name in list(node) if path[0] == "<name>" else path[:1]:
        yield from _tables(node.get(name), path[1:])
