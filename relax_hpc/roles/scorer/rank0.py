"""The work of rank 0 alone in a role that scores: follow the bus, deal shards out, write
sidecars."""

import logging
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from relax_hpc.bus.credits import Credit, CreditTail
from relax_hpc.bus.durable import Space
from relax_hpc.bus.plan import Part
from relax_hpc.bus.reader import BatchIndex, Reader
from relax_hpc.bus.sidecar import Pending, SidecarWriter
from relax_hpc.config.layout import MegatronConfig
from relax_hpc.errors import DamagedError
from relax_hpc.roles.dealing.micro_batches import plan_micro_batches
from relax_hpc.roles.dealing.portions import lengths_of, shards_of
from relax_hpc.roles.scorer.loop import Floats, Ints, Round
from relax_hpc.telemetry.events import EventWriter
from relax_hpc.telemetry.timers import Timers

log = logging.getLogger(__name__)
Numbers = npt.NDArray[np.int64]

POLL_S = 0.05
SIGN_OF_LIFE_S = 30.0
"""Seconds after which ranks that wait for rank 0 hear from it, work or not."""
MICRO_BATCHES_PER_ROUND = 4
"""Micro-batches of a rank before results are written: shards are taken until there are so many."""


class View(Protocol):
    """The rows that a model scores, and what it sees of them."""

    def scores(self, guids: Numbers) -> npt.NDArray[np.bool_]:
        """[rows] whether rows of these prompt groups are scored; the others have nan."""
        ...

    @property
    def sees_other_prompts(self) -> bool:
        """Whether rows are scored behind another prompt than their own."""
        ...

    def prompt(self, index: int) -> Ints:
        """Tokens in place of a row of the data as a prompt."""
        ...


class _UnderWay(NamedTuple):
    """The shards of the last round, in its order."""

    shards: list[Pending]
    timers: Timers
    begin: float
    lengths: Numbers = np.zeros(0, np.int64)
    """[rows] tokens."""
    scored: Numbers = np.zeros(0, np.int64)
    """Numbers of the rows that are dealt out, rising."""


class Rank0:
    """The bus and the record of a role that scores: its `Duties`.

    Args:
        config: layout and budget of the model.
        column: what the role writes.
        writer: of the role.
        reader: of this rank.
        credits: of the trainer.
        view: of the model; without one it scores every row as it is.
    """

    def __init__(
        self,
        config: MegatronConfig,
        column: str,
        writer: SidecarWriter,
        reader: Reader,
        credits: CreditTail,
        events: EventWriter,
        view: View | None = None,
    ) -> None:
        self._view = view
        self._config, self._column = config, column
        self._writer, self._reader = writer, reader
        self._credits, self._events = credits, events
        self._under_way = _UnderWay([], Timers(), 0.0)
        self._unsent: list[tuple[Pending, Floats, int]] = []
        self._space = Space()
        self._number = 0

    def next_round(self) -> Round | None:
        """See `Duties`. While the file system is full nothing new is begun."""
        timers, deadline = Timers(), time.monotonic() + SIGN_OF_LIFE_S
        with timers("wait", waits=True):
            while True:
                credit = self._credits.latest()
                if credit and credit.finished:
                    return None
                shards = self.ready(credit)
                if shards or time.monotonic() > deadline:
                    break
                time.sleep(POLL_S)
        return self.begin(shards, timers)

    def ready(self, credit: Credit | None) -> list[Pending]:
        """The shards of a round, none while there are none or the file system is full."""
        retired = credit.retired_guid_below if credit else 0
        self._writer.collect(retired)
        self._space.write(self._send)
        return [] if self._unsent else self._choose(self._writer.pending(retired))

    def begin(self, shards: list[Pending], timers: Timers) -> Round:
        """Deals the shards out, and remembers that they are under way."""
        self._under_way = _UnderWay(shards, timers, time.perf_counter())
        return self._deal(shards)

    def put(self, scored: Sequence[Floats], *, version: int = -1) -> None:
        """Commits a sidecar per shard of the last round, or keeps it until there is space.

        Args:
            version: of the weights that scored them, if they change.
        """
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

    def _choose(self, pending: Sequence[Pending]) -> list[Pending]:
        """The oldest that can be read, as many as make a round."""
        budget = self._config.tokens_per_micro_batch * self._config.layout.data_parallel
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
        """Decides who scores which rows."""
        self._number += 1
        parts = [
            Part(p.producer, p.record.fence, p.record.seq, p.record.uuid, 0, p.record.rows)
            for p in shards
        ]
        found = Round(self._number, parts, [[] for _ in range(self._config.layout.data_parallel)])
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
        micro_batches = plan_micro_batches(
            (lengths + longer)[rows].tolist(),
            num_ranks=self._config.layout.data_parallel,
            budget=self._config.tokens_per_micro_batch,
            count_multiple_of=self._config.layout.micro_batches_multiple_of,
            shards=shards_of(parts)[rows].tolist(),
        )
        numbered = [[rows[batch].tolist() for batch in rank] for rank in micro_batches]
        return found._replace(micro_batches=numbered, prompts=prompts)

    def _prompts(self, found: Round, index: BatchIndex, rows: Numbers) -> Mapping[int, Ints]:
        """The prompts behind which rows are scored, of each group of `rows`."""
        if not (self._view and self._view.sees_other_prompts):
            return {}
        _, first = np.unique(index.guid[rows], return_index=True)
        read = self._reader.rows(found, rows[first].tolist(), columns=())
        return {row.guid: self._view.prompt(row.prompt_index) for row in read}

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
