"""The process of `bench.media.towers`: builds the tower, times it, measures its memory."""

import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from relax_hpc.bench.media.folder import recipe_of
from relax_hpc.bench.media.tower_task import SIBLINGS, Size, Task, language_seconds, share
from relax_hpc.bench.ranks import joined
from relax_hpc.bench.report import Row
from relax_hpc.config.layout import Layout
from relax_hpc.engines.megatron import grid, packing
from relax_hpc.engines.megatron.flops import PEAK, peak_of
from relax_hpc.engines.megatron.vision.encoder import Encoder
from relax_hpc.engines.megatron.vision.features import Features
from relax_hpc.engines.megatron.vision.senses import senses_of
from relax_hpc.media.patches import patches
from relax_hpc.models.registry import read_architecture
from relax_hpc.models.vision.frames import Frame, Places
from relax_hpc.models.vision.tower import Tower
from relax_hpc.records import read_json
from relax_hpc.schema import FinishReason, MediaKind, Medium, Trajectory

_SPEED_AIM, _RATIO_AIM, _MEMORY_AIM_GIB, _SHARE_AIM = 290e3, 1.8, 8.0, 0.08
_TEXT_TOKENS = 100


def run(task: Task) -> None:
    """Measures all of a task, and writes the rows."""
    _, device = joined(0, 1, task.folder / "rendezvous.json", task.secret)
    grid.initialize(Layout())
    rows = list(_Bench(task, device).rows())
    task.results.write_text(json.dumps(rows))
    dist.destroy_process_group()


class _Bench:
    def __init__(self, task: Task, device: torch.device) -> None:
        self._task, self._work, self._device = task, task.work, device
        self._on_gpu = device.type == "cuda"
        self._dtype = torch.bfloat16 if self._on_gpu else torch.float32
        self._architecture = read_architecture(task.model)
        assert self._architecture.vision is not None, "a model that sees"
        self._shape, self._recipe = self._architecture.vision, recipe_of(task.model)
        torch.manual_seed(0)
        with device:
            self._tower = Tower(self._shape).to(self._dtype)

    def rows(self) -> Iterator[Row]:
        for count, size in self._work.large:
            yield self._forward(count, size)
        yield from self._beside_hugging_face(*self._work.small)
        yield from self._in_two_passes()

    # The tower alone.

    def _forward(self, count: int, size: Size) -> Row:
        images = self._chunks(count, size)

        @torch.no_grad()
        def once() -> None:
            for each, frames in images:
                self._tower(each, Places.of(frames, self._shape, self._device))

        seconds = statistics.median(self._timed(once))
        speed = sum(len(each) for each, _ in images) / seconds
        name = f"forward, {count} x {size[0]} x {size[1]}"
        return Row(name, speed, "patches/s", aim=_SPEED_AIM if self._on_gpu else None)

    def _beside_hugging_face(self, count: int, size: Size) -> Iterator[Row]:
        images, other = self._chunks(count, size), self._theirs()
        with torch.no_grad():
            given = [torch.randn_like(level) for level in self._ours(*images[0])]

        def both_ways(model: Any, features: Callable[..., list[Tensor]]) -> None:  # noqa: ANN401
            model.zero_grad(set_to_none=True)
            for each in images:
                levels = features(*each)
                above = [g[: len(level)] for g, level in zip(given, levels, strict=True)]
                torch.autograd.backward(levels, above)

        def theirs(each: Tensor, frames: Sequence[Frame]) -> list[Tensor]:
            grids = torch.tensor([[1, *frame] for frame in frames], device=self._device)
            out = other(each, grid_thw=grids)
            return [out.pooler_output, *out.deepstack_features]

        with torch.no_grad():
            pairs = zip(self._ours(*images[0]), theirs(*images[0]), strict=True)
            apart = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
        ours_s, theirs_s = list[float](), list[float]()
        for number in range(self._work.repeats):
            ours_s += self._timed(lambda: both_ways(self._tower, self._ours), 1, not number)
            theirs_s += self._timed(lambda: both_ways(other, theirs), 1, not number)
        self._tower.zero_grad(set_to_none=True)
        total = sum(len(each) for each, _ in images)
        ratio = statistics.median(b / a for a, b in zip(ours_s, theirs_s, strict=True))
        speeds = [total / statistics.median(seconds) for seconds in (ours_s, theirs_s)]
        name = f"forward and backward, {count} x {size[0]} x {size[1]}"
        yield Row(name, speeds[0], "patches/s", "Hugging Face, SDPA", speeds[1], ratio, _RATIO_AIM)
        yield Row("largest difference from Hugging Face's features", apart, "of the largest")

    def _ours(self, each: Tensor, frames: Sequence[Frame]) -> list[Tensor]:
        levels: list[Tensor] = self._tower(each, Places.of(frames, self._shape, self._device))
        return levels

    def _theirs(self) -> Any:  # noqa: ANN401
        """Hugging Face's tower with the same weights."""
        from transformers import Qwen3VLVisionConfig
        from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

        record = read_json(self._task.model / "config.json") or {}
        config = Qwen3VLVisionConfig(**record["vision_config"])
        config._attn_implementation = "sdpa"
        with self._device:
            other = Qwen3VLVisionModel(config).to(self._dtype)
        other.load_state_dict(self._tower.state_dict())
        return other

    def _chunks(self, count: int, size: Size) -> list[tuple[Tensor, list[Frame]]]:
        """Patches of drawn images, as many at once as the trainer takes."""
        side = self._shape.patch
        frame = Frame(size[0] // side, size[1] // side)
        at_once = max(self._work.tower_patches // frame.patches, 1)
        found = []
        for first in range(0, count, at_once):
            some = min(at_once, count - first)
            shape = (some, 1, *size, 3)
            pixels = torch.randint(0, 256, shape, dtype=torch.uint8, device=self._device)
            cut = [patches(each, self._recipe.image, self._dtype) for each in pixels]
            found.append((torch.cat(cut), [frame] * some))
        return found

    # As the trainer does it.

    def _in_two_passes(self) -> Iterator[Row]:
        """All features without a graph, then again with one, chunk by chunk."""
        senses = senses_of(self._tower, None, self._architecture, self._recipe, self._device)
        encoder = Encoder(
            senses, self._shape, self._device, patches_at_once=self._work.tower_patches
        )
        wrapped = DistributedDataParallel(
            TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1),
            DistributedDataParallelConfig(grad_reduce_in_fp32=True),
            self._tower,
        )
        height, width = self._work.memory_size
        array = np.random.default_rng(0).integers(0, 256, (1, height, width, 3), np.uint8)
        encoder.pixels = lambda wanted: [array] * len(wanted)
        seconds = 0.0
        for count in self._work.memory:
            batch = self._batch(count)
            found = self._features(encoder, wrapped, batch)  # the first ones allocate
            assert found.gradient is not None, "the tower learns"
            known = found.values.nbytes + found.gradient.nbytes
            del found
            before = self._restart_peak()
            seconds = statistics.median(
                self._timed(lambda: self._features(encoder, wrapped, batch), 2, False)  # noqa: B023
            )
            name = f"{count} x {height} x {width}, features, then gradients"
            yield Row(name, count / seconds, "images/s")
            if self._on_gpu:
                above = (torch.cuda.max_memory_allocated() - before - known) / 2**30
                yield Row(f"{name}: peak above both", above, "GiB", aim=_MEMORY_AIM_GIB)
        yield from self._share(seconds / self._work.memory[-1])

    def _features(
        self, encoder: Encoder, wrapped: DistributedDataParallel, batch: packing.MicroBatch
    ) -> Features:
        """One step of the tower: what the language model does between is a gradient of ones."""
        found = encoder.encode([batch], learns=True)
        assert found is not None and found.gradient is not None, "there are media"
        found.gradient.fill_(1.0)
        encoder.learn(found, wrapped)
        return found

    def _restart_peak(self) -> int:
        """Bytes that are there now; the peak counts from here on."""
        if not self._on_gpu:
            return 0
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()

    def _batch(self, count: int) -> packing.MicroBatch:
        side = self._shape.patch
        height, width = (pixels // side for pixels in self._work.memory_size)
        tokens = height * width // self._shape.merge**2
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

    def _timed(
        self, act: Callable[[], object], repeats: int | None = None, warm_up: bool = True
    ) -> list[float]:
        """Seconds of each repeat."""
        if warm_up:
            act()
        found = []
        for _ in range(repeats or self._work.repeats):
            begin = self._now()
            act()
            found.append(self._now() - begin)
        return found

    def _now(self) -> float:
        if self._on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()


def _row(number: int, grid_thw: tuple[int, int, int], tokens: int) -> Trajectory:
    """A row that is nothing but an image of its own."""
    medium = Medium(MediaKind.PNG, np.empty(0, np.uint8), grid_thw, number.to_bytes(16, "little"))
    return Trajectory(
        guid=number, sibling=0, prompt_index=0, seed=0, token_ids=np.zeros(tokens, np.int32),
        prompt_len=tokens, loss_mask=np.zeros(tokens, np.uint8),
        version_runs=np.empty((0, 2), np.int32), finish=FinishReason.STOP, reward=0.0,
        media=(medium,), media_spans=np.array([[0, 0, tokens]], np.int32),
    )  # fmt: skip
