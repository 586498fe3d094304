"""Weights by broadcast: the trainer and all engines are one communicator, kept between updates."""

from concurrent.futures import ThreadPoolExecutor

from relax_hpc.comm.broadcast import Transport as Backend
from relax_hpc.comm.bucket import BucketPlan
from relax_hpc.config.rollout import WeightsConfig
from relax_hpc.paths import RunPaths
from relax_hpc.records import write_json
from relax_hpc.telemetry.timers import Timers
from relax_hpc.weights.group import MemberError, MemberGroup, Receiver
from relax_hpc.weights.members import Member
from relax_hpc.weights.staging import Outgoing
from relax_hpc.weights.transport import HEALTH_S, Delivery


class CollectiveTransport:
    """See `transport.Transport`."""

    def __init__(
        self,
        config: WeightsConfig,
        paths: RunPaths,
        threads: ThreadPoolExecutor,
        plan: BucketPlan,
        backend: Backend,
    ) -> None:
        self._config, self._paths, self._threads = config, paths, threads
        self._plan, self._backend = plan, backend
        self._group: MemberGroup | None = None

    def stage(self, version: int, outgoing: Outgoing, timers: Timers) -> None:
        """Fills the buffers."""
        with timers("gather"):
            outgoing.prefetch()

    def deliver(
        self,
        live: dict[Member, Receiver],
        version: int,
        outgoing: Outgoing,
        timers: Timers,
        *,
        check: bool,
    ) -> Delivery:
        """All of them, or none: one that fails leaves the others with a part."""
        if self._group and list(self._group.receivers) != list(live):
            self.close()
        try:
            if self._group is None:
                with timers("join"):
                    self._group = self._form(live)
            return Delivery(live, {}, self._group.send(version, outgoing, timers, check=check))
        except MemberError as error:
            self.close()
            return Delivery({}, self._behind(live, error), {})

    def close(self) -> None:
        """Leaves the communicator."""
        if self._group:
            self._group.close()
            self._group = None

    def _form(self, live: dict[Member, Receiver]) -> MemberGroup:
        group = MemberGroup.form(live, self._plan, self._config, self._backend, self._threads)
        write_json(self._paths.rendezvous("weights"), group.record())
        return group

    def _behind(self, live: dict[Member, Receiver], error: MemberError) -> dict[Member, str]:
        """Who let an update fail; the others are given it in the next attempt.

        One that dies makes the others fail as well, so those that are dead are behind it, if any.
        """
        blamed = [member for member in live if member in error.reasons]
        health = self._threads.map(lambda member: live[member].health(HEALTH_S), blamed)
        dead = [member for member, ok in zip(blamed, health, strict=True) if not ok]
        return {member: error.reasons[member] for member in dead or blamed}
