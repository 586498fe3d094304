"""Keys of older jobs: refused, with the name that they have now."""

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
}
"""Old dotted key -> the new one, or what to write instead."""
