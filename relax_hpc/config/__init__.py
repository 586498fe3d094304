"""One run, described once: hand-written TOML in, resolved JSON in the run directory out.

Reading a job never imports an engine: `engines.NAME.args`, `transformer`, `optimizer.ddp` and
`optimizer.megatron` are pass-through tables, checked by SGLang's parser and Megatron-core's classes
before anything is queued.
"""
