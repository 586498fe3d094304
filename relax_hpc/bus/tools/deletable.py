"""The shards that may be gone: no step that can still be trained reads them."""

from collections.abc import Sequence

from relax_hpc.bus.frames import read_frames
from relax_hpc.bus.plan import Chain, PlanPosition, read_chain
from relax_hpc.paths import BusPaths


def oldest_step(checkpoints: Sequence[PlanPosition]) -> int:
    """The step of the oldest checkpoint that is kept; 0 starts the run anew."""
    return min((position.step for position in checkpoints), default=0)


def last_reading(chain: Chain) -> dict[str, int]:
    """uuid of each planned shard, sidecars included -> the last step that reads it."""
    steps: dict[str, int] = {}
    for record in chain.steps:
        for part in record.parts:
            steps[part.uuid] = record.step
            for sidecar in record.sidecars.get(part.uuid, {}).values():
                steps[sidecar.uuid] = record.step
    return steps


def ever_retired(paths: BusPaths) -> int:
    """The highest ordinal below which owners were ever allowed to delete."""
    granted = [record["retired_guid_below"] for record, _ in read_frames(paths.credits)]
    return max(granted, default=0)


def is_deletable(paths: BusPaths, step: int) -> bool:
    """Whether owners were ever allowed to delete what a step reads."""
    guids = [guid for each in read_chain(paths).steps if each.step == step for guid in each.guids]
    return min(guids, default=ever_retired(paths)) < ever_retired(paths)
