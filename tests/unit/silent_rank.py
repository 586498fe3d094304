"""A rank of an MPI world: `mpirun -n 3 python silent_rank.py HOW`; prints what it is told."""

import sys
import time

from relax_hpc.errors import PeerTimeoutError
from relax_hpc.runtime.comm.world import MpiWorld, abandon

SILENT = 1


def main(how):
    world = MpiWorld.of_step(3, timeout_s=1)
    told = world.bcast({"rank 0": world.rank})
    gathered = world.allgather("x" * world.rank)
    part = world.split(world.rank % 2)
    assert (told, gathered) == ({"rank 0": 0}, ["", "x", "xx"]), (told, gathered)
    assert part.allgather(world.rank) == [[0, 2], [1]][world.rank % 2]
    try:
        if world.rank == SILENT:
            if how == "fails":
                raise RuntimeError("it fails")
            time.sleep(60)
        world.barrier()
    except (PeerTimeoutError, RuntimeError) as error:
        print(f"rank {world.rank}: {error}", flush=True)
        time.sleep(2 * (how != "fails"))  # others may end later
        abandon()
        raise


if __name__ == "__main__":
    main(sys.argv[1])
