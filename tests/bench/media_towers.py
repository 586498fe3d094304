"""The trainer's tower that sees, with random weights, on this machine's GPU or CPU: its speed.

Hugging Face's tower has the same weights and is given the same patches.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from media_shapes import model_folder, recipe_of
from torch import Tensor

from relax_hpc.cli.bench.report import ReportRow
from relax_hpc.data.media.patches import patches
from relax_hpc.runtime.files.records import read_json
from relax_hpc.runtime.files.scratch import scratch_folder
from relax_hpc.trainer.models.registry import read_architecture
from relax_hpc.trainer.models.towers import Frame, Places, VisionTower

Size = tuple[int, int]
"""Height and width of an image in pixels."""
_SPEED_AIM, _RATIO_AIM = 290e3, 1.8


class Work(NamedTuple):
    """The images that go through the tower."""

    large: Sequence[tuple[int, Size]] = ((8, (1024, 1024)), (1, (4096, 2048)))
    """(images, their size) whose forward is timed."""
    small: tuple[int, Size] = (256, (256, 256))
    """Images whose forward and backward is compared with Hugging Face's."""
    tower_patches: int = 8192
    """Patches that go through the tower at once; see `actor.advanced.tower_patches`."""
    repeats: int = 5


def measure(shape: str, work: Work) -> Iterator[ReportRow]:
    """Rows as they come; `shape` names one of `media_shapes.SHAPES` or a model's folder."""
    with scratch_folder("bench") as folder:
        bench = _Bench(model_folder(shape, folder), work)
        for count, size in work.large:
            yield bench.forward(count, size)
        yield from bench.beside_hugging_face(*work.small)


class _Bench:
    def __init__(self, model: Path, work: Work) -> None:
        from relax_hpc.trainer.megatron import cpu

        cpu.install()  # before Megatron-core is imported
        from relax_hpc.trainer.megatron.layers import attention_kernels

        self._model, self._work, self._on_gpu = model, work, torch.cuda.is_available()
        self._device = torch.device("cuda" if self._on_gpu else "cpu")
        self._dtype = torch.bfloat16 if self._on_gpu else torch.float32
        shape = read_architecture(model).vision
        assert shape is not None, "a model that sees"
        self._shape, self._recipe = shape, recipe_of(model)
        torch.manual_seed(0)
        with self._device:
            kernel = attention_kernels.choose("auto", self._device, self._dtype)
            of_towers = attention_kernels.of_towers(kernel)
            self._tower = VisionTower(self._shape, of_towers).to(self._dtype)

    def forward(self, count: int, size: Size) -> ReportRow:
        images = self._chunks(count, size)

        @torch.no_grad()
        def once() -> None:
            for chunk in images:
                self._ours(*chunk)

        once()
        seconds = statistics.median(self._timed(once) for _ in range(self._work.repeats))
        speed = sum(len(each) for each, _ in images) / seconds
        name = f"forward, {count} x {size[0]} x {size[1]}"
        return ReportRow(name, speed, "patches/s", aim=_SPEED_AIM if self._on_gpu else None)

    def beside_hugging_face(self, count: int, size: Size) -> Iterator[ReportRow]:
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
        for _ in range(self._work.repeats + 1):
            ours_s.append(self._timed(lambda: both_ways(self._tower, self._ours)))
            theirs_s.append(self._timed(lambda: both_ways(other, theirs)))
        total = sum(len(each) for each, _ in images)
        ratio = statistics.median(b / a for a, b in zip(ours_s[1:], theirs_s[1:], strict=True))
        speeds = [total / statistics.median(seconds[1:]) for seconds in (ours_s, theirs_s)]
        name = f"forward and backward, {count} x {size[0]} x {size[1]}"
        yield ReportRow(
            name, speeds[0], "patches/s", "Hugging Face, SDPA", speeds[1], ratio, _RATIO_AIM
        )
        yield ReportRow("largest difference from Hugging Face's features", apart, "of the largest")

    def _timed(self, act: Callable[[], object]) -> float:
        begin = self._now()
        act()
        return self._now() - begin

    def _now(self) -> float:
        if self._on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    def _ours(self, each: Tensor, frames: Sequence[Frame]) -> list[Tensor]:
        levels: list[Tensor] = self._tower(each, Places.of(frames, self._shape, self._device))
        return levels

    def _theirs(self) -> Any:
        """Hugging Face's tower with the same weights."""
        from transformers import Qwen3VLVisionConfig
        from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

        record = read_json(self._model / "config.json") or {}
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
