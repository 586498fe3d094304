"""Scores responses: `registry` lists functions, `contract` says what they are given."""
