"""Corrections for stale or differing logprobs; `algorithms.table` lists them."""
