"""Losses of the policy; `algorithms.table` lists them."""
