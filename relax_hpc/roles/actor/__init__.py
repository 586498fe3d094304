"""Trains the policy: `build.main`, `loop.run`, `rank0.ActorRank0`. A kill: see `build`."""
