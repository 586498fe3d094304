"""The costs of a step: seconds, memory, how well the hardware was used."""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import get_args

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from relax_hpc.engines.megatron.flops import hearing_flops, peak_of, tower_flops, training_flops
from relax_hpc.engines.megatron.vision.stretches import Stretch
from relax_hpc.engines.megatron.work import Work
from relax_hpc.media.kinds import Modality, modality_of
from relax_hpc.models.architecture import Architecture

_Mark = float | torch.cuda.Event
_MEDIA = tuple(
    f"train/media/{kind}{what}" for kind in get_args(Modality) for what in ("s", "_tokens")
)
"""How many media of a modality were encoded, and tokens that stood for features of them."""


class Costs:
    """Collects during a step; waits for the GPU, and for the other ranks, only at its end."""

    def __init__(
        self, shape: Architecture, device: torch.device, *, weights_learn: bool = True
    ) -> None:
        self._shape, self._device, self._weights_learn = shape, device, weights_learn
        on_gpu = device.type == "cuda"
        self._peak = peak_of(torch.cuda.get_device_name(device)) if on_gpu else None
        self._begin()

    def _begin(self) -> None:
        self._phases: dict[str, list[tuple[_Mark, _Mark]]] = {}
        self._tokens = self._padded = 0
        self._flops = self._tower_flops = 0.0
        self._media = Counter[str]()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds to `time/name` what happens inside, on the GPU if there is one."""
        begin = self._mark()
        yield
        self._phases.setdefault(name, []).append((begin, self._mark()))

    def count(self, works: Sequence[Work], *, is_forward: bool = False) -> None:
        """Notes a forward and backward pass over them, which all ranks of a replica note.

        Args:
            is_forward: it was a forward pass alone, after which they are trained on.
        """
        for work in works:
            lengths = work.micro_batch.lengths[: len(work.samples)]
            if is_forward:
                self._flops += training_flops(self._shape, lengths) / 3
                continue
            flops = training_flops(self._shape, lengths, weights_learn=self._weights_learn)
            self._tokens += sum(lengths)
            self._padded += sum(work.micro_batch.lengths) - sum(lengths)
            self._flops += flops
        if self._shape.vision is not None:
            stretches = [each for work in works for each in work.micro_batch.stretches]
            flops = self._of_towers(stretches) / (3 if is_forward else 1)
            self._tower_flops += flops
            self._flops += flops
            if not is_forward:
                self._count_media(stretches)

    def _count_media(self, every: Sequence[Stretch]) -> None:
        kinds = {each.key: modality_of(each.row.media[each.medium]) for each in every}
        self._media.update(f"train/media/{kind}s" for kind in kinds.values())
        for each in every:
            self._media[f"train/media/{kinds[each.key]}_tokens"] += each.tokens

    def _of_towers(self, every: Sequence[Stretch]) -> float:
        seen = {s.key: s.row.media[s.medium].grid_thw for s in every if not s.is_heard}
        heard = {s.key: s.features for s in every if s.is_heard}
        shape = self._shape
        flops = tower_flops(shape.vision, seen.values()) if shape.vision else 0.0
        return flops + (hearing_flops(shape.audio, heard.values()) if shape.audio else 0.0)

    def end_step(self) -> dict[str, float]:
        """The costs of the step; collective over all ranks.

        Returns:
            `time/...` of every phase [s], this rank's own: where it waits for another rank counts
            with the phase that it waits in, so that they add up. Of all ranks together:
            `train/tokens_per_s_per_gpu` and, on a GPU whose peak is known, `train/mfu`, by the
            seconds that ranks were in these phases; of a model that sees
            `train/tower_tflops`, of all replicas, and `train/media/...`: media encoded, one
            once for each replica and portion, and tokens that stood for features, by modality;
            `train/padding`, the share of computed tokens that are none; on GPUs
            `memory/peak_gib`, of the fullest, since start.
        """
        on_gpu = self._device.type == "cuda"
        memory = torch.cuda.max_memory_allocated(self._device) / 2**30 if on_gpu else 0.0
        if on_gpu:
            torch.cuda.synchronize(self._device)
        found = {
            f"time/{name}": sum(_between(*pair) for pair in pairs)
            for name, pairs in sorted(self._phases.items())
        }
        [fullest] = self._reduced([memory], dist.ReduceOp.MAX)
        sums = [self._tokens, self._padded, self._flops, self._tower_flops, sum(found.values())]
        tokens, padded, flops, of_towers, seconds, *media = self._reduced(
            [*sums, *(float(self._media[name]) for name in _MEDIA)], dist.ReduceOp.SUM
        )
        self._begin()
        ranks = dist.get_world_size()
        replica = ranks / mpu.get_data_parallel_world_size()  # as many ranks counted the same
        seconds = max(seconds, 1e-9)
        found["train/tokens_per_s_per_gpu"] = tokens / replica / seconds
        found["train/padding"] = padded / max(tokens + padded, 1)
        if self._shape.vision is not None:
            found["train/tower_tflops"] = of_towers / replica / 1e12
            found |= {n: count / replica for n, count in zip(_MEDIA, media, strict=True) if count}
        if self._peak:
            found["train/mfu"] = flops / replica / seconds / self._peak
        return found | ({"memory/peak_gib": fullest} if on_gpu else {})

    def _mark(self) -> _Mark:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _reduced(self, values: Sequence[float], kind: dist.ReduceOp.RedOpType) -> list[float]:
        numbers = torch.tensor(values, dtype=torch.float64, device=self._device)
        dist.all_reduce(numbers, kind)
        return [float(value) for value in numbers.tolist()]


def _between(begin: _Mark, end: _Mark) -> float:
    """Seconds."""
    if isinstance(begin, float) and isinstance(end, float):
        return end - begin
    assert isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event)
    return float(begin.elapsed_time(end)) / 1000
