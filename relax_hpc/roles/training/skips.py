"""Updates that were not done, since a loss or a gradient was not finite."""

from collections.abc import Mapping
from typing import Any

from relax_hpc.engines.training_engine import Skip
from relax_hpc.errors import TrainingError

MAX_IN_A_ROW = 3
"""Updates skipped in a row that end the actor."""


def fields_of(skip: Skip, places: Mapping[int, str]) -> dict[str, Any]:
    """The fields of a `skipped` event.

    Args:
        places: guid -> where its rows are.
    """
    return {
        "reason": skip.reason,
        "in_a_row": skip.in_a_row,
        "num_samples": skip.num_samples,
        "samples": [s._asdict() | {"shard": places.get(s.guid)} for s in skip.samples],
    }


def line_of(skip: Skip, places: Mapping[int, str]) -> str:
    """The same as a line of log."""
    if not skip.samples:
        return f"{skip.reason}, but every sample's loss is: it is the model's own gradient"
    named = ", ".join(
        f"{s.guid}/{s.sibling} ({s.what})" + (f" in {places[s.guid]}" if s.guid in places else "")
        for s in skip.samples
    )
    more = skip.num_samples - len(skip.samples)
    return f"{skip.reason}: guid/sibling {named}" + (f" and {more} more" if more else "")


def stop_if_stuck(skip: Skip) -> None:
    """Ends the actor if nothing has been learned for a while, or nothing can be.

    Raises:
        TrainingError: MAX_IN_A_ROW updates were skipped in a row, or the model gives no sample
            finite logprobs.
    """
    if skip.is_model:
        raise TrainingError(
            f"{skip.reason}: the model gives none of the batch's samples finite logprobs, so its "
            "weights are broken, by an update before; nothing was published or saved since, and a "
            "restart begins at the newest checkpoint: lower actor.optimizer.lr"
        )
    if skip.in_a_row >= MAX_IN_A_ROW:
        raise TrainingError(
            f"{skip.in_a_row} updates in a row were skipped: "
            f"{line_of(skip, {})}; none of them changed the weights, and none was saved: a restart "
            "begins at the newest checkpoint: look at the samples, or lower actor.optimizer.lr"
        )
