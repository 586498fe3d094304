"""Keys of older jobs: refused, with the name that they have now."""

MOVED: dict[str, str] = {
    "actor.ddp": "actor.optimizer.ddp",
}
"""Old dotted key -> the new one, or what to write instead."""
