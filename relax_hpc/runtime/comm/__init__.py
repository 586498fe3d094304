"""Connects processes: addresses, worlds of ranks, torch groups, doors for strangers and MPI."""
