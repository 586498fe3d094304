"""Keys of older jobs: refused, with the name that they have now."""

MOVED: dict[str, str] = {
    "actor.ddp": "actor.optimizer.ddp",
    "algorithm.num_steps": "schedule.num_steps",
    "algorithm.prompts_per_step": "schedule.prompts_per_step",
    "algorithm.max_staleness": "schedule.max_staleness",
    "algorithm.over_age": "schedule.over_age",
    "algorithm.logprob_check": "weights.logprob_check",
    "algorithm.max_logprob_gap": "weights.max_logprob_gap",
    "prompts.heldout": "eval.heldout.path",
    "eval.every": "eval.heldout.every",
    "eval.num_prompts": "eval.heldout.num_prompts",
}
"""Old dotted key -> the new one, or what to write instead."""
