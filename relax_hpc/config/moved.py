"""Keys of older jobs: refused, with the name that they have now or with what to do instead."""

MOVED: dict[str, str] = {
    "actor.ddp": "actor.optimizer.ddp",
    "algorithm.num_steps": "schedule.num_steps",
    "algorithm.prompts_per_step": "schedule.prompts_per_step",
    "algorithm.max_staleness": "schedule.max_staleness",
    "algorithm.over_age": "schedule.over_age",
    "algorithm.logprob_check": "weights.logprob_check",
    "algorithm.max_logprob_gap": "weights.max_logprob_gap",
    "rollout.engine": "engines.rollout.kind",
    "rollout.num_engines": "engines.rollout.count",
    "rollout.engines_per_task": "engines.rollout.engines_per_task",
    "rollout.nodes_per_engine": "engines.rollout.nodes_per_engine",
    "rollout.placement": "engines.rollout.placement",
    "rollout.max_running_requests": "engines.rollout.max_running_requests",
    "rollout.start_timeout_s": "engines.rollout.start_timeout_s",
    "rollout.hang_timeout_s": "engines.rollout.hang_timeout_s",
    "rollout.load_every_s": "engines.rollout.load_every_s",
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
}
"""Old dotted key -> the new one."""

_ALWAYS_ON = "it is on wherever layout.tensor_parallel is above 1; remove it"
GONE: dict[str, str] = {
    "actor.sequence_parallel": _ALWAYS_ON,
    "reference.sequence_parallel": _ALWAYS_ON,
}
"""Old dotted key -> why it is none any more, and what to do."""
