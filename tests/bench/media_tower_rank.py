"""The process that `media_towers` starts: it builds the tower, times it, measures its memory."""

import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from media_shapes import recipe_of
from media_towers import SIBLINGS, Size, Task, Work, language_seconds, share
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from relax_hpc.cli.bench.report import ReportRow
from relax_hpc.cli.bench.shapes import join
from relax_hpc.config.model import Layout
from relax_hpc.data.media.patches import patches
from relax_hpc.data.media.recipe import Recipe
from relax_hpc.runtime.files.records import read_json
from relax_hpc.schema import FinishReason, MediaKind, Medium, Trajectory
from relax_hpc.trainer.megatron import grid, packing
from relax_hpc.trainer.megatron.costs import PEAK, peak_of
from relax_hpc.trainer.megatron.encoder import Encoder, encoders_of
from relax_hpc.trainer.megatron.features import Features
from relax_hpc.trainer.megatron.layers import attention_kernels
from relax_hpc.trainer.megatron.layers.attention_kernels import of_towers
from relax_hpc.trainer.models.architecture import Architecture
from relax_hpc.trainer.models.registry import read_architecture
from relax_hpc.trainer.models.towers import Frame, Places, VisionTower


class Clock:
    """Times acts on a device."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"

    def timed(
        self, act: Callable[[], object], repeats: int, *, warm_up: bool = True
    ) -> list[float]:
        """Returns the seconds of each repeat; `warm_up` does it once before."""
        if warm_up:
            act()
        found = []
        for _ in range(repeats):
            begin = self._now()
            act()
            found.append(self._now() - begin)
        return found

    def _now(self) -> float:
        if self._on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()


_MEMORY_AIM_GIB, _SHARE_AIM = 8.0, 0.08
_TEXT_TOKENS = 100
_REPEATS = 2


class Passes:
    """Both passes over images of one size, by the ranks of a replica, as the trainer encodes them:
    features without a graph, then with one, in chunks."""

    def __init__(
        self,
        work: Work,
        tower: VisionTower,
        architecture: Architecture,
        recipe: Recipe,
        device: torch.device,
    ) -> None:
        """Takes a tower that learns; collective where the replica has several ranks."""
        self._work, self._architecture, self._recipe = work, architecture, recipe
        self._device, self._on_gpu, self._clock = device, device.type == "cuda", Clock(device)
        assert architecture.vision is not None, "a model that sees"
        self._encoder = Encoder(
            encoders_of(tower, None, architecture, recipe, device),
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

    def rows(self) -> Iterator[ReportRow]:
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
            yield ReportRow(self.name(count), count / seconds, "images/s")
            if self._on_gpu:
                above = (torch.cuda.max_memory_allocated() - before - known) / 2**30
                said = f"{self.name(count)}: peak above both"
                yield ReportRow(said, above, "GiB", aim=_MEMORY_AIM_GIB)
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

    def _share(self, tower_s: float) -> Iterator[ReportRow]:
        """The tower's share of the training of a prompt group, whose siblings see one image."""
        if not self._on_gpu:
            return
        height, width = self._work.memory_size
        image = height * width // self._recipe.image.side**2
        peak = peak_of(torch.cuda.get_device_name()) or PEAK
        tokens = image + _TEXT_TOKENS + self._work.sampled_tokens
        language_s = language_seconds(self._architecture, tokens, self._work.mfu * peak)
        once, each = (share(times * tower_s, language_s) for times in (1, SIBLINGS))
        yield ReportRow("the tower's time for a group", 1e3 * tower_s, "ms")
        said = f"the language model's, computed at {self._work.mfu:.0%} MFU"
        yield ReportRow(said, 1e3 * language_s, "ms")
        yield ReportRow(
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


_SPEED_AIM, _RATIO_AIM = 290e3, 1.8
_SHARED_AIM = 1 / 0.6
"""Speed of two ranks, by that of one."""


def run(task: Task, rank: int, ranks: int) -> None:
    """Measures as a rank of a replica, the first of which writes the rows.

    One alone measures all of a task; several, which come after it, what they share out.
    """
    _, device = join(rank, ranks, task.folder / f"rendezvous-{ranks}.json", task.secret)
    grid.initialize(Layout(tensor_parallel=ranks))
    bench = _Bench(task, device)
    rows = list(bench.rows() if ranks == 1 else bench.shared(ranks))
    if rank == 0:
        known = json.loads(task.results.read_text(encoding="utf-8")) if ranks > 1 else []
        task.results.write_text(json.dumps([*known, *rows]), encoding="utf-8")
    dist.destroy_process_group()


class _Bench:
    def __init__(self, task: Task, device: torch.device) -> None:
        self._task, self._work, self._device = task, task.work, device
        self._on_gpu, self._clock = device.type == "cuda", Clock(device)
        self._dtype = torch.bfloat16 if self._on_gpu else torch.float32
        self._architecture = read_architecture(task.model)
        assert self._architecture.vision is not None, "a model that sees"
        self._shape, self._recipe = self._architecture.vision, recipe_of(task.model)
        torch.manual_seed(0)
        with device:
            kernel = of_towers(attention_kernels.choose("auto", device, self._dtype))
            self._tower = VisionTower(self._shape, kernel).to(self._dtype)

    def rows(self) -> Iterator[ReportRow]:
        for count, size in self._work.large:
            yield self._forward(count, size)
        yield from self._beside_hugging_face(*self._work.small)
        yield from self._passes().rows()

    def shared(self, ranks: int) -> Iterator[ReportRow]:
        """Yields the speed of the most images, each of which one of the ranks encodes."""
        count, passes = self._work.memory[-1], self._passes()
        known = {
            row[0]: row[1] for row in json.loads(self._task.results.read_text(encoding="utf-8"))
        }
        name, speed = passes.name(count), count / passes.seconds(count)
        alone = known[name]
        yield ReportRow(
            f"{name}, TP{ranks}", speed, "images/s", "TP1", alone, speed / alone,
            _SHARED_AIM if self._on_gpu else None,
        )  # fmt: skip

    def _passes(self) -> Passes:
        return Passes(self._work, self._tower, self._architecture, self._recipe, self._device)

    def _forward(self, count: int, size: Size) -> ReportRow:
        images = self._chunks(count, size)

        @torch.no_grad()
        def once() -> None:
            for each, frames in images:
                self._tower(each, Places.of(frames, self._shape, self._device))

        seconds = statistics.median(self._clock.timed(once, self._work.repeats))
        speed = sum(len(each) for each, _ in images) / seconds
        name = f"forward, {count} x {size[0]} x {size[1]}"
        return ReportRow(name, speed, "patches/s", aim=_SPEED_AIM if self._on_gpu else None)

    def _beside_hugging_face(self, count: int, size: Size) -> Iterator[ReportRow]:
        images, other = self._chunks(count, size), self._theirs()
        with torch.no_grad():
            given = [torch.randn_like(level) for level in self._ours(*images[0])]

        def both_ways(model: Any, features: Callable[..., list[Tensor]]) -> None:
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
            first = not number
            ours_s += self._clock.timed(
                lambda: both_ways(self._tower, self._ours), 1, warm_up=first
            )
            theirs_s += self._clock.timed(lambda: both_ways(other, theirs), 1, warm_up=first)
        self._tower.zero_grad(set_to_none=True)
        total = sum(len(each) for each, _ in images)
        ratio = statistics.median(b / a for a, b in zip(ours_s, theirs_s, strict=True))
        speeds = [total / statistics.median(seconds) for seconds in (ours_s, theirs_s)]
        name = f"forward and backward, {count} x {size[0]} x {size[1]}"
        yield ReportRow(
            name, speeds[0], "patches/s", "Hugging Face, SDPA", speeds[1], ratio, _RATIO_AIM
        )
        yield ReportRow("largest difference from Hugging Face's features", apart, "of the largest")

    def _ours(self, each: Tensor, frames: Sequence[Frame]) -> list[Tensor]:
        levels: list[Tensor] = self._tower(each, Places.of(frames, self._shape, self._device))
        return levels

    def _theirs(self) -> Any:
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
