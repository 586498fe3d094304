"""The data bus: producers write immutable shards, the sequencer plans batches, readers read them.

Every file has one writer and survives a kill at any instant. docs/reference/bus.md has the bytes.
"""
