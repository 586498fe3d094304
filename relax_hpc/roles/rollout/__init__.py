"""Samples and scores: `build.main`, `loop.run`, `episodes`. Why it waits: see `loop`."""
