"""Trains on Megatron-core; `relax_hpc.trainer` has the reading order."""
