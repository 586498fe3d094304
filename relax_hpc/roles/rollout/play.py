"""Plays an episode of a job without engines, with given replies."""

import asyncio
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from relax_hpc.config.run import RunConfig
from relax_hpc.data.conversation import Conversation
from relax_hpc.data.source import Prompt, PromptSource
from relax_hpc.environments import registry as environments
from relax_hpc.environments.record import EpisodeRecord
from relax_hpc.environments.rewards import trial
from relax_hpc.environments.rewards.contract import Sample, Score
from relax_hpc.errors import ConfigError, show
from relax_hpc.inference.generation import Draft, Generation, Sampling
from relax_hpc.roles.rollout.episodes import Episode, Episodes, rows_of, seed_of
from relax_hpc.roles.rollout.prompt_check import limits_of
from relax_hpc.roles.rollout.sampling import media_workers
from relax_hpc.schema import FinishReason, Trajectory

LONGEST_S = 300.0


class Played(NamedTuple):
    prompt: Prompt
    episode: Episode
    rows: list[Trajectory]


class Sayings:
    """Replaces engines: returns given texts in turn, and repeats the last one."""

    def __init__(self, conversation: Conversation, texts: Sequence[str], stop_token: int) -> None:
        """Starts with the first text.

        Args:
            texts: at least one.
            stop_token: appended to every reply that has room for it.
        """
        self._conversation, self._left, self._stop_token = conversation, list(texts), stop_token

    async def sample(
        self,
        given: Sequence[int],
        draft: Draft,
        how: Sampling,
        *,
        seed: int,
        homes: Sequence[Hashable],
    ) -> Generation:
        """Implements `environments.session.Sampler`, without randomness."""
        await asyncio.sleep(0)  # an episode without end can be broken off
        text = self._left.pop(0) if len(self._left) > 1 else self._left[0]
        tokens = [*self._conversation.plain(text), *[self._stop_token] * (not how.ignore_eos)]
        size = how.end(tokens, 0) if how.end else None
        is_cut = size is None and len(tokens) > how.max_new_tokens
        tokens = tokens[: how.max_new_tokens if size is None else size]
        draft.mark(0, 0)
        draft.take(tokens, [0.0] * len(tokens))
        return draft.finish(FinishReason.LENGTH if is_cut else FinishReason.STOP)


def play(config: RunConfig, source: PromptSource, texts: Sequence[str]) -> Played:
    """Plays an episode of the first prompt, and scores it.

    This runs user code. A reward that calls engines is left out.

    Args:
        texts: replies of the policy; the prompt's answer if empty.

    Raises:
        ConfigError: the environment or the reward fails, or the episode does not end.
    """
    prompt = source.first()
    return asyncio.run(_play(config, source, prompt, texts or [prompt.answer]))


async def _play(
    config: RunConfig, source: PromptSource, prompt: Prompt, texts: Sequence[str]
) -> Played:
    stop_token = source.tokenizer.eos_token_id
    said = f"{prompt.where}: an episode in which the policy says {show(texts[0])}"

    async def score(samples: Sequence[Sample]) -> list[Score]:
        return [await trial.score(config.reward, each) for each in samples]

    async with media_workers(config, source) as workers:
        episodes = Episodes(
            config,
            environments.make(config.rollout),
            Sayings(source.conversation, texts, stop_token),
            source.conversation,
            score,
            max_tokens=limits_of(config).trained,
            workers=workers,
            media_tokens=source.media_tokens,
        )
        how, seed = episodes.how(config.rollout.temperature), seed_of(config.seed, 0, 0)
        try:
            async with asyncio.timeout(LONGEST_S):
                [episode] = await episodes.run(prompt, [EpisodeRecord()], how, 0, [seed])
        except TimeoutError:
            raise ConfigError(
                f"rollout.environment = {config.rollout.environment!r}: {said} has not ended after "
                f"{LONGEST_S:g} s; let it end, or say more with --reply"
            ) from None
    if episode.score.error is not None and episode.score.error != trial.NOT_ASKED:
        raise ConfigError(f"{said} fails: {episode.score.error}; correct it")
    return Played(prompt, episode, list(rows_of(0, 0, prompt, seed, episode)))
