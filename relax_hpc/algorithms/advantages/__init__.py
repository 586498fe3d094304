"""Advantages; `algorithms.table` lists them."""
