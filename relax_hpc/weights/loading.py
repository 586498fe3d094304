"""A load of a snapshot by one engine: pause in place, load, resume."""

import itertools
import time
import uuid
from pathlib import Path
from typing import NamedTuple

from relax_hpc.comm.orders import Order, Receipt, Task, receipt_file
from relax_hpc.errors import EngineError
from relax_hpc.fleet.control import EngineControl
from relax_hpc.fleet.members import Member
from relax_hpc.records import read_json
from relax_hpc.storage import delete


class Load(NamedTuple):
    """A load of a snapshot by one member; times in seconds."""

    pause: float
    """Time until the member stood still."""
    load: float
    resume: float
    receipts: list[Receipt]
    """Receipts of the member's ranks, if they were asked and can tell."""


def load(
    member: Member,
    engine: EngineControl,
    folder: Path,
    version: int,
    timeout_s: float,
    *,
    check: bool,
) -> Load:
    """Has an engine load a snapshot. One that fails stays paused, with undefined weights.

    Args:
        member: the engine, by its record.
        engine: the same, to be asked.
        folder: of the snapshot.
        version: of the policy in it.
        timeout_s: limit of what its ranks are asked.
        check: they compare what they hold with the folder, where they can.

    Raises:
        EngineError: it did not load it.
    """
    receipts = list[Receipt]()
    times = [time.perf_counter()]
    engine.pause()
    times.append(time.perf_counter())
    engine.update_weights_from_disk(str(folder), version)
    times.append(time.perf_counter())
    if member.takes_orders:
        task: Task = "compare" if check else "count"
        receipts = _receipts(task, member, engine, folder, version, timeout_s)
    times.append(time.perf_counter())
    engine.resume()
    times.append(time.perf_counter())
    pause, loaded, _, resume = (end - start for start, end in itertools.pairwise(times))
    return Load(pause, loaded, resume, receipts)


def _receipts(
    task: Task,
    member: Member,
    engine: EngineControl,
    folder: Path,
    version: int,
    timeout_s: float,
) -> list[Receipt]:
    """Makes the ranks of a paused member tell what they hold. Their answers come as files:
    there need be no other way from them to here."""
    order = Order(uuid.uuid4().hex[:8], "", task, timeout_s, folder=str(folder))
    engine.receive_weights([order] * member.num_ranks, version=version)
    receipts = []
    for rank in range(member.num_ranks):
        path = receipt_file(order.folder, order.serial, rank)
        record = read_json(path)
        if record is None:
            raise EngineError(f"its rank {rank} left no {path}")
        receipts.append(Receipt(**record))
        delete(path)
    return receipts
