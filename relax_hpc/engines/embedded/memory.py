"""Memory that an idle engine gives back, and takes again."""

from collections.abc import Iterable

import torch
from torch import Tensor

_GARBAGE = 255
"""A byte that makes an element of every type of weights not a number."""


class Released:
    """Weights whose memory was given back; their views stay what they are."""

    def __init__(self, weights: Iterable[Tensor]) -> None:
        storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in weights}
        self._sizes = [(storage, storage.nbytes()) for storage in storages.values()]
        for storage, _ in self._sizes:
            if storage.resizable():  # on a CPU not, once numpy has looked at it
                storage.resize_(0)

    def resume(self) -> None:
        """Takes the memory again. What it held is lost, and shows: nothing but NaN is computed."""
        for storage, size in self._sizes:
            if storage.nbytes() != size:
                storage.resize_(size)
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).fill_(_GARBAGE)
