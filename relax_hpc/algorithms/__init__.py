"""Holds the parts of a loss: one file per advantage, loss and correction, each with its source.

Parts import torch only when called, so a job can be checked without it.
"""
