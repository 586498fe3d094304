"""Runs a scorer: gives every committed shard a column of logprobs of a fixed policy.

It writes sidecars; the sequencer plans a prompt group once they are there. Nothing is remembered
outside the bus: shards with a sidecar are done, all others are owed.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from relax_hpc.bus.plan import ShardRange, Sidecar
from relax_hpc.bus.reader import Reader
from relax_hpc.roles.dealing.micro_batches import MicroBatches, own_rows
from relax_hpc.roles.dealing.sight import StepMedia
from relax_hpc.roles.training.duties import Duties, Floats
from relax_hpc.runtime import heartbeat
from relax_hpc.runtime.comm.world import World
from relax_hpc.runtime.telemetry.timers import Timers
from relax_hpc.schema import ColumnWriter, Trajectory
from relax_hpc.trainer.training_engine import ScoringEngine

Ints = npt.NDArray[np.int32]


class Round(NamedTuple):
    """Rows to score, or to learn from, dealt to ranks; they count in the order of the parts."""

    step: int
    """Counts rounds or batches, so that readers close the shards of the previous one."""
    parts: list[ShardRange]
    """Whole shards, or those of a planned batch."""
    micro_batches: list[MicroBatches]
    """Micro-batches per data-parallel rank; rows in none are left out."""
    prompts: Mapping[int, Ints] = {}
    """Prompt group -> tokens that replace the prompt when its rows are scored."""
    sidecars: Mapping[str, dict[ColumnWriter, Sidecar]] = {}
    rewards: Floats | None = None
    """[rows], the rewards that the algorithm compares, of a batch to learn from."""


def run(
    world: World,
    scorer: ScoringEngine,
    reader: Reader,
    duties: Duties[Round],
    sight: StepMedia,
    columns: Sequence[str] = (),
) -> None:
    """Scores committed shards, oldest first, until the trainer has finished.

    Rank 0 deals out the rows.

    Args:
        columns: to read besides tokens and media.
    """
    replica = world.split(scorer.dp_rank)
    sight.serve(scorer)
    columns = [*columns, *sight.columns]
    while found := world.bcast(duties.next_task(0, Timers())):
        duties.put(score(world, replica, scorer, reader, found, sight, columns))


def score(
    world: World,
    replica: World,
    scorer: ScoringEngine,
    reader: Reader,
    found: Round,
    sight: StepMedia,
    columns: Sequence[str] = (),
) -> list[Floats]:
    """Returns the [tokens] scores of all rows dealt out, in their order. Collective.

    Args:
        replica: ranks that get the same rows; one of them reads.
    """
    own = own_rows(found.micro_batches[scorer.dp_rank])
    reads = replica.rank == 0
    rows = replica.bcast(reader.rows(found, own.rows, columns) if reads else None)
    sight.note(found, own.rows, rows)
    with heartbeat.phase("score"):
        scores = scorer.forward_logprobs(choose_seen(found.prompts, rows), own.micro_batches)
    if found.prompts:
        scores = [of_own(row, values) for row, values in zip(rows, scores, strict=True)]
    mine = dict(zip(own.rows, scores, strict=True)) if reads else {}
    merged = {row: values for part in world.allgather(mine) for row, values in part.items()}
    return [merged[row] for row in sorted(merged)]


def choose_seen(prompts: Mapping[int, Ints], rows: list[Trajectory]) -> list[Trajectory]:
    return [behind(prompts.get(row.guid), row) for row in rows] if prompts else rows


def behind(prompt: Ints | None, row: Trajectory) -> Trajectory:
    """Returns the row with the same response after another prompt; unchanged without one."""
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
    """Returns [tokens] for the row, from scores after another prompt: 0 on its own prompt."""
    num = len(row.token_ids) - row.prompt_len
    if len(scored) == len(row.token_ids):
        return scored
    return np.concatenate([np.zeros(row.prompt_len, scored.dtype), scored[len(scored) - num :]])
