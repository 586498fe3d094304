"""Keeps responses that the end of a job interrupts on the bus, for the next task to continue.

An episode's record has the tokens, logprobs and policy versions of every call. The environment is
run again from its start, and its calls are answered from the record until that ends.
"""

import json
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Self

from relax_hpc.bus.durable import Space
from relax_hpc.config.run import RunConfig
from relax_hpc.environments.record import EpisodeRecord, break_off, record_of
from relax_hpc.environments.rewards.contract import Score
from relax_hpc.errors import ConfigError
from relax_hpc.roles.context import TaskContext
from relax_hpc.roles.ending import Ending
from relax_hpc.roles.idle import Idle
from relax_hpc.roles.rollout.episodes import Episode, Grouper, rows_of, seed_of
from relax_hpc.roles.rollout.folders import MODEL, Folders, digests_of
from relax_hpc.runtime.paths import RunPaths
from relax_hpc.runtime.telemetry.events import EventWriter
from relax_hpc.schema import PromptGroup, Trajectory
from relax_hpc.weights.pull_snapshot import NewestVersion

log = logging.getLogger(__name__)


class AnnouncedEnd:
    """The job's announced end for a rollout task, and the groups to keep then.

    Args:
        newest_version: returns the newest weights available to engines.
    """

    def __init__(
        self,
        ending: Ending,
        unfinished: "Unfinished",
        idle: Idle | None = None,
        newest_version: Callable[[], int] = lambda: 0,
    ) -> None:
        self._ending, self._unfinished = ending, unfinished
        self._idle, self._newest_version = idle or Idle(None), newest_version
        self._is_kept = False

    @classmethod
    def of(
        cls,
        config: RunConfig,
        paths: RunPaths,
        context: TaskContext,
        number: int,
        unfinished: "Unfinished",
    ) -> Self:
        """Returns the announced end for rollout task `number`."""
        ending = Ending(paths, context.attempt, paths.keeps(context.attempt, number))
        idle = Idle.of(config, paths, context)
        return cls(ending, unfinished, idle, NewestVersion(config, paths))

    def begin(self, *, start: int) -> None:
        """Takes up groups kept by an earlier task, from guid `start` on."""
        self._unfinished.recall(start=start)
        self._ending.will_save()

    def is_near(self) -> bool:
        is_near = self._ending.is_near()
        if self._is_kept and not is_near:  # the job goes on
            self._ending.will_save()
            self._is_kept = False
        return is_near

    def note(self, version: int | None, *, idle: bool) -> None:
        """Takes whether the task is idle with engines that hold `version`."""
        # With newer weights there may be something to do.
        held = -1 if version is None else version
        self._idle.note(idle=idle and held >= 0 and held >= self._newest_version())

    def keep(self, guids: Collection[int], held: Sequence[PromptGroup] = ()) -> None:
        """Keeps the unfinished groups, and finished ones that no batch may have yet; called
        repeatedly while the end is near."""
        if not self._is_kept:
            self._ending.note_saved(self._unfinished.keep(guids, held))
            self._is_kept = True

    def close(self) -> None:
        self._ending.note_saved(0)


class Unfinished:
    """The begun and unfinished prompt groups of a rollout task.

    Args:
        grouper: has the prompts and records of running groups.
        events: record what is kept and what is continued.
    """

    def __init__(
        self,
        config: RunConfig,
        grouper: Grouper,
        folders: Folders,
        events: EventWriter,
    ) -> None:
        self._config, self._grouper = config, grouper
        self._folders, self._events = folders, events

    def recall(self, *, start: int) -> None:
        """Gives the grouper the groups kept by an earlier task, from guid `start` on.

        Raises:
            ConfigError: a file of the model or its tokenizer has changed since.
        """
        found = {g: group for g, group in self._folders.partial.items() if g >= start}
        num_damaged = self._folders.num_damaged_tokens
        most = self._config.rollout.advanced.max_continuations
        again = {g for g in found if most is not None and self._folders.times_kept(g) > most}
        self._check_model(found)
        for guid, group in found.items():
            if guid not in again:
                self._grouper.running[guid] = _records(group, self._siblings)
        if found or num_damaged:
            kept = [group for guid, group in found.items() if guid not in again]
            self._events.emit(
                "continued",
                num_groups=len(kept),
                num_tokens=sum(map(num_sampled, kept)),
                num_dropped=sum(num_sampled(found[guid]) for guid in again),
                num_damaged=num_damaged,
            )

    def keep(self, guids: Collection[int], held: Sequence[PromptGroup] = ()) -> int:
        """Publishes the partial results of some groups that are no longer sampled, and `held` ones.

        Returns:
            Number of groups with results.
        """
        begun = sorted(self._grouper.running.keys() & set(guids))
        num_lost = sum(map(self._break_off, begun))
        num_lost += sum(map(self._num_held, self._grouper.asked.keys() - set(guids)))
        groups = list[PromptGroup]()
        found = [group for guid in begun if num_sampled(group := self._group(guid))]
        found += [PromptGroup(g.guid, _without_media(g.trajectories)) for g in held]
        for lot in self._folders.lots(found) if found else []:
            if Space().write(partial(self._folders.put_partial, lot)):
                groups += lot
            else:
                log.error("no room for %d unfinished prompt groups: sampled again", len(lot))
                num_lost += sum(map(num_sampled, lot))
        num_tokens = sum(map(num_sampled, groups))
        if groups or num_lost:
            self._events.emit(
                "unfinished", num_groups=len(groups), num_tokens=num_tokens, num_lost=num_lost
            )
            log.info(
                "kept %d tokens of %d unfinished prompt groups; %d are lost",
                num_tokens, len(groups), num_lost,
            )  # fmt: skip
        return len(groups)

    @property
    def _siblings(self) -> int:
        return self._config.rollout.samples_per_prompt

    def _break_off(self, guid: int) -> int:
        """Prepares a group for being continued; returns how many tokens that loses."""
        if guid not in self._grouper.asked:  # it is still as it was kept before
            return 0
        return sum(map(break_off, self._grouper.running[guid]))

    def _num_held(self, guid: int) -> int:
        """Counts the sampled tokens of a group that ignores cancellation."""
        records = self._grouper.running[guid]
        return sum(len(call.draft.token_ids) for record in records for call in record.calls)

    def _group(self, guid: int) -> PromptGroup:
        prompt = self._grouper.asked.get(guid)
        if prompt is None:  # nobody has gone on with it
            return self._folders.partial[guid]
        rows = list[Trajectory]()
        for sibling, record in enumerate(self._grouper.running[guid]):
            seed, episode = seed_of(self._config.seed, guid, sibling), Episode(record, Score(0.0))
            rows += rows_of(guid, sibling, prompt, seed, episode)
        return PromptGroup(guid, _without_media(rows))

    def _check_model(self, guids: Collection[int]) -> None:
        path, said = self._config.model.path, self._folders.partial_origin
        now = digests_of(path) if guids else ""
        for guid in (each for each in guids if said[each].get(MODEL, now) != now):
            before = str(said[guid][MODEL])
            raise ConfigError(
                f"model.path = {str(path)!r}: {_difference(before, now)}: not as responses to "
                f"prompt group {guid} were begun with; put it back as it was"
            )


def _difference(before: str, now: str) -> str:
    old, new = json.loads(before), json.loads(now)
    return ", ".join(sorted(n for n in old.keys() | new.keys() if old.get(n) != new.get(n)))


def _without_media(rows: Iterable[Trajectory]) -> list[Trajectory]:
    """Returns the rows without what their prompt has."""
    return [row._replace(media=(), media_spans=row.media_spans[:0]) for row in rows]


def num_sampled(group: PromptGroup) -> int:
    return sum(int(row.loss_mask.sum()) for row in group.trajectories)


def _records(group: PromptGroup, siblings: int) -> list[EpisodeRecord]:
    return [
        record_of([row for row in group.trajectories if row.sibling == sibling])
        for sibling in range(siblings)
    ]
