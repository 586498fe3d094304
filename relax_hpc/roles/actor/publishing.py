"""Puts together what the ranks of a trainer publish with."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from relax_hpc.comm.world import World
from relax_hpc.config.rollout import WeightsConfig
from relax_hpc.engines.megatron.scorer import MegatronScorer
from relax_hpc.fleet.register import Register
from relax_hpc.paths import RunPaths
from relax_hpc.weights import quantize
from relax_hpc.weights.lanes import LaneGiver, LaneLink
from relax_hpc.weights.leave import SnapshotPublisher
from relax_hpc.weights.loads import Loaded
from relax_hpc.weights.publish import Published, Publisher
from relax_hpc.weights.quantize import Quantizer
from relax_hpc.weights.ranks import TrainerRanks, WeightGiver
from relax_hpc.weights.snapshot import SnapshotWriter
from relax_hpc.weights.staging import Giver


class Publications(Protocol):
    """Rank 0's way to the engines: `publish.Publisher`, or `leave.SnapshotPublisher`."""

    def publish(
        self,
        version: int,
        tensors: Iterator[tuple[str, Tensor]],
        *,
        check: bool,
        check_fenced: Callable[[], None],
    ) -> Published: ...
    def has_newcomers(self) -> bool: ...
    def ended_loads(self) -> list[Loaded]: ...
    def wait_for_loads(self) -> bool: ...
    def close(self) -> None: ...


class Publishing:
    """A rank's part in publications; every rank of the trainer makes one, together.

    Args:
        config: how weights get to engines.
        folder: of snapshots.
        source: Hugging Face folder that lends them config.json and tokenizer.
        shares_gpus: engines are on the trainer's own GPUs.
    """

    def __init__(
        self,
        config: WeightsConfig,
        world: World,
        model: MegatronScorer,
        device: torch.device,
        *,
        folder: Path,
        source: Path,
        shares_gpus: bool,
    ) -> None:
        self._config, self._device = config, device
        by_lanes = shares_gpus and config.transport == "collective"
        specs = model.weight_specs()
        plain = model.gather(config.bucket_bytes, to_all=by_lanes)
        self._plan, self._gather = quantize.gathered(config, specs, plain)
        self._link = LaneLink(world, self._plan, device, config) if by_lanes else None
        quantizer = Quantizer.of(config)
        snapshots = SnapshotWriter(folder, specs, world, source, quantizer=quantizer)
        self.ranks = TrainerRanks(world, snapshots, self._others())

    def publisher(self, register: Register, *, waits_for_loads: bool) -> Publisher:
        """Rank 0's, to the members in `register`.

        Args:
            waits_for_loads: as `Publisher` takes it.
        """
        return Publisher(
            self._config,
            register,
            self._plan,
            device=self._device,
            ranks=self.ranks,
            gather=self._gather,
            link=self._link,
            waits_for_loads=waits_for_loads,
        )

    def snapshots(self, paths: RunPaths) -> SnapshotPublisher:
        """Rank 0's, to engines that may be absent."""
        return SnapshotPublisher(self._config, paths, self._plan, self.ranks)

    def _others(self) -> dict[str, WeightGiver]:
        if self._link:
            return {"lanes": LaneGiver(self._link, self._gather)}
        return {"collective": Giver(self._gather)}
