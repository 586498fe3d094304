"""The reference role: gives every committed shard the logprobs of a policy that does not change.

What it writes are sidecars; the sequencer hands a prompt group out once they are there. Nothing is
remembered outside the bus: what has a sidecar is done, everything else is owed.
"""

import logging
import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from relax_hpc.bus.credits import CreditTail
from relax_hpc.bus.durable import BusFullError
from relax_hpc.bus.plan import Part, PlanRecord
from relax_hpc.bus.reader import Reader
from relax_hpc.bus.sidecar import Pending, SidecarWriter
from relax_hpc.comm.world import World
from relax_hpc.config.layout import MegatronLayout
from relax_hpc.errors import DamagedError
from relax_hpc.roles.dealing.micro_batches import plan_micro_batches
from relax_hpc.roles.dealing.portions import Portion, lengths_of, shards_of, share_of
from relax_hpc.schema import Trajectory
from relax_hpc.telemetry.events import EventWriter
from relax_hpc.telemetry.timers import Timers

log = logging.getLogger(__name__)

POLL_S = 0.05
FULL_RETRY_S = 5.0
"""Between attempts to write to a full file system."""
SIGN_OF_LIFE_S = 30.0
"""After which ranks that wait for rank 0 hear from it, work or not."""
MICRO_BATCHES_PER_ROUND = 4
"""What a rank computes before results are written: shards are taken until it is full."""
COLUMN = "ragged/ref_logprobs"

Floats = npt.NDArray[np.float32]


class Scorer(Protocol):
    """What this role needs of a model; collective over its ranks."""

    @property
    def dp_rank(self) -> int: ...
    def forward_logprobs(
        self, trajectories: Sequence[Trajectory], micro_batches: Sequence[Sequence[int]]
    ) -> list[Floats]:
        """[tokens] nats of each trajectory; `micro_batches` index `trajectories`."""
        ...


class Lead(Protocol):
    """What only rank 0 does: follow the bus, deal, write."""

    def next_portion(self) -> Portion | None:
        """Rows to score, perhaps none; None when nothing more will be trained on."""
        ...

    def put(self, scored: Sequence[Floats]) -> None:
        """[tokens] of every row of the last portion."""
        ...


def run(world: World, scorer: Scorer, reader: Reader, lead: Lead | None) -> None:
    """Scores what is committed, oldest first, until the trainer has finished.

    Rank 0 decides who scores what; of each data-parallel replica one rank reads it.
    """
    replica = world.split(scorer.dp_rank)
    while portion := world.bcast(lead.next_portion() if lead else None):
        share = share_of(portion, scorer.dp_rank)
        reads = replica.rank == 0
        rows = replica.bcast(reader.rows(portion.record, share.rows, columns=()) if reads else None)
        found = scorer.forward_logprobs(rows, share.micro_batches)
        mine = dict(zip(share.rows, found, strict=True)) if reads else {}
        merged = {row: logprobs for part in world.allgather(mine) for row, logprobs in part.items()}
        if lead:
            lead.put([merged[row] for row in sorted(merged)])


class _Round(NamedTuple):
    """Shards that are scored together, in this order."""

    shards: list[Pending]
    timers: Timers
    begin: float


class SidecarLead:
    """Rank 0 of the role.

    Args:
        layout: grid and budget of the model.
        writer: of the role.
        reader: of this rank.
        credits: of the trainer.
    """

    def __init__(
        self,
        layout: MegatronLayout,
        writer: SidecarWriter,
        reader: Reader,
        credits: CreditTail,
        events: EventWriter,
    ) -> None:
        self._layout, self._writer, self._reader = layout, writer, reader
        self._credits, self._events = credits, events
        self._round = _Round([], Timers(), 0.0)
        self._unsent: list[tuple[Pending, Floats]] = []
        self._retry_at = 0.0
        self._number = 0

    def next_portion(self) -> Portion | None:
        """See `Lead`. While the file system is full nothing new is begun."""
        timers, deadline = Timers(), time.monotonic() + SIGN_OF_LIFE_S
        with timers("wait"):
            while True:
                credit = self._credits.latest()
                if credit and credit.finished:
                    return None
                retired = credit.retired_guid_below if credit else 0
                self._writer.collect(retired)
                self._send()
                shards = [] if self._unsent else self._choose(self._writer.pending(retired))
                if shards or time.monotonic() > deadline:
                    break
                time.sleep(POLL_S)
        self._round = _Round(shards, timers, time.perf_counter())
        return self._deal(shards)

    def put(self, scored: Sequence[Floats]) -> None:
        """Commits a sidecar per shard of the last portion, or keeps it until there is space."""
        shards, timers, begin = self._round
        timers.add("score", begin)
        ends = np.cumsum([pending.record.rows for pending in shards])
        parts = [part for part in np.split(np.arange(len(scored)), ends[:-1]) if len(part)]
        for pending, rows in zip(shards, parts, strict=True):
            self._unsent.append((pending, np.concatenate([scored[row] for row in rows])))
        with timers("write"):
            self._send()
        if shards:
            self._note(timers)

    def close(self) -> None:
        self._writer.close()
        self._credits.close()

    def _choose(self, pending: Sequence[Pending]) -> list[Pending]:
        """The oldest that can be read, as many as make a round."""
        budget = self._layout.tokens_per_micro_batch * self._layout.data_parallel
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

    def _deal(self, shards: Sequence[Pending]) -> Portion:
        """Who scores which rows: as a portion of a batch, whose parts are whole shards."""
        self._number += 1
        parts = [
            Part(p.producer, p.record.fence, p.record.seq, p.record.uuid, 0, p.record.rows)
            for p in shards
        ]
        num_rows = sum(p.record.rows for p in shards)
        record = PlanRecord(
            step=self._number,
            guids=[p.record.guid_min for p in shards],
            parts=parts,
            num_trajectories=num_rows,
            policy_version_min=-1,
            num_tokens=sum(p.record.tokens for p in shards),
            sidecars={},
        )
        lengths = lengths_of(self._reader.index(record)).tolist() if shards else []
        micro_batches = plan_micro_batches(
            lengths,
            num_ranks=self._layout.data_parallel,
            budget=self._layout.tokens_per_micro_batch,
            count_multiple_of=self._layout.micro_batches_multiple_of,
            shards=shards_of(record).tolist() if shards else None,
        )
        return Portion(record, np.zeros(num_rows), micro_batches)

    def _send(self) -> None:
        if time.monotonic() < self._retry_at:
            return
        try:
            while self._unsent:
                pending, logprobs = self._unsent[0]
                self._writer.put(pending, {COLUMN: logprobs})
                del self._unsent[0]
        except BusFullError as error:
            log.warning("%s; trying again every %g s", error, FULL_RETRY_S)
            self._retry_at = time.monotonic() + FULL_RETRY_S

    def _note(self, timers: Timers) -> None:
        records = [pending.record for pending in self._round.shards]
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
