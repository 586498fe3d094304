"""Weights through the run directory: a snapshot that every engine loads."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from relax_hpc.config.rollout import WeightsConfig
from relax_hpc.paths import RunPaths
from relax_hpc.telemetry.timers import Timers
from relax_hpc.weights import snapshot
from relax_hpc.weights.members import Member
from relax_hpc.weights.receiver import Receiver
from relax_hpc.weights.staging import Outgoing
from relax_hpc.weights.transport import Delivery, each


class FileTransport:
    """See `transport.Transport`; nobody but engines and a file system take part."""

    def __init__(
        self,
        config: WeightsConfig,
        paths: RunPaths,
        threads: ThreadPoolExecutor,
        *,
        model_folder: Path,
    ) -> None:
        self._config, self._paths, self._threads = config, paths, threads
        self._model_folder = model_folder

    def leaves_receipts(self, member: Member) -> bool:
        return False

    def stage(self, version: int, outgoing: Outgoing, timers: Timers) -> None:
        """Writes the snapshot."""
        with timers("gather"):
            snapshot.write(self._paths.weights(version), outgoing.tensors(), self._model_folder)

    def deliver(
        self,
        live: dict[Member, Receiver],
        version: int,
        outgoing: Outgoing,
        timers: Timers,
        *,
        check: bool,
    ) -> Delivery:
        """Every engine loads the snapshot; those that fail do not keep the others from it."""
        folder, limit_s = self._paths.weights(version), self._config.timeout_s
        with timers("pause"):
            paused, failed = each(self._threads, live, lambda its: its.pause(), limit_s)
        with timers("wire"):
            taken, others = each(
                self._threads,
                paused,
                lambda its: its.update_weights_from_disk(str(folder), version),
                limit_s,
            )
        snapshot.prune(folder)
        return Delivery(taken, failed | others, {})

    def settle(self) -> None:
        """Nobody waits."""

    def close(self) -> None:
        """Nothing is held."""
