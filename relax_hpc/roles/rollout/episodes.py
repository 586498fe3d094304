"""Runs the episodes of a rollout task concurrently, scores them, and makes rows of them."""

import asyncio
import hashlib
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Hashable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from relax_hpc.config.run import EvalConfig, RunConfig
from relax_hpc.data.conversation import Conversation
from relax_hpc.data.media.workers import MediaWorkers
from relax_hpc.data.media_tokens import MediaTokens
from relax_hpc.data.source import Prompt, PromptSource
from relax_hpc.environments.record import Call, EpisodeRecord, sequences
from relax_hpc.environments.rewards.contract import Sample, Score, as_score, fail
from relax_hpc.environments.rewards.scorer import ErrorLimit
from relax_hpc.environments.session import Environment, Outcome, Sampler, Session, TurnMedia
from relax_hpc.errors import DeadlyRequestError, EngineError, RelaxError, show
from relax_hpc.inference.generation import Sampling
from relax_hpc.runtime.files.user_programs import describe_call_error
from relax_hpc.schema import FinishReason, PromptGroup, Trajectory


@asynccontextmanager
async def side_by_side() -> AsyncIterator[asyncio.TaskGroup]:
    """Yields a task group that raises the first of its errors alone: an exception group would hide
    the message from readers, and whether the error is final."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as errors:
        first: BaseException = errors
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first  # noqa: B904 -- its own cause stays


_ENDED = tuple(reason.name.lower() for reason in FinishReason)


ScoreGroup = Callable[[Sequence[Sample]], Awaitable[Sequence[Score]]]
"""The job's reward, for all responses to a prompt."""


Noted = Callable[[Sequence[Score], str], Sequence[Score]]
"""Counts scores that environments gave for a prompt of a source; returns them with the values of
failed ones filled in."""


IsRetired = Callable[[int, int], Awaitable[bool]]
"""Whether to pass over a prompt, by guid and row of the data."""


class Episode(NamedTuple):
    record: EpisodeRecord
    score: Score
    """Parts by name, at least one unless there is an error."""
    metrics: Mapping[str, float] = {}
    seconds: Mapping[str, float] = {}

    @property
    def told(self) -> dict[str, float]:
        return {**self.metrics, **self.seconds}


class Episodes:
    def __init__(
        self,
        config: RunConfig,
        environment: Environment,
        sampler: Sampler,
        conversation: Conversation,
        score: ScoreGroup,
        *,
        max_tokens: int,
        noted: Noted = lambda scores, _: scores,
        workers: MediaWorkers | None = None,
        media_tokens: MediaTokens | None = None,
    ) -> None:
        """Runs none yet.

        Args:
            max_tokens: limit of a conversation.
            workers: decode media; None for a text model.
            media_tokens: turns media of environments into tokens; None for a text model.
        """
        self._config, self._environment, self._sampler = config, environment, sampler
        self._conversation, self._score, self._max_tokens = conversation, score, max_tokens
        self._noted, self._workers, self._media_tokens = noted, workers, media_tokens

    def how(self, temperature: float, min_version: int = 0) -> Sampling:
        """Returns the run's settings; `min_version` is the oldest policy that may sample a
        token."""
        limit = self._config.rollout.max_new_tokens
        end = self._conversation.stop(self._config.rollout.stop)
        return Sampling(
            temperature, limit, end=end, max_tokens=self._max_tokens, min_version=min_version
        )

    def how_heldout(self, settings: EvalConfig) -> Sampling:
        how = self.how(settings.temperature)
        return how._replace(
            max_new_tokens=settings.max_new_tokens or how.max_new_tokens,
            top_p=settings.top_p,
            top_k=settings.top_k,
            end=how.end if settings.stop is None else self._conversation.stop(settings.stop),
        )

    async def run(
        self,
        prompt: Prompt,
        records: Sequence[EpisodeRecord],
        how: Sampling,
        group: Hashable,
        seeds: Sequence[int],
    ) -> list[Episode]:
        """Runs one episode for each record, all at once, and scores them together.

        An episode whose environment fails has its reason instead of a score.

        Args:
            records: get the calls; those with calls are continued.
        """
        begun, turns = time.perf_counter(), None
        async with self._with_media(prompt) as shown, AsyncExitStack() as opened:
            prepare_s = time.perf_counter() - begun
            if self._workers is not None and self._media_tokens is not None:
                made = TurnMedia(self._media_tokens, self._workers, self._config.prompts)
                turns = await opened.enter_async_context(made)
            begin = partial(self._session, shown, how, group, turns)
            async with side_by_side() as running:
                tasks = [
                    running.create_task(self._play(shown, group, begin(record, seed)))
                    for record, seed in zip(records, seeds, strict=True)
                ]
        if any(task.cancelled() for task in tasks):  # else it would pass for an end of the run
            raise RelaxError(f"{prompt.where}: an episode of the environment cancelled itself")
        played = [task.result() for task in tasks]
        seconds = {"media/prepare_s": prepare_s} if prompt.measured else {}
        return await self._score_episodes(prompt, records, played, seconds)

    async def _play(self, prompt: Prompt, group: Hashable, session: Session) -> "_Played":
        begun = time.perf_counter()
        try:
            found = _check_played(await self._environment.rollout(prompt, session))
            return found._replace(seconds={"time/episode": time.perf_counter() - begun})
        except Exception as error:
            failure = session.failure or error  # of engines, whatever became of it on the way
            if isinstance(failure, DeadlyRequestError):
                return _Played(fail(f"engines: {failure}"))
            if isinstance(failure, EngineError):
                where = f"{prompt.where}, group {_name_of(group)}"
                raise type(failure)(f"{where}: {failure}") from error
            if session.failure or isinstance(error, RelaxError):
                raise failure  # noqa: B904 -- its own cause stays
            return _Played(fail(f"environment: {describe_call_error(error)}"))
        except SystemExit as error:  # which would end the task as if the run were over
            where = f"{prompt.where}: an episode of the environment"
            raise RelaxError(f"{where} called sys.exit({error.code!r})") from error

    @asynccontextmanager
    async def _with_media(self, prompt: Prompt) -> AsyncIterator[Prompt]:
        """Yields the prompt with its media, decoded once for all siblings."""
        if not prompt.measured:
            yield prompt
            return
        assert self._workers is not None, "there is a recipe, or prompts have no media"
        async with self._workers.prepare(prompt.measured, prompt.spans) as made:
            yield replace(prompt, media=made.media, view=made.view)

    def _session(
        self,
        prompt: Prompt,
        how: Sampling,
        group: Hashable,
        turn_media: TurnMedia | None,
        record: EpisodeRecord,
        seed: int,
    ) -> Session:
        return Session(
            prompt,
            record,
            self._sampler,
            self._conversation,
            how,
            group=group,
            episode=(group, seed),
            seed=seed,
            turn_media=turn_media,
        )

    async def _score_episodes(
        self,
        prompt: Prompt,
        records: Sequence[EpisodeRecord],
        played: Sequence["_Played"],
        seconds: Mapping[str, float],
    ) -> list[Episode]:
        """Returns the environments' rewards; for the others the job's reward of the last response.
        All took these seconds."""
        known = {n: each.score for n, each in enumerate(played) if each.score}
        left = [n for n in range(len(played)) if n not in known]
        scores = dict(zip(known, self._noted([*known.values()], prompt.source), strict=True))
        if left:
            begun = time.perf_counter()
            given = await self._score([self._sample(prompt, records[n]) for n in left])
            seconds = {**seconds, "time/reward": time.perf_counter() - begun}
            scores |= dict(zip(left, map(self._name, given), strict=True))
        return [
            Episode(record, scores[n], each.metrics, {**each.seconds, **seconds})
            for n, (record, each) in enumerate(zip(records, played, strict=True))
        ]

    def _name(self, score: Score) -> Score:
        """Adds the reward itself as the only part, if it has no parts."""
        if score.parts or score.error is not None:
            return score
        return Score(score.value, {self._config.reward.only_name: score.value})

    def texts(self, episode: Episode) -> list[str]:
        return [self._conversation.decode(call.draft.token_ids) for call in episode.record.calls]

    def is_in_thought(self, episode: Episode) -> bool:
        calls = episode.record.calls[-1:]
        return any(self._conversation.opens_thought(call.given) for call in calls)

    def _sample(self, prompt: Prompt, record: EpisodeRecord) -> Sample:
        last = record.calls[-1] if record.calls else Call(prompt.token_ids)
        return Sample(
            self._conversation.decode(last.draft.token_ids),
            prompt.messages,
            prompt.answer,
            prompt.metadata,
            _ENDED[FinishReason.ABORT if last.finish is None else last.finish],
            len(last.draft.token_ids),
            prompt.source,
            self._conversation.opens_thought(last.given),
        )


class _Played(NamedTuple):
    score: Score | None
    """None if the job's reward decides."""
    metrics: Mapping[str, float] = {}
    seconds: Mapping[str, float] = {}


def _check_played(given: object) -> _Played:
    """Validates an environment's result, which is user code.

    Raises:
        TypeError: it is no outcome, or a value in it is no number.
        ValueError: there are too many rewards, or one has an invalid name.
    """
    if not isinstance(given, Outcome):
        kind = f"{Outcome.__module__}.{Outcome.__name__}"
        raise TypeError(f"rollout returned no {kind}, but {show(given)}")
    if not all(isinstance(each, Mapping) for each in given):
        raise TypeError(f"rewards and metrics are numbers by name, not {show(given)}")
    rewards, metrics = ({k: _number(k, v) for k, v in each.items()} for each in given)
    total = sum(value for name, value in rewards.items() if "/" not in name)
    return _Played(as_score(Score(total, rewards)) if rewards else None, metrics)


def _number(name: str, given: object) -> float:
    try:
        return as_score(given).value
    except (TypeError, ValueError):
        raise TypeError(f"rollout returned {name} = {show(given)}, no finite number") from None


class Grouper:
    """Turns a guid into a finished prompt group.

    Raises a RewardError once the reward fails too often.
    """

    def __init__(
        self,
        config: RunConfig,
        prompts: PromptSource,
        episodes: Episodes,
        is_retired: IsRetired | None = None,
    ) -> None:
        self._config, self._prompts, self._episodes = config, prompts, episodes
        self._is_retired = is_retired
        self._limit = ErrorLimit(config.reward.advanced.most_errors)
        self.running: dict[int, list[EpisodeRecord]] = {}
        """Records of unfinished groups, one per sibling, by guid: running and cancelled ones."""
        self.asked: dict[int, Prompt] = {}
        """Prompts of these groups, but not of those that an earlier task began."""

    async def __call__(self, guid: int, min_version: int) -> PromptGroup:
        prompt, rollout = await self._prompts.fetch(guid), self._config.rollout
        replays = self._config.replays_routing
        siblings = range(rollout.samples_per_prompt)
        if self._is_retired and await self._is_retired(guid, prompt.index):
            return make_retired_group(guid, prompt, len(siblings))
        seeds = [seed_of(self._config.seed, guid, sibling) for sibling in siblings]
        how = self._episodes.how(rollout.temperature, min_version)
        records = self.running.get(guid, [])
        if not records or self._is_too_old(records, min_version):
            records = self.running[guid] = [EpisodeRecord() for _ in siblings]
        self.asked[guid] = prompt
        episodes = await self._episodes.run(
            prompt, records, how._replace(routed_experts=replays), guid, seeds
        )
        del self.running[guid], self.asked[guid]
        self._limit.add({f"{guid}/{n}": each.score for n, each in enumerate(episodes)})
        rows = [
            row
            for sibling, seed, episode in zip(siblings, seeds, episodes, strict=True)
            for row in rows_of(guid, sibling, prompt, seed, episode)
        ]
        return PromptGroup(guid, rows, [self._collect_numbers(prompt, each) for each in episodes])

    def _is_too_old(self, records: Sequence[EpisodeRecord], min_version: int) -> bool:
        """Whether a group begun before has tokens that its batch may not have."""
        calls = [call for record in records for call in record.calls]
        runs = [version for call in calls for _, version in call.draft.version_runs]
        bounded = self._config.schedule.over_age == "wait"
        return bounded and any(version < min_version for version in runs)

    def _collect_numbers(self, prompt: Prompt, episode: Episode) -> Mapping[str, float]:
        """Returns the numbers of an episode, with the reward of its source if there are several."""
        if len(self._config.prompts.sources) < 2 or episode.score.error is not None:
            return episode.told
        return {**episode.told, f"reward/{prompt.source}": episode.score.value}


def make_retired_group(guid: int, prompt: Prompt, siblings: int) -> PromptGroup:
    """Stands on the bus for a group that was never sampled: rows without a response."""
    nothing = Episode(EpisodeRecord(), Score(0.0))
    rows = [row for n in range(siblings) for row in rows_of(guid, n, prompt, 0, nothing)]
    return PromptGroup(guid, [row._replace(finish=FinishReason.RETIRED) for row in rows])


def rows_of(
    guid: int, sibling: int, prompt: Prompt, seed: int, episode: Episode
) -> Iterator[Trajectory]:
    """Yields a row for each sequence of an episode; one without a call is its prompt."""
    record = episode.record if episode.record.calls else EpisodeRecord([Call(prompt.token_ids)])
    for segment, sequence in enumerate(sequences(record)):
        yield Trajectory(
            guid=guid,
            sibling=sibling,
            segment=segment,
            prompt_index=prompt.index,
            seed=seed,
            token_ids=sequence.token_ids,
            prompt_len=sequence.prompt_len,
            loss_mask=sequence.loss_mask,
            columns={"rollout_logprobs": sequence.logprobs},
            version_runs=sequence.version_runs,
            turns=sequence.turns,
            finish=sequence.finish,
            reward=episode.score.value,
            reward_error=episode.score.error is not None,
            # A part that is alone is the reward itself.
            parts=episode.score.parts if len(episode.score.parts) > 1 else {},
            media=sequence.media,
            media_spans=sequence.media_spans,
            routed_experts=sequence.routed_experts,
        )


def _name_of(group: Hashable) -> str:
    """Returns the guid of a training group, or set and prompt number of an evaluation."""
    return "/".join(map(str, group)) if isinstance(group, tuple) else str(group)


def seed_of(run_seed: int, guid: int | str, sibling: int) -> int:
    """Returns the sampling seed of one episode: the same after every restart, below 2**31."""
    content = f"{run_seed}/{guid}/{sibling}".encode()
    return int.from_bytes(hashlib.sha256(content).digest()[:4], "big") >> 1
