"""Holds the parts of a loss: one file per advantage, loss and correction, each with its source.

A new one is a subclass of `part.Advantage`, `part.Loss` or `part.Correction` in a file of its own,
an import and a line in `table.PARTS`; a user's own is `file.py:Class` in the job.

Parts import torch only when called, so a job can be checked without it.
"""
