"""Trains the model, on Megatron-core (`megatron/`), with its checkpoints and model families.

One step of a rank, in reading order:

    megatron.trainer        `accumulate` takes rows. It computes at once, or, where the loss needs
                            the whole batch, in `update`, which ends the step
    megatron.packing        rows to micro-batches
    megatron.updates        `pass_over`: forward and backward over micro-batches
    megatron.schedule       through the pipeline's stages
    megatron.scorer         logprobs of the tokens (`layers.logprobs`)
    algorithms.composition  the loss, of the algorithm's parts
    megatron.adam           the new weights

A new model family: `models.registry` says what it needs. Other rooms may use `models/`, the shapes
and names of weights. Nothing here imports SGLang.
"""
