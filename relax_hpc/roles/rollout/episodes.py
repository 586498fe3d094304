"""Episodes of a rollout task: run side by side, scored together, made into rows of the bus."""

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
from relax_hpc.environments.base import Environment, Outcome
from relax_hpc.environments.record import Call, Record, sequences
from relax_hpc.environments.session import Sampler, Session
from relax_hpc.environments.turn_media import TurnMedia
from relax_hpc.errors import DeadlyRequestError, EngineError, RelaxError, shown
from relax_hpc.media.workers import MediaWorkers
from relax_hpc.prompts.conversation import Conversation
from relax_hpc.prompts.media_tokens import MediaTokens
from relax_hpc.prompts.source import Prompt, PromptSource
from relax_hpc.rewards.contract import Sample, Score, as_score, failed
from relax_hpc.rewards.limit import ErrorLimit
from relax_hpc.roles.rollout.side_by_side import side_by_side
from relax_hpc.sampling.how import How
from relax_hpc.schema import FinishReason, PromptGroup, Trajectory
from relax_hpc.user_programs import raised_in_call

_ENDED = tuple(reason.name.lower() for reason in FinishReason)
"""Words in which a reward is told how a response ended."""


ScoreGroup = Callable[[Sequence[Sample]], Awaitable[Sequence[Score]]]
"""The job's reward, of all responses to a prompt."""


Noted = Callable[[Sequence[Score], str], Sequence[Score]]
"""Counts scores that environments gave for a prompt of a source; says what those that failed are
worth."""


IsRetired = Callable[[int, int], Awaitable[bool]]
"""Whether a prompt is passed over: of a guid, and its row of the data."""


class Episode(NamedTuple):
    """One that has ended."""

    record: Record
    score: Score
    """Parts by name, one at least unless there is an error."""
    metrics: Mapping[str, float] = {}
    """Other numbers of the environment, by name."""
    seconds: Mapping[str, float] = {}
    """How long parts of it took, by name."""

    @property
    def told(self) -> dict[str, float]:
        """Numbers for the event of a shard."""
        return {**self.metrics, **self.seconds}


class Episodes:
    """Runs the episodes of a prompt."""

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
            config: of the run.
            environment: what an episode is.
            sampler: the engines.
            conversation: how messages become tokens.
            score: the job's reward.
            max_tokens: as long as a conversation may become.
            noted: is told of scores that are not the job's reward's.
            workers: decode media; None of a model that reads text only.
            media_tokens: how media of environments become tokens; None of such a model.
        """
        self._config, self._environment, self._sampler = config, environment, sampler
        self._conversation, self._score, self._max_tokens = conversation, score, max_tokens
        self._noted, self._workers, self._media_tokens = noted, workers, media_tokens

    def how(self, temperature: float, min_version: int = 0) -> How:
        """The run's settings; `min_version` is the oldest policy that may sample a token."""
        limit = self._config.rollout.max_new_tokens
        end = self._conversation.stop(self._config.rollout.stop)
        return How(temperature, limit, self._max_tokens, min_version, end=end)

    def how_heldout(self, settings: EvalConfig) -> How:
        """The settings of a held-out set."""
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
        records: Sequence[Record],
        how: How,
        group: Hashable,
        seeds: Sequence[int],
    ) -> list[Episode]:
        """Runs one episode for each record, all at once, and scores them together.

        One in which the environment fails has no score but its reason.

        Args:
            prompt: of all of them.
            records: get the calls; those that hold some are gone on with.
            how: they are sampled.
            group: their name, among all that run at a time.
            seeds: of each.
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
                    running.create_task(self._played(shown, group, begin(record, seed)))
                    for record, seed in zip(records, seeds, strict=True)
                ]
        if any(task.cancelled() for task in tasks):  # else it would pass for an end of the run
            raise RelaxError(f"{prompt.where}: an episode of the environment cancelled itself")
        played = [task.result() for task in tasks]
        seconds = {"media/prepare_s": prepare_s} if prompt.measured else {}
        return await self._scored(prompt, records, played, seconds)

    async def _played(self, prompt: Prompt, group: Hashable, session: Session) -> "_Played":
        begun = time.perf_counter()
        try:
            found = _played(await self._environment.rollout(prompt, session))
            return found._replace(seconds={"time/episode": time.perf_counter() - begun})
        except Exception as error:
            failure = session.failure or error  # of engines, whatever became of it on the way
            if isinstance(failure, DeadlyRequestError):
                return _Played(failed(f"engines: {failure}"))
            if isinstance(failure, EngineError):
                where = f"{prompt.where}, group {_name_of(group)}"
                raise type(failure)(f"{where}: {failure}") from error
            if session.failure or isinstance(error, RelaxError):
                raise failure  # noqa: B904 -- its own cause stays
            return _Played(failed(f"environment: {raised_in_call(error)}"))
        except SystemExit as error:  # which would end the task as if the run were over
            where = f"{prompt.where}: an episode of the environment"
            raise RelaxError(f"{where} called sys.exit({error.code!r})") from error

    @asynccontextmanager
    async def _with_media(self, prompt: Prompt) -> AsyncIterator[Prompt]:
        """The prompt with its media, decoded once for all siblings, as long as it is asked."""
        if not prompt.measured:
            yield prompt
            return
        assert self._workers is not None, "there is a recipe, or prompts have no media"
        async with self._workers.prepared(prompt.measured, prompt.spans) as made:
            yield replace(prompt, media=made.media, view=made.view)

    def _session(
        self,
        prompt: Prompt,
        how: How,
        group: Hashable,
        turn_media: TurnMedia | None,
        record: Record,
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

    async def _scored(
        self,
        prompt: Prompt,
        records: Sequence[Record],
        played: Sequence["_Played"],
        seconds: Mapping[str, float],
    ) -> list[Episode]:
        """The rewards of environments; of the others the job's, for what was said last. All took
        these seconds."""
        known = {n: each.score for n, each in enumerate(played) if each.score}
        left = [n for n in range(len(played)) if n not in known]
        scores = dict(zip(known, self._noted([*known.values()], prompt.source), strict=True))
        if left:
            begun = time.perf_counter()
            given = await self._score([self._sample(prompt, records[n]) for n in left])
            seconds = {**seconds, "time/reward": time.perf_counter() - begun}
            scores |= dict(zip(left, map(self._named, given), strict=True))
        return [
            Episode(record, scores[n], each.metrics, {**each.seconds, **seconds})
            for n, (record, each) in enumerate(zip(records, played, strict=True))
        ]

    def _named(self, score: Score) -> Score:
        """A reward that is made of nothing is the only part of itself."""
        if score.parts or score.error is not None:
            return score
        return Score(score.value, {self._config.reward.only_name: score.value})

    def texts(self, episode: Episode) -> list[str]:
        """Returns what the policy said in each call."""
        return [self._conversation.decode(call.draft.token_ids) for call in episode.record.calls]

    def is_in_thought(self, episode: Episode) -> bool:
        """Whether what was said last began inside a thought."""
        calls = episode.record.calls[-1:]
        return any(self._conversation.opens_thought(call.given) for call in calls)

    def _sample(self, prompt: Prompt, record: Record) -> Sample:
        """Makes a sample of what was said last, for the reward."""
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
    """An episode that was played, looked through."""

    score: Score | None
    """None where the job's reward decides."""
    metrics: Mapping[str, float] = {}
    seconds: Mapping[str, float] = {}


def _played(given: object) -> _Played:
    """Looks through what an environment returned, which is somebody else's.

    Raises:
        TypeError: it is no outcome, or something in it is no number.
        ValueError: there are too many rewards, or one has a name that is none.
    """
    if not isinstance(given, Outcome):
        kind = f"{Outcome.__module__}.{Outcome.__name__}"
        raise TypeError(f"rollout returned no {kind}, but {shown(given)}")
    if not all(isinstance(each, Mapping) for each in given):
        raise TypeError(f"rewards and metrics are numbers by name, not {shown(given)}")
    rewards, metrics = ({k: _number(k, v) for k, v in each.items()} for each in given)
    total = sum(value for name, value in rewards.items() if "/" not in name)
    return _Played(as_score(Score(total, rewards)) if rewards else None, metrics)


def _number(name: str, given: object) -> float:
    try:
        return as_score(given).value
    except (TypeError, ValueError):
        raise TypeError(f"rollout returned {name} = {shown(given)}, no finite number") from None


class Grouper:
    """Turns a prompt ordinal into a finished prompt group.

    It raises a RewardError once the reward fails too often.
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
        self._limit = ErrorLimit(config.reward.most_errors)
        self.running: dict[int, list[Record]] = {}
        """Records of groups that are not finished, one per sibling, by ordinal: those under way,
        and those that were cancelled."""
        self.asked: dict[int, Prompt] = {}
        """Prompts of those, but for groups that are to be gone on with and were not begun here."""

    async def __call__(self, guid: int, min_version: int) -> PromptGroup:
        prompt, rollout = await self._prompts.asked(guid), self._config.rollout
        replays = self._config.replays_routing
        siblings = range(rollout.samples_per_prompt)
        if self._is_retired and await self._is_retired(guid, prompt.index):
            return retired_group(guid, prompt, len(siblings))
        seeds = [seed_of(self._config.seed, guid, sibling) for sibling in siblings]
        how = self._episodes.how(rollout.temperature, min_version)
        records = self.running.setdefault(guid, [Record() for _ in siblings])
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
        return PromptGroup(guid, rows, [self._told(prompt, each) for each in episodes])

    def _told(self, prompt: Prompt, episode: Episode) -> Mapping[str, float]:
        """The numbers of an episode, with the reward of its source where there are several."""
        if len(self._config.prompts.sources) < 2 or episode.score.error is not None:
            return episode.told
        return {**episode.told, f"reward/{prompt.source}": episode.score.value}


def retired_group(guid: int, prompt: Prompt, siblings: int) -> PromptGroup:
    """Stands on the bus for a group that nobody was asked for: rows without a response."""
    nothing = Episode(Record(), Score(0.0))
    rows = [row for n in range(siblings) for row in rows_of(guid, n, prompt, 0, nothing)]
    return PromptGroup(guid, [row._replace(finish=FinishReason.RETIRED) for row in rows])


def rows_of(
    guid: int, sibling: int, prompt: Prompt, seed: int, episode: Episode
) -> Iterator[Trajectory]:
    """A row for each sequence of an episode; one without a call is its prompt."""
    record = episode.record if episode.record.calls else Record([Call(prompt.token_ids)])
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
    """The guid of a group of training; of an evaluation its set, and the number of the prompt."""
    return "/".join(map(str, group)) if isinstance(group, tuple) else str(group)


def seed_of(run_seed: int, guid: int | str, sibling: int) -> int:
    """The sampling seed of one episode: the same after every restart, below 2**31."""
    content = f"{run_seed}/{guid}/{sibling}".encode()
    return int.from_bytes(hashlib.sha256(content).digest()[:4], "big") >> 1
