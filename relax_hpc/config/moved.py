"""Keys of older jobs: refused, with the name that they have now."""

MOVED: dict[str, str] = {}
"""Old dotted key -> the new one, or what to write instead."""
