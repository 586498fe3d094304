"""Shapes and names of weights by model family; `registry` says what a new one needs."""
