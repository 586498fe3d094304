"""The last policy stays there for engines until rollout has evaluated it.

An engine that starts again after the last step, alone or with the whole job, has the weights that
the model began with: without a trainer the last evaluation could not be made.
"""

import time
from collections.abc import Callable
from typing import Literal, Protocol

from relax_hpc import heartbeat
from relax_hpc.comm.world import World
from relax_hpc.config.run import RunConfig
from relax_hpc.engines.training_engine import TrainingEngine
from relax_hpc.errors import PeerTimeoutError
from relax_hpc.paths import RunPaths
from relax_hpc.roles.actor import loop
from relax_hpc.roles.rollout.heldout import Board, last_of
from relax_hpc.roles.turns import heard

LOOK_EVERY_S = 2.0

Wanted = Literal["publish", "end"]


class Newcomers(Protocol):
    def has_newcomers(self) -> bool: ...


class LastPolicy:
    """Rank 0's look at who still owes an evaluation of the last policy.

    Args:
        config: of the run; rollout that is a job of its own loads the last policy by itself.
        paths: of the run.
        publisher: knows whether an engine has come.
        tell_others: tells the other ranks that it waits; called again and again while it does.
    """

    def __init__(
        self,
        config: RunConfig,
        paths: RunPaths,
        publisher: Newcomers,
        tell_others: Callable[[], None] = loop.nothing,
    ) -> None:
        self._publisher, self._patience_s = publisher, config.launch.peer_timeout_s
        self._tell_others = tell_others
        size = config.rollout_pool.num_hosts
        tasks = range(size) if config.launch.layout != "separate" else ()
        self._owing = {rank: Board(paths, rank, size) for rank in tasks}
        self._last = last_of(config)
        self._kept, self._since = dict[int, int | None](), time.monotonic()

    def wanted(self) -> Wanted:
        """Waits for an engine or for the last score.

        Raises:
            PeerTimeoutError: nobody has scored a prompt for `launch.peer_timeout_s`.
        """
        while self._look():
            if self._publisher.has_newcomers():
                return "publish"
            self._tell_others()
            time.sleep(LOOK_EVERY_S)
        return "end"

    def _look(self) -> bool:
        """Whether somebody owes an evaluation."""
        kept = {rank: board.kept_last(self._last) for rank, board in self._owing.items()}
        now = time.monotonic()
        if kept != self._kept:
            self._kept, self._since = kept, now
        self._owing = {rank: b for rank, b in self._owing.items() if kept[rank] is not None}
        if self._owing and now - self._since > self._patience_s:
            tasks = ", ".join(f"rollout-{rank}" for rank in self._owing)
            raise PeerTimeoutError(
                f"the last policy: {tasks} scored no held-out prompt for {self._patience_s:g} s; "
                "see their logs"
            )
        return bool(self._owing)


def serve(
    world: World, trainer: TrainingEngine, duties: loop.Duties, last: LastPolicy | None
) -> None:
    """Gives engines that come the last policy, until it is evaluated. Collective.

    Args:
        world: the ranks of the trainer.
        trainer: holds the last policy.
        duties: of this rank.
        last: rank 0's, which decides for all; None on the other ranks.
    """
    while True:
        with heartbeat.phase("last evaluation", waits=True):
            wanted = heard(world, last.wanted() if last else None)
        if wanted == "end":
            return
        if wanted == "publish":
            loop.publish(world, trainer, duties)
