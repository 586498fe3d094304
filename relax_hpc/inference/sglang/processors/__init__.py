"""Processors of media for SGLang, by its hook: SGLang imports each module of this package."""
