"""Tries out a reward before anything is queued."""

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import replace

from relax_hpc.config.rollout import RewardConfig
from relax_hpc.environments.rewards import registry
from relax_hpc.environments.rewards.contract import (
    RewardDeadline,
    Sample,
    Score,
    Weighted,
    check_settings,
    fail,
)
from relax_hpc.environments.rewards.process import Worker, WorkerLostError
from relax_hpc.environments.rewards.registry import Term
from relax_hpc.environments.rewards.scorer import limits_of
from relax_hpc.errors import ConfigError, show

NOT_ASKED = "asks engines of the run, of which there are none now"
WRONG = "I do not know."
"""A wrong response, as a policy gives at first."""
_TO_A_WRONG_ONE = (
    "; more than reward.advanced.most_errors such responses would end the run: return a number, "
    "say 0.0, for what is no answer"
)


def check(
    config: RewardConfig,
    sample: Sample,
    pools: Collection[str] = (),
    of_others: Sequence[Sample] = (),
) -> None:
    """Calls a plugin in a worker process with the right answer and a wrong one; a built-in reward
    with the right answer, after checking its settings.

    Does not call rewards that use engines, which do not run yet, or a service.

    Args:
        sample: to be scored.
        pools: of the job, besides the policy's own.
        of_others: one sample of each further source, if terms are for some.

    Raises:
        ConfigError: no such reward or settings, it cannot be imported or called, or gave no score.
    """
    terms = registry.terms_of(config)
    for term in terms:
        if not registry.is_plugin(term.name):
            _check_built_in(term, config.deadline_s)
            for each in (sample, *of_others):
                _try_built_in(term, each, config.deadline_s)
    if any(registry.is_plugin(term.name) for term in terms):
        try:
            asyncio.run(_try(terms, config, [sample, *of_others], pools))
        except ConfigError as error:
            raise ConfigError(f"{error}; correct it") from None


def _check_built_in(term: Term, deadline_s: float) -> None:
    built_in = registry.REWARDS[term.name]
    module = built_in.import_module()
    check_settings(f"{term.key}.args", module.score, term.args)
    budget_s = built_in.settings(term.args).get("budget_s", 0.0)
    if budget_s >= deadline_s:
        raise ConfigError(
            f"{term.key}.args.budget_s = {budget_s:g}: does not end before reward.deadline_s = "
            f"{deadline_s:g}, which ends the process; lower it, or raise reward.deadline_s"
        )
    if look := getattr(module, "check", None):
        try:
            look(**built_in.settings(term.args))
        except ConfigError as error:
            raise ConfigError(f"{term.key}.name = {term.name!r}: {error}") from None


def _try_built_in(term: Term, sample: Sample, deadline_s: float) -> None:
    tried = Weighted(term.function())
    if tried.kind.is_async or not term.is_for(sample.source):
        return

    async def scores() -> list[Score]:
        return await tried.scores([sample], RewardDeadline(deadline_s))

    _refuse(f"{term.key}.name = {term.name!r}", sample, asyncio.run(scores()))


def _refuse(key: str, sample: Sample, scores: Sequence[Score], remedy: str = "") -> None:
    for score in scores:
        if score.error is not None:
            said = f"scoring the response {show(sample.response)} to a prompt of yours"
            raise ConfigError(f"{key}: {said}, {score.error}{remedy}")


def _choose_tried(samples: Sequence[Sample], most_errors: float) -> list[Sample]:
    """The samples for a plugin: right answers, and a wrong one, unless each may fail."""
    wrong = [replace(samples[0], response=WRONG)] if most_errors < 1 else []
    return [*samples, *wrong]


async def _try(
    terms: Sequence[Term], config: RewardConfig, samples: Sequence[Sample], pools: Collection[str]
) -> None:
    key = " and ".join(f"{each.key}.name = {each.name!r}" for each in terms)
    worker, sample = await Worker.start(terms, limits_of(config)), samples[0]
    try:
        if worker.kind.pools is not None:
            _check_pools(key, worker.kind.pools, pools)
            return
        for sample in _choose_tried(samples, config.advanced.most_errors):
            group = [sample, sample] if worker.kind.sees_group else [sample]
            scores = await worker.ask(group)
            if any(score.error is not None for score in scores):
                break
    except WorkerLostError as error:
        scores = [fail(str(error))]
    finally:
        await worker.end()
    remedy = _TO_A_WRONG_ONE if sample.response == WRONG else ""
    _refuse(key, sample, scores, remedy)


async def score(config: RewardConfig, sample: Sample) -> Score:
    """Scores a response in a worker process; the error is `NOT_ASKED` for a reward that uses
    engines.

    Raises:
        ConfigError: the reward cannot be imported or called.
    """
    worker = await Worker.start(registry.terms_of(config), limits_of(config))
    try:
        if worker.kind.pools is not None:
            return fail(NOT_ASKED)
        return (await worker.ask([sample]))[0]
    except WorkerLostError as error:
        return fail(str(error))
    finally:
        await worker.end()


def _check_pools(key: str, asked: Collection[str], pools: Collection[str]) -> None:
    missing = sorted(set(asked) - set(pools))
    if missing or not pools:
        name = missing[0] if missing else "<name>"
        raise ConfigError(
            f"{key}: it asks engines{f' of a pool {name!r}' if missing else ''}, and the job has "
            f"{', '.join(pools) or 'no other than rollout'}; add a table "
            f"[engines.{name}]"
        )
