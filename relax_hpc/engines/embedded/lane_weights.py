"""Receiving weights from the trainer's rank on the same GPU, as `engines.sglang.receive` does."""

import io
import json
import pickle
import time
from base64 import b64decode
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from relax_hpc.comm.bucket import NamedTensors, fingerprint, views
from relax_hpc.comm.lanes import Taker
from relax_hpc.comm.orders import Order, Receipt, key_of
from relax_hpc.comm.patience import Patience
from relax_hpc.errors import EngineError

Load = Callable[[NamedTensors], int]
"""Loads tensors between two steps; returns how many of them are not what was loaded."""


class LaneWeights:
    """The lane to the one trainer there is."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._taker: Taker | None = None
        self._store = ""

    def carry_out(self, payload: str, load: Load) -> None:
        """Does what a trainer orders; how it went is told to the trainer, not to the caller.

        Args:
            payload: as `EngineClient.receive_weights` makes it, for this rank.
            load: called for every bucket.
        """
        order = order_of(payload)
        taker = self._taker
        if taker is None or self._store != order.store or order.task == "prepare":
            taker = self._taker = Taker(order, self._device)
            self._store = order.store
        try:
            receipt = self._receive(taker, order, load)
        except (RuntimeError, OSError, ValueError, EngineError) as error:
            self._taker = None
            taker.give_up(order.serial)
            receipt = Receipt(error=f"{type(error).__name__}: {error}")
        taker.store.put(key_of(order.serial, order.lane), json.dumps(asdict(receipt)))

    def _receive(self, taker: Taker, order: Order, load: Load) -> Receipt:
        if order.task == "prepare":
            taker.bucket(0)
            return Receipt()
        patience = Patience(order, taker.store.shelf)
        start, receipt = time.perf_counter(), Receipt()
        for index, bucket in enumerate(taker.plan.buckets):
            taker.wait_for(index, order, patience)
            receipt.wire_seconds = time.perf_counter() - start
            flat = taker.bucket(index)
            tensors = [
                (spec.name, tensor)
                for spec, tensor in zip(bucket, views(flat, bucket), strict=True)
            ]
            receipt.differing += load(tensors)
            if order.task == "check":
                receipt.fingerprints.append(fingerprint(flat))
            taker.give_back(index, order)
        receipt.load_seconds = time.perf_counter() - start - receipt.wire_seconds
        return receipt


def order_of(payload: str) -> Order:
    """The order in what SGLang would take for a named tensor.

    Raises:
        ValueError: it is something else.
    """
    try:
        [(text, _)] = _Unpickler(io.BytesIO(b64decode(payload))).load()
        return Order(**json.loads(text))
    except (pickle.UnpicklingError, TypeError) as error:
        raise ValueError(f"not an order: {error}") from error


class _Unpickler(pickle.Unpickler):
    """Makes nothing but what an order comes with."""

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401
        if (module, name) == ("torch", "ByteTensor"):
            return torch.ByteTensor
        raise pickle.UnpicklingError(f"{module}.{name} has no place in an order")
