"""The command line. Each command parses its options, calls one function and prints.

`bench/` measures a cluster, `prepare` turns public data sets into prompts, `demo/` makes a tiny
model and a task to try everything with.
"""
