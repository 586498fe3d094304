"""Describes a run as validated TOML, and as resolved JSON in the run directory.

Reading a job never imports an engine: `engines.NAME.args`, `transformer`, `actor.optimizer.ddp` and
`actor.optimizer.megatron` are pass-through tables, checked by SGLang's parser and Megatron-core's
classes before anything is queued.
"""
