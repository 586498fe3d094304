"""Settings of an algorithm and of the rest of a job that cannot be together."""

from typing import TYPE_CHECKING

from relax_hpc.algorithms.advantages.none import NoAdvantage
from relax_hpc.algorithms.advantages.pass_k import PassK
from relax_hpc.algorithms.algorithm import Algorithm
from relax_hpc.algorithms.groups import Refill
from relax_hpc.algorithms.kl import Kl
from relax_hpc.algorithms.presets import KL_IN_THE_REWARD

if TYPE_CHECKING:
    from relax_hpc.config.run import RunConfig

_BELOW_ZERO = {"length": "a penalty", "repetition": "a penalty"}
"""Rewards that are built in -> what they say that is below 0."""


def check(config: "RunConfig") -> None:
    """Looks at all pairs of settings that do not go together.

    Raises:
        ValueError: two do not; names the key and the remedy.
    """
    algorithm = config.algorithm
    _trust_region_holds(algorithm, config.schedule.max_staleness)
    _weighs_once(algorithm)
    _mean_is_of_ratios(algorithm)
    _pull_has_a_gradient(algorithm)
    _something_teaches(algorithm)
    _there_are_siblings(algorithm, config.rollout.samples_per_prompt)
    _long_responses_can_be_told(algorithm, config)
    _solved_groups_are_on_record(algorithm, config)
    _batch_can_be_split(algorithm, config)
    _rewards_are_not_negative(algorithm, config)
    _critic_and_values_need_each_other(algorithm, config)


def _trust_region_holds(algorithm: Algorithm, lag: int) -> None:
    loss = algorithm.loss
    updates = algorithm.epochs_per_step * algorithm.mini_batches
    if not loss.has_trust_region or "old" not in loss.needs().anchors or updates > 1 or not lag:
        return
    if "rollout" in loss.needs().anchors:
        return
    raise ValueError(
        "algorithm.loss.anchor = 'old': with one epoch and one mini-batch the policy before the "
        f"step is the one that is trained, so every ratio is 1, {loss.name} bounds nothing, and it "
        f"is a plain policy gradient on samples up to {lag} policies old; use anchor = 'rollout', "
        "or algorithm.epochs_per_step or algorithm.mini_batches of 2 or more, or loss.name = "
        "'policy_gradient'"
    )


def _weighs_once(algorithm: Algorithm) -> None:
    correction = algorithm.correction
    if correction.has_ratios and "rollout" in algorithm.loss.needs().anchors:
        raise ValueError(
            f"algorithm.correction.name = {correction.name!r}: the ratio of algorithm.loss.name = "
            f"{algorithm.loss.name!r} is to the sampler already, so that importance would count "
            "twice; set correction.name = 'none', or loss.anchor = 'old'"
        )


def _mean_is_of_ratios(algorithm: Algorithm) -> None:
    if algorithm.loss.ratio_of == "sequence" and algorithm.aggregation != "sequence":
        raise ValueError(
            f"algorithm.aggregation = {algorithm.aggregation!r}: the ratio of "
            f"{algorithm.loss.name} is of a sequence, and its gradient would grow with the "
            "sequence's length; use 'sequence'"
        )


def _pull_has_a_gradient(algorithm: Algorithm) -> None:
    kl = algorithm.kl
    if not isinstance(kl, Kl):
        return
    if kl.name == "k1" and kl.place == "loss":
        raise ValueError(
            "algorithm.kl.name = 'k1': in the loss it has no gradient towards the reference; use "
            "'rk3', or algorithm.kl.place = 'reward'"
        )
    if kl.name != KL_IN_THE_REWARD and kl.place == "reward":
        raise ValueError(
            f"algorithm.kl.name = {kl.name!r}: in the reward it has not the divergence's gradient; "
            f"use {KL_IN_THE_REWARD!r}, or algorithm.kl.place = 'loss'"
        )


def _something_teaches(algorithm: Algorithm) -> None:
    others = (algorithm.distill, algorithm.kl, algorithm.entropy)
    is_alone = not any(part.needs().every_row for part in others)
    if isinstance(algorithm.advantage, NoAdvantage) and is_alone:
        raise ValueError(
            "algorithm.advantage.name = 'none': is of teachers, and there is none, so that nothing "
            "would be learned; use another advantage, or algorithm.distill.name = 'advantage' and "
            "a table [teachers.NAME]"
        )


def _there_are_siblings(algorithm: Algorithm, siblings: int) -> None:
    least, advantage = algorithm.needs.min_siblings, algorithm.advantage
    if siblings >= least:
        if siblings == 1 and isinstance(algorithm.groups, Refill):
            raise ValueError(
                "rollout.samples_per_prompt = 1: algorithm.groups.name = 'refill' wants prompts "
                "whose responses differ, and skips all others; use 2 or more, or groups.name = "
                "'as_sampled'"
            )
        return
    k = getattr(advantage, "k", None)
    if k == least:
        raise ValueError(
            f"algorithm.advantage.k = {k}: there are rollout.samples_per_prompt = {siblings} "
            "siblings to choose from; use at most as many"
        )
    raise ValueError(
        f"rollout.samples_per_prompt = {siblings}: algorithm.advantage.name = {advantage.name!r} "
        f"compares siblings of a prompt; use {least} or more"
    )


def _long_responses_can_be_told(algorithm: Algorithm, config: "RunConfig") -> None:
    groups, rollout = algorithm.groups, config.rollout
    if groups.truncated == "penalty" and isinstance(algorithm.advantage, PassK):
        raise ValueError(
            "algorithm.groups.truncated = 'penalty': a right response that is long would fall "
            f"below algorithm.advantage.right = {algorithm.advantage.right:g}, and count as "
            "wrong; use 'mask', or another advantage"
        )
    if groups.truncated == "penalty" and rollout.environment != "single_turn":
        raise ValueError(
            "algorithm.groups.truncated = 'penalty': an episode of rollout.environment = "
            f"{rollout.environment!r} has several responses; use 'mask', or let its reward do it"
        )
    if (groups.overlong_buffer or 0) > rollout.max_new_tokens:
        raise ValueError(
            f"algorithm.groups.overlong_buffer = {groups.overlong_buffer}: is longer than "
            f"rollout.max_new_tokens = {rollout.max_new_tokens}; use a part of it"
        )


def _solved_groups_are_on_record(algorithm: Algorithm, config: "RunConfig") -> None:
    if not config.prompts.retire_after:
        return
    named = f"prompts.retire_after = {config.prompts.retire_after}"
    if not isinstance(algorithm.groups, Refill):
        raise ValueError(
            f"{named}: algorithm.groups.name = {algorithm.groups.name!r} trains on solved groups, "
            "and keeps no record of them; use 'refill', or leave retire_after out"
        )
    if config.schedule.over_age != "wait":
        raise ValueError(
            f"{named}: with schedule.over_age = {config.schedule.over_age!r} groups count by when "
            "they come; use 'wait', or leave retire_after out"
        )


def _batch_can_be_split(algorithm: Algorithm, config: "RunConfig") -> None:
    prompts, parts = config.schedule.prompts_per_step, algorithm.mini_batches
    if parts > prompts:
        raise ValueError(
            f"algorithm.mini_batches = {parts}: a batch has schedule.prompts_per_step = {prompts} "
            "prompts; use at most as many"
        )
    if algorithm.waits_for_the_batch and config.actor.portion_micro_batches:
        name = next(
            (
                f"algorithm.{table}.name = {part.name!r}"
                for table, part in algorithm.parts
                if part.needs().prepass or part.needs().scope == "batch"
            ),
            f"algorithm.mini_batches = {parts}",
        )
        raise ValueError(
            f"actor.portion_micro_batches = {config.actor.portion_micro_batches}: {name} needs the "
            "whole batch before any of it is trained on; remove it"
        )


def _rewards_are_not_negative(algorithm: Algorithm, config: "RunConfig") -> None:
    if algorithm.advantage.name != "max_rl":
        return
    if algorithm.groups.truncated == "penalty":
        raise ValueError(
            "algorithm.groups.truncated = 'penalty': lowers a reward of 0, and "
            "algorithm.advantage.name = 'max_rl' takes none below 0; use 'mask', or another "
            "advantage"
        )
    for title, term in config.reward.every_term.items():
        key = f"reward.terms.{title}" if title else "reward"
        said = _BELOW_ZERO.get(term.name)
        if term.name == "dapo" and term.args.get("wrong", -1.0) != 0:
            said = "-1 where it is wrong"
        if term.weight < 0:
            raise ValueError(
                f"{key}.weight = {term.weight:g}: algorithm.advantage.name = 'max_rl' takes no "
                "reward below 0; use another advantage"
            )
        if said:
            raise ValueError(
                f"{key}.name = {term.name!r}: is below 0 ({said}), which algorithm.advantage.name "
                "= 'max_rl' does not take; use another reward, or another advantage"
            )


def _critic_and_values_need_each_other(algorithm: Algorithm, config: "RunConfig") -> None:
    wanted, critic = algorithm.needs.columns.get("ragged/values"), config.critic
    if critic is None:
        if wanted:
            raise ValueError(
                f"{wanted}: needs a critic, which gives states their values; add a table [critic]"
            )
        return
    if not wanted:
        raise ValueError(
            "critic: algorithm.advantage.name = "
            f"{algorithm.advantage.name!r} reads no values of states; use 'gae', or "
            "algorithm.preset = 'ppo', or remove [critic]"
        )
    if critic.warmup_steps >= config.num_steps:
        raise ValueError(
            f"critic.warmup_steps = {critic.warmup_steps}: the policy would stand still in all of "
            f"schedule.num_steps = {config.num_steps}; use fewer"
        )
    if getattr(algorithm.kl, "place", "loss") == "reward":
        raise ValueError(
            "algorithm.kl.place = 'reward': the critic learns the reward without it; use 'loss'"
        )
