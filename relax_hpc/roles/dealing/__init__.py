"""Deals batches: portions of a planned batch, and the micro-batches of each rank."""
