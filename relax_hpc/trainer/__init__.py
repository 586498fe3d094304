"""Trains the model, on Megatron-core (`megatron/`), with its checkpoints and model families.

One step of a rank, in reading order: `megatron.trainer` (`accumulate` takes rows, `update` ends the
step), `megatron.packing` (rows to micro-batches), `megatron.updates` (`pass_over`: forward and
backward over them), `megatron.schedule` (through the pipeline's stages), `megatron.composition`
(the loss, of the algorithm's parts), `megatron.adam`.

A new model family: `models.registry` says what it needs. Other rooms may use `models/`, the shapes
and names of weights. Nothing here imports SGLang.
"""
