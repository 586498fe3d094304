"""A tower as the trainer has it encode: features without a graph, then with one, in chunks."""

import statistics
from collections.abc import Iterator

import numpy as np
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer import TransformerConfig

from relax_hpc.bench.media.clock import Clock
from relax_hpc.bench.media.tower_task import SIBLINGS, Work, language_seconds, share
from relax_hpc.bench.report import Row
from relax_hpc.engines.megatron import packing
from relax_hpc.engines.megatron.flops import PEAK, peak_of
from relax_hpc.engines.megatron.vision.encoder import Encoder
from relax_hpc.engines.megatron.vision.features import Features
from relax_hpc.engines.megatron.vision.senses import senses_of
from relax_hpc.media.recipe import Recipe
from relax_hpc.models.architecture import Architecture
from relax_hpc.models.vision.tower import Tower
from relax_hpc.schema import FinishReason, MediaKind, Medium, Trajectory

_MEMORY_AIM_GIB, _SHARE_AIM = 8.0, 0.08
_TEXT_TOKENS = 100
_REPEATS = 2


class Passes:
    """Both passes over images of one size, by the ranks of a replica."""

    def __init__(
        self,
        work: Work,
        tower: Tower,
        architecture: Architecture,
        recipe: Recipe,
        device: torch.device,
    ) -> None:
        """Takes a tower that learns; collective where the replica has several ranks."""
        self._work, self._architecture, self._recipe = work, architecture, recipe
        self._device, self._on_gpu, self._clock = device, device.type == "cuda", Clock(device)
        assert architecture.vision is not None, "a model that sees"
        self._encoder = Encoder(
            senses_of(tower, None, architecture, recipe, device),
            architecture.vision,
            device,
            patches_at_once=work.tower_patches,
        )
        self._patch, self._merge = architecture.vision.patch, architecture.vision.merge
        self._wrapped = DistributedDataParallel(
            TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1),
            DistributedDataParallelConfig(grad_reduce_in_fp32=True),
            tower,
        )
        height, width = work.memory_size
        array = np.random.default_rng(0).integers(0, 256, (1, height, width, 3), np.uint8)
        self._encoder.pixels = lambda wanted: [array] * len(wanted)

    def name(self, count: int) -> str:
        """Names what `seconds` measures."""
        height, width = self._work.memory_size
        return f"{count} x {height} x {width}, features, then gradients"

    def seconds(self, count: int) -> float:
        """Times so many images, each of which is another one."""
        batch = self._batch(count)
        return statistics.median(self._clock.timed(lambda: self._both(batch), _REPEATS))

    def rows(self) -> Iterator[Row]:
        """Yields speed and memory by the number of images, and the share of training."""
        seconds = 0.0
        for count in self._work.memory:
            batch = self._batch(count)
            found = self._both(batch)  # the first ones allocate
            assert found.gradient is not None, "the tower learns"
            known = found.values.nbytes + found.gradient.nbytes
            del found
            before = self._restart_peak()
            seconds = self.seconds(count)
            yield Row(self.name(count), count / seconds, "images/s")
            if self._on_gpu:
                above = (torch.cuda.max_memory_allocated() - before - known) / 2**30
                said = f"{self.name(count)}: peak above both"
                yield Row(said, above, "GiB", aim=_MEMORY_AIM_GIB)
        yield from self._share(seconds / self._work.memory[-1])

    def _both(self, batch: packing.MicroBatch) -> Features:
        """One step of the tower: what the language model does between is a gradient of ones."""
        found = self._encoder.encode([batch], learns=True)
        assert found is not None and found.gradient is not None, "there are media"
        found.gradient.fill_(1.0)
        self._encoder.learn(found, self._wrapped)
        return found

    def _restart_peak(self) -> int:
        """Bytes that are there now; the peak counts from here on."""
        if not self._on_gpu:
            return 0
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()

    def _batch(self, count: int) -> packing.MicroBatch:
        height, width = (pixels // self._patch for pixels in self._work.memory_size)
        tokens = height * width // self._merge**2
        rows = [_row(number, (1, height, width), tokens) for number in range(count)]
        return packing.build(rows, range(count), device=self._device, recipe=self._recipe)

    def _share(self, tower_s: float) -> Iterator[Row]:
        """The tower's share of the training of a prompt group, whose siblings see one image."""
        if not self._on_gpu:
            return
        height, width = self._work.memory_size
        image = height * width // self._recipe.image.side**2
        peak = peak_of(torch.cuda.get_device_name()) or PEAK
        tokens = image + _TEXT_TOKENS + self._work.sampled_tokens
        language_s = language_seconds(self._architecture, tokens, self._work.mfu * peak)
        once, each = (share(times * tower_s, language_s) for times in (1, SIBLINGS))
        yield Row("the tower's time for a group", 1e3 * tower_s, "ms")
        said = f"the language model's, computed at {self._work.mfu:.0%} MFU"
        yield Row(said, 1e3 * language_s, "ms")
        yield Row(
            "the tower's share of training", once, "of both", "encoded per sample", each,
            aim=_SHARE_AIM,
        )  # fmt: skip


def _row(number: int, grid_thw: tuple[int, int, int], tokens: int) -> Trajectory:
    """A row that is nothing but an image of its own."""
    medium = Medium(MediaKind.PNG, np.empty(0, np.uint8), grid_thw, number.to_bytes(16, "little"))
    return Trajectory(
        guid=number, sibling=0, prompt_index=0, seed=0, token_ids=np.zeros(tokens, np.int32),
        prompt_len=tokens, loss_mask=np.zeros(tokens, np.uint8),
        version_runs=np.empty((0, 2), np.int32), finish=FinishReason.STOP, reward=0.0,
        media=(medium,), media_spans=np.array([[0, 0, tokens]], np.int32),
    )  # fmt: skip
