"""A role that scores: gives every committed shard a column of logprobs of an unchanging policy.

What it writes are sidecars; the sequencer hands a prompt group out once they are there. Nothing is
remembered outside the bus: what has a sidecar is done, everything else is owed.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from relax_hpc import heartbeat
from relax_hpc.bus.plan import Part, Sidecar
from relax_hpc.bus.reader import Reader
from relax_hpc.comm.world import World
from relax_hpc.engines.training_engine import ScoringEngine
from relax_hpc.roles.dealing.micro_batches import MicroBatches, own_rows
from relax_hpc.roles.dealing.sight import Sight
from relax_hpc.schema import Role, Trajectory

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]


class Round(NamedTuple):
    """Whole shards that are scored together, and who scores what; rows count in their order."""

    step: int
    """Counts rounds, so that readers let go of the shards of the one before."""
    parts: list[Part]
    micro_batches: list[MicroBatches]
    """Micro-batches per data-parallel rank; a row that is in none is not scored."""
    prompts: Mapping[int, Ints] = {}
    """Prompt group -> tokens that its rows are scored behind, in place of their prompt."""

    @property
    def sidecars(self) -> Mapping[str, dict[Role, Sidecar]]:
        """None is read."""
        return {}


class Duties(Protocol):
    """A rank's work besides scoring: rank 0 follows the bus, deals and writes."""

    def next_round(self) -> Round | None:
        """Rank 0's counts: shards to score, perhaps none; None when nothing more will be trained.

        Until there is something, or it is time that waiting ranks hear of rank 0, it waits.
        """
        ...

    def put(self, scored: Sequence[Floats]) -> None:
        """Takes the [tokens] of every row of the last round that was dealt out, in order."""
        ...

    def close(self) -> None: ...


class OtherRank:
    """The duties of ranks besides rank 0."""

    def next_round(self) -> None: ...
    def put(self, scored: Sequence[Floats]) -> None: ...
    def close(self) -> None: ...


def run(
    world: World,
    scorer: ScoringEngine,
    reader: Reader,
    duties: Duties,
    sight: Sight,
    columns: Sequence[str] = (),
) -> None:
    """Scores what is committed, oldest first, until the trainer has finished.

    Rank 0 decides who scores what; of each data-parallel replica one rank reads it.

    Args:
        sight: of the shards.
        columns: what to read besides tokens and media.
    """
    replica = world.split(scorer.dp_rank)
    sight.serve(scorer)
    columns = [*columns, *sight.columns]
    while found := world.bcast(duties.next_round()):
        own = own_rows(found.micro_batches[scorer.dp_rank])
        reads = replica.rank == 0
        rows = replica.bcast(reader.rows(found, own.rows, columns) if reads else None)
        sight.note(found, own.rows, rows)
        with heartbeat.phase("score"):
            logprobs = scorer.forward_logprobs(seen(found.prompts, rows), own.micro_batches)
        if found.prompts:
            logprobs = [of_own(row, values) for row, values in zip(rows, logprobs, strict=True)]
        mine = dict(zip(own.rows, logprobs, strict=True)) if reads else {}
        merged = {row: values for part in world.allgather(mine) for row, values in part.items()}
        duties.put([merged[row] for row in sorted(merged)])


def seen(prompts: Mapping[int, Ints], rows: list[Trajectory]) -> list[Trajectory]:
    """The rows behind the prompts of their groups, where these have others."""
    return [behind(prompts.get(row.guid), row) for row in rows] if prompts else rows


def behind(prompt: Ints | None, row: Trajectory) -> Trajectory:
    """The row with the same response behind another prompt; as it is without one."""
    if prompt is None:
        return row
    given = np.zeros(len(prompt), row.loss_mask.dtype)
    return row._replace(
        token_ids=np.concatenate([prompt, row.token_ids[row.prompt_len :]]),
        loss_mask=np.concatenate([given, row.loss_mask[row.prompt_len :]]),
        prompt_len=len(prompt),
        version_runs=row.version_runs[:0],
        columns={},
        routed_experts=None,
    )


def of_own(row: Trajectory, scored: Floats) -> Floats:
    """[tokens] of the row, of what was scored behind another prompt: 0 on its own prompt."""
    num = len(row.token_ids) - row.prompt_len
    if len(scored) == len(row.token_ids):
        return scored
    return np.concatenate([np.zeros(row.prompt_len, scored.dtype), scored[len(scored) - num :]])
