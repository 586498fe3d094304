"""Weights by broadcast: the trainer and all engines are one communicator, kept between updates."""

from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor

from relax_hpc.comm.broadcast import Transport as Backend
from relax_hpc.comm.bucket import BucketPlan
from relax_hpc.config.rollout import WeightsConfig
from relax_hpc.fleet.control import EngineControl
from relax_hpc.fleet.members import Member
from relax_hpc.paths import RunPaths
from relax_hpc.records import write_json
from relax_hpc.telemetry.timers import Timers
from relax_hpc.weights.exchange import MemberError
from relax_hpc.weights.group import MemberGroup, Start
from relax_hpc.weights.ranks import Serve, TrainerRanks
from relax_hpc.weights.staging import Outgoing
from relax_hpc.weights.transport import Delivery, behind
from relax_hpc.weights.verify import Sent


class CollectiveTransport:
    """See `transport.Transport`."""

    def __init__(
        self,
        config: WeightsConfig,
        paths: RunPaths,
        threads: ThreadPoolExecutor,
        ranks: TrainerRanks,
        plan: BucketPlan,
        backend: Backend,
    ) -> None:
        self._config, self._paths, self._threads = config, paths, threads
        self._ranks, self._plan, self._backend = ranks, plan, backend
        self._group: MemberGroup | None = None
        self._taught = set[Start]()

    def leaves_receipts(self, member: Member) -> bool:
        return member.takes_orders

    def holds_fixed(self, members: Collection[Member]) -> bool:
        """Whether they are the group, and it was sent a version; a new group is sent everything."""
        group = self._group
        return group is not None and group.is_served and list(group.receivers) == list(members)

    def stage(self, version: int, outgoing: Outgoing, timers: Timers) -> None:
        """Fills the buffers."""
        self._ranks.tell(Serve("collective", outgoing.skipped))
        with timers("gather"):
            outgoing.prefetch()

    def deliver(
        self,
        live: dict[Member, EngineControl],
        version: int,
        outgoing: Outgoing,
        timers: Timers,
        *,
        check: bool,
    ) -> Delivery:
        """Gives the version to all or none of them: one that fails leaves the others a part."""
        if self._group and list(self._group.receivers) != list(live):
            self.close()
        if self._group is None and outgoing.skipped:  # somebody has gone since it was staged
            return Delivery({}, {}, {}, Sent([], ""))
        try:
            if self._group is None:
                with timers("join"):
                    self._group = self._form(live)
            receipts = self._group.send(version, outgoing, timers, check=check)
            return Delivery(live, {}, receipts, Sent(outgoing.fingerprints, outgoing.by_name))
        except MemberError as error:
            self.close()
            return Delivery({}, behind(self._threads, live, error), {}, Sent([], ""))

    def settle(self, outgoing: Outgoing) -> None:
        """Takes the gather to its end, since the other ranks feed it."""
        outgoing.drain()

    def close(self) -> None:
        """Leaves the communicator."""
        if self._group:
            self._group.close()
            self._group = None

    def _form(self, live: dict[Member, EngineControl]) -> MemberGroup:
        group = MemberGroup.form(
            live, self._plan, self._config, self._backend, self._threads, self._taught
        )
        write_json(self._paths.rendezvous("weights"), group.record())
        return group
