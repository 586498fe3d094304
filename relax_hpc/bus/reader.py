"""The reading end: the rows of a planned batch, verified, and no more bytes than asked for."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from relax_hpc.bus import layout
from relax_hpc.bus.encode import from_columns
from relax_hpc.bus.plan import Part, PlanRecord
from relax_hpc.bus.shard import Shard
from relax_hpc.errors import BusError
from relax_hpc.paths import BusPaths
from relax_hpc.schema import Array, Trajectory


class BatchIndex(NamedTuple):
    """What there is to know of each row of a batch, [n] in plan order, without its tokens."""

    guid: Array
    sibling: Array
    rewards: Array
    prompt_len: Array
    response_len: Array
    policy_version_min: Array
    policy_version_max: Array
    finish: Array


class Reader:
    """Reads planned batches. Every rank may have its own; nothing is shared but files.

    Raises:
        BusError: not a bus of this format.
    """

    def __init__(self, paths: BusPaths, *, verify: bool = True) -> None:
        layout.open_bus(paths)
        self._paths = paths
        self._verify = verify

    def index(self, record: PlanRecord) -> BatchIndex:
        """Reads the row columns of a batch.

        Raises:
            BusError: a shard is missing or damaged.
        """
        columns: dict[str, list[Array]] = {name: [] for name in BatchIndex._fields}
        with ExitStack() as stack:
            shards = _OpenShards(self._paths, stack, verify=self._verify)
            for part in _merged(record.parts):
                for name, values in columns.items():
                    values.append(shards.open(part).read_rows(f"row/{name}", part.lo, part.hi))
        return BatchIndex(**{name: np.concatenate(values) for name, values in columns.items()})

    def rows(self, record: PlanRecord, rows: Sequence[int]) -> list[Trajectory]:
        """Reads some trajectories of a batch, in the order asked for.

        Args:
            rows: numbers in plan order, 0 <= row < `record.num_trajectories`.

        Raises:
            BusError: a shard is missing or damaged.
        """
        wanted = np.unique(np.array(rows, np.int64))
        found: dict[int, Trajectory] = {}
        with ExitStack() as stack:
            shards = _OpenShards(self._paths, stack, verify=self._verify)
            first = 0
            for part in _merged(record.parts):
                size = part.hi - part.lo
                inside = wanted[(wanted >= first) & (wanted < first + size)]
                for run in _runs(inside):
                    lo, hi = part.lo + int(run[0]) - first, part.lo + int(run[-1]) - first + 1
                    trajectories = from_columns(shards.open(part).read_span(lo, hi))
                    found.update(zip(run.tolist(), trajectories, strict=True))
                first += size
        return [found[row] for row in rows]


class _OpenShards:
    """The shards of one call, each opened once."""

    def __init__(self, paths: BusPaths, stack: ExitStack, *, verify: bool) -> None:
        self._paths = paths
        self._stack = stack
        self._verify = verify
        self._open: dict[str, Shard] = {}

    def open(self, part: Part) -> Shard:
        if part.uuid not in self._open:
            path = self._paths.shard(part.producer, part.epoch, part.seq)
            shard = self._stack.enter_context(Shard(path, verify=self._verify))
            if shard.uuid != part.uuid:
                raise BusError(f"{path}: is not the shard {part.uuid} that was planned; restore it")
            self._open[part.uuid] = shard
        return self._open[part.uuid]


def _merged(parts: Sequence[Part]) -> Iterator[Part]:
    """Parts that follow each other in a shard as one, so that they are one read."""
    merged: Part | None = None
    for part in parts:
        if merged is not None and (merged.uuid, merged.hi) == (part.uuid, part.lo):
            merged = merged._replace(hi=part.hi)
            continue
        if merged is not None:
            yield merged
        merged = part
    if merged is not None:
        yield merged


def _runs(rows: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
    """Rising rows, cut where one is left out."""
    return np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1) if len(rows) else []
