"""Trains the model, on Megatron-core (`megatron/`), with its checkpoints and model families.

Other rooms may use `models/`, the shapes and names of weights. Nothing here imports SGLang.
"""
