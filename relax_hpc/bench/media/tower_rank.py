"""The process of `bench.media.towers`: builds the tower, times it, measures its memory."""

import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from relax_hpc.bench.media.clock import Clock
from relax_hpc.bench.media.folder import recipe_of
from relax_hpc.bench.media.tower_passes import Passes
from relax_hpc.bench.media.tower_task import Size, Task
from relax_hpc.bench.ranks import joined
from relax_hpc.bench.report import Row
from relax_hpc.config.layout import Layout
from relax_hpc.engines.megatron import grid
from relax_hpc.engines.megatron.attention import choice
from relax_hpc.engines.megatron.vision.attention import of_towers
from relax_hpc.media.patches import patches
from relax_hpc.models.registry import read_architecture
from relax_hpc.models.vision.frames import Frame, Places
from relax_hpc.models.vision.tower import Tower
from relax_hpc.records import read_json

_SPEED_AIM, _RATIO_AIM = 290e3, 1.8
_SHARED_AIM = 1 / 0.6
"""Speed of two ranks, by that of one."""


def run(task: Task, rank: int, ranks: int) -> None:
    """Measures as a rank of a replica, the first of which writes the rows.

    One alone measures all of a task; several, which come after it, what they share out.
    """
    _, device = joined(rank, ranks, task.folder / f"rendezvous-{ranks}.json", task.secret)
    grid.initialize(Layout(tensor_parallel=ranks))
    bench = _Bench(task, device)
    rows = list(bench.rows() if ranks == 1 else bench.shared(ranks))
    if rank == 0:
        known = json.loads(task.results.read_text()) if ranks > 1 else []
        task.results.write_text(json.dumps([*known, *rows]))
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
            kernel = of_towers(choice.choose("auto", device, self._dtype))
            self._tower = Tower(self._shape, kernel).to(self._dtype)

    def rows(self) -> Iterator[Row]:
        for count, size in self._work.large:
            yield self._forward(count, size)
        yield from self._beside_hugging_face(*self._work.small)
        yield from self._passes().rows()

    def shared(self, ranks: int) -> Iterator[Row]:
        """Yields the speed of the most images, each of which one of the ranks encodes."""
        count, passes = self._work.memory[-1], self._passes()
        known = {row[0]: row[1] for row in json.loads(self._task.results.read_text())}
        name, speed = passes.name(count), count / passes.seconds(count)
        alone = known[name]
        yield Row(
            f"{name}, TP{ranks}", speed, "images/s", "TP1", alone, speed / alone,
            _SHARED_AIM if self._on_gpu else None,
        )  # fmt: skip

    def _passes(self) -> Passes:
        return Passes(self._work, self._tower, self._architecture, self._recipe, self._device)

    def _forward(self, count: int, size: Size) -> Row:
        images = self._chunks(count, size)

        @torch.no_grad()
        def once() -> None:
            for each, frames in images:
                self._tower(each, Places.of(frames, self._shape, self._device))

        seconds = statistics.median(self._clock.timed(once, self._work.repeats))
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
