"""Runs engines that sample: SGLang (`sglang/`), the embedded one for CPUs (`embedded/`), and pools.

`members` is the registry by which trainer and engines know each other. Nothing here imports
Megatron-core.
"""
