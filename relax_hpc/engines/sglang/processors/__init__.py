"""Processors of media that SGLang loads by its own hook: it imports each module of this package."""
