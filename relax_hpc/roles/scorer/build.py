"""Builds a rank of a component whose model scores committed rows.

Rank 0 follows the bus, deals out shards, and writes the scores as a column of sidecars.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from relax_hpc.bus.credits import Credit, CreditTail
from relax_hpc.bus.durable import Space
from relax_hpc.bus.plan import ShardRange
from relax_hpc.bus.reader import BatchIndex, Reader
from relax_hpc.bus.sidecar import Pending, SidecarWriter
from relax_hpc.config.actor import columns_by_teacher, component_of
from relax_hpc.config.model import MegatronConfig, ModelConfig
from relax_hpc.config.run import RunConfig
from relax_hpc.errors import DamagedError
from relax_hpc.roles.dealing.micro_batches import deal_rows
from relax_hpc.roles.dealing.portions import lengths_of, shards_of
from relax_hpc.roles.dealing.sight import sight_of
from relax_hpc.roles.role import ModelRank
from relax_hpc.roles.scorer import loop
from relax_hpc.roles.scorer.loop import Ints, Round
from relax_hpc.roles.teacher.prompts import make_privileged_prompts
from relax_hpc.roles.teacher.routing import taught_by
from relax_hpc.roles.training.build import RankStart, sidecar_writer
from relax_hpc.roles.training.duties import Duties, Floats
from relax_hpc.runtime.telemetry.events import EventWriter
from relax_hpc.runtime.telemetry.timers import Timers
from relax_hpc.schema import ROUTED_EXPERTS
from relax_hpc.trainer.megatron.scorer import MegatronScorer
from relax_hpc.trainer.models.registry import read_architecture

log = logging.getLogger(__name__)
Numbers = npt.NDArray[np.int64]

CREDITS_EVERY_S = 1.0
"""Interval of polling credits: shards to delete, and the end."""
COLUMN = "ragged/ref_logprobs"
POLL_S = 0.05
SIGN_OF_LIFE_S = 30.0
"""Seconds after which waiting ranks hear from rank 0, with or without work."""
MICRO_BATCHES_PER_ROUND = 4
"""Micro-batches per rank in a round; results are written after each round."""


class ScoringView(NamedTuple):
    """The rows that a model scores, and their prompts."""

    scores: Callable[[Numbers], npt.NDArray[np.bool_]]
    """Takes the prompt groups of rows; whether these are scored. The others get nan."""
    prompt: Callable[[int], Ints] | None = None
    """Returns the tokens that replace a data row's prompt; None: rows keep their own."""


class Scoring(NamedTuple):
    """A model that scores, and the column that it writes."""

    model: ModelConfig
    megatron: MegatronConfig
    column: str
    view: ScoringView | None = None


def of_reference(config: RunConfig) -> Scoring:
    return Scoring(config.reference_model, config.reference_megatron, COLUMN)


def of_teacher(config: RunConfig, component: str) -> Scoring:
    name = next(name for name in config.teachers if component_of(name) == component)
    teacher, prompts = config.teachers[name], make_privileged_prompts(config, name)
    return Scoring(
        teacher.model(config.model),
        teacher.megatron(config.actor, name),
        columns_by_teacher(config.teachers)[name],
        ScoringView(taught_by(config, name), prompts.__getitem__ if prompts else None),
    )


def main(rank: ModelRank[RunConfig], scoring: Scoring) -> None:
    """Scores committed rows until the trainer has finished."""
    config, paths, world = rank.config, rank.paths, rank.world
    start = RankStart(rank)
    make = partial(MegatronScorer, seed=config.seed, temperature=config.temperature)
    scorer = start.build(lambda device: make(scoring.model, scoring.megatron, world, device))
    reader, duties = Reader(paths.bus), Duties[Round]()
    if world.rank == 0:
        start.log_phases()
        writer = sidecar_writer(rank, scoring.model.path)
        credits = CreditTail(paths.bus, num_steps=config.num_steps, every_s=CREDITS_EVERY_S)
        duties = ScorerRank0(
            scoring.megatron, scoring.column, writer, reader, credits, rank.events, scoring.view
        )
    columns = _choose_columns(config, scoring)
    loop.run(world, scorer, reader, duties, sight_of(config, reader), columns)
    duties.close()
    reader.close()
    start.end()


def _choose_columns(config: RunConfig, scoring: Scoring) -> Sequence[str]:
    """Returns the columns read besides tokens: the policy's experts, if the reference has as many.

    Without them a reference identical to the policy would give different logprobs.
    """
    if not config.replays_routing or scoring.column != COLUMN:
        return []
    policy, scorer = (read_architecture(model.path) for model in (config.model, scoring.model))
    alike = (policy.experts, policy.num_layers) == (scorer.experts, scorer.num_layers)
    return [ROUTED_EXPERTS] if alike else []


class _RoundUnderWay(NamedTuple):
    """The shards of the last round, in its order."""

    shards: list[Pending]
    timers: Timers
    begin: float
    lengths: Numbers = np.zeros(0, np.int64)
    """[rows] tokens."""
    scored: Numbers = np.zeros(0, np.int64)
    """Numbers of the rows dealt out, rising."""


class ScorerRank0(Duties[Round]):
    """Connects a scorer with bus and logs.

    Args:
        credits: of the trainer.
        view: of the model; without one it scores every row as it is.
        is_ending: whether the job is about to end.
    """

    def __init__(
        self,
        megatron: MegatronConfig,
        column: str,
        writer: SidecarWriter,
        reader: Reader,
        credits: CreditTail,
        events: EventWriter,
        view: ScoringView | None = None,
        is_ending: Callable[[], bool] = lambda: False,
    ) -> None:
        self._view, self._is_ending = view, is_ending
        self._megatron, self._column = megatron, column
        self._writer, self._reader = writer, reader
        self._credits, self._events = credits, events
        self._under_way = _RoundUnderWay([], Timers(), 0.0)
        self._unsent: list[tuple[Pending, Floats, int]] = []
        self._space = Space()
        self._number = 0

    def next_task(self, step: int, timers: Timers) -> Round | None:
        """See `Duties`. While the file system is full no round begins."""
        deadline = time.monotonic() + SIGN_OF_LIFE_S
        with timers("wait", waits=True):
            while True:
                credit = self._credits.latest()
                if credit and credit.finished and self._is_done(step):
                    return None
                if self._is_ending():
                    return self.begin([], timers)
                # Shards first: what was planned before they were committed is then seen, too.
                shards, deal_lesson = self.ready(credit), self._find_lesson(step)
                if shards or deal_lesson or time.monotonic() > deadline:
                    break
                time.sleep(POLL_S)
        return deal_lesson() if deal_lesson else self.begin(shards, timers)

    def ready(self, credit: Credit | None) -> list[Pending]:
        """Returns the shards of a round; none if there are none or the file system is full."""
        retired = credit.retired_guid_below if credit else 0
        self._writer.collect(retired)
        self._space.write(self._send)
        return [] if self._unsent else self._choose(self._writer.pending(retired))

    def begin(self, shards: list[Pending], timers: Timers) -> Round:
        self._under_way = _RoundUnderWay(shards, timers, time.perf_counter())
        return self._deal(shards)

    def put(self, scored: Sequence[Floats], *, version: int = -1) -> None:
        """Commits a sidecar per shard of the last round, or keeps it until there is space."""
        shards, timers, begin, lengths, dealt = self._under_way
        timers.add("score", begin)
        if len(dealt) < len(lengths):
            known = dict(zip(dealt.tolist(), scored, strict=True))
            lacking = [np.full(length, np.nan, np.float32) for length in lengths]
            scored = [known.get(row, values) for row, values in enumerate(lacking)]
        ends = np.cumsum([pending.record.rows for pending in shards])
        parts = [part for part in np.split(np.arange(len(scored)), ends[:-1]) if len(part)]
        for pending, rows in zip(shards, parts, strict=True):
            values = np.concatenate([scored[row] for row in rows])
            self._unsent.append((pending, values, version))
        with timers("write"):
            self._space.write(self._send)
        if shards:
            self._note(timers)

    def close(self) -> None:
        self._writer.close()
        self._credits.close()
        self._events.emit("end")

    def _is_done(self, step: int) -> bool:
        """Whether the role is done once the trainer has finished."""
        return True

    def _find_lesson(self, step: int) -> Callable[[], Round] | None:
        """Returns what deals the next batch to learn from, if there is one."""
        return None

    def _choose(self, pending: Sequence[Pending]) -> list[Pending]:
        """Returns the oldest readable shards, as many as make a round."""
        budget = self._megatron.tokens_per_micro_batch * self._megatron.layout.data_parallel
        chosen: list[Pending] = []
        room = MICRO_BATCHES_PER_ROUND * budget
        for each in pending:
            if chosen and each.record.tokens > room:
                break
            try:
                self._writer.open(each).close()
            except DamagedError as error:
                log.error("%s; its prompt groups are sampled again", error)
                self._writer.skip(each)
                continue
            chosen.append(each)
            room -= each.record.tokens
        return chosen

    def _deal(self, shards: Sequence[Pending]) -> Round:
        self._number += 1
        parts = [
            ShardRange(p.producer, p.record.fence, p.record.seq, p.record.uuid, 0, p.record.rows)
            for p in shards
        ]
        found = Round(self._number, parts, [[] for _ in range(self._megatron.layout.data_parallel)])
        if not parts:
            return found
        index = self._reader.index(found)
        lengths, rows = lengths_of(index), np.arange(len(index.guid))
        if self._view:
            rows = np.flatnonzero(self._view.scores(index.guid.astype(np.int64)))
        prompts = self._prompts(found, index, rows)
        self._under_way = self._under_way._replace(lengths=lengths, scored=rows)
        longer = [
            len(prompts[guid]) - given if guid in prompts else 0
            for guid, given in zip(index.guid.tolist(), index.prompt_len.tolist(), strict=True)
        ]
        micro_batches = deal_rows(self._megatron, lengths + longer, rows, shards_of(parts))
        return found._replace(micro_batches=micro_batches, prompts=prompts)

    def _prompts(self, found: Round, index: BatchIndex, rows: Numbers) -> Mapping[int, Ints]:
        prompt = self._view and self._view.prompt
        if prompt is None:
            return {}
        _, first = np.unique(index.guid[rows], return_index=True)
        read = self._reader.rows(found, rows[first].tolist(), columns=())
        return {row.guid: prompt(row.prompt_index) for row in read}

    def _send(self) -> None:
        while self._unsent:
            pending, values, version = self._unsent[0]
            self._writer.put(pending, {self._column: values}, policy_version=version)
            del self._unsent[0]

    def _note(self, timers: Timers) -> None:
        records = [pending.record for pending in self._under_way.shards]
        num_tokens = sum(record.tokens for record in records)
        self._events.emit(
            "scored",
            num_shards=len(records),
            num_trajectories=sum(record.rows for record in records),
            num_tokens=num_tokens,
            first_guid=min(record.guid_min for record in records),
            **timers.seconds,
        )
        self._events.emit("phases", phases=timers.phases)
        log.info(
            "scored %d shards from prompt %d on | %d tokens | %s",
            len(records), records[0].guid_min, num_tokens, timers,
        )  # fmt: skip
