"""AdamW on a data-parallel rank's shards of the parameters, in one pass over memory.

Moments may be bfloat16: then they are rounded stochastically. Rounded to the nearest, a moment that
changes by less than 1/256 of itself in a step would stand still: with beta2 = 0.999, the second
moment could rise but never fall.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from relax_hpc.engines.megatron.optimizer.host_memory import HostMemory, streamed

PIECE = 1 << 24
"""Elements of a shard in host memory that go through the device at once."""


class Shard(NamedTuple):
    """One parameter's part that this rank updates; n elements."""

    main: Tensor
    """[n] float32; Adam's parameter."""
    grad: Tensor
    """[n] in the type of the gradient buffers, summed over ranks."""
    weight: Tensor | None
    """[n] what the model computes with, unless that is `main` itself."""


class Step(NamedTuple):
    """The numbers that one parameter's update needs."""

    grad_scale: float
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    updates: float
    """Updates, this one included."""
    seed: int
    """Seed of the rounding: another one for every update and parameter."""


class ShardedAdamW(torch.optim.AdamW):
    """Torch's state and groups, where Megatron looks for them; the update is `update`."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        shards: Sequence[Shard],
        *,
        moments: torch.dtype = torch.float32,
        offload: float = 0.0,
    ) -> None:
        """Makes the state, zeros, and moves the part of it that is to be in host memory.

        Args:
            groups: parameter groups as torch's, with lr, betas, eps and weight_decay.
            shards: of all parameters of the groups.
            moments: float32 or bfloat16.
            offload: fraction of the main parameters and moments that is kept in host memory; whole
                parameters, and main parameters only where the model has a weight of its own.
        """
        super().__init__([torch.zeros(0)])
        self.param_groups = groups  # shards of float32 models are views, which torch would refuse
        self._moments = moments
        self._far: set[Tensor] = set()
        self._memory = self._move_out(shards, offload)
        for shard in shards:
            self._make_state(shard)

    @torch.no_grad()
    def update(self, shards: Sequence[Shard], grad_scale: float) -> None:
        """One AdamW step with the gradients times `grad_scale`; the weights are set, too."""
        of = {shard.main: shard for shard in shards}
        far: list[tuple[Shard, Step]] = []
        of_groups = [(group, main) for group in self.param_groups for main in group["params"]]
        for number, (group, main) in enumerate(of_groups):
            state = self.state[main]
            state["step"] += 1
            count = float(state["step"])
            step = Step(
                grad_scale, group["lr"], group["betas"], group["eps"], group["weight_decay"],
                count, seed=(int(count) * 0x9E3779B1 + number * 0x85EBCA77) & 0x7FFFFFFF,
            )  # fmt: skip
            shard = of[main]
            if main in self._far:
                far.append((shard, step))
            else:
                adamw(*shard, state["exp_avg"], state["exp_avg_sq"], step)
        self._update_far(far)

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        raise NotImplementedError("gradients are not the parameters': use update")

    def _move_out(self, shards: Sequence[Shard], fraction: float) -> HostMemory | None:
        room = fraction * sum(shard.main.numel() for shard in shards)
        for shard in shards:
            if 0 < shard.main.numel() <= room:
                room -= shard.main.numel()
                self._far.add(shard.main)
        if not self._far:
            return None
        width = 4 + 2 * self._moments.itemsize
        return HostMemory(
            sum(width * main.numel() + 3 * HostMemory.ALIGNMENT for main in self._far),
            next(iter(self._far)).device,
        )

    def _make_state(self, shard: Shard) -> None:
        state = self.state[shard.main]
        state["step"] = torch.zeros((), dtype=torch.float32)
        for key in ("exp_avg", "exp_avg_sq"):
            if shard.main in self._far:
                assert self._memory is not None
                state[key] = self._memory.take(shard.main.numel(), self._moments).zero_()
            else:
                state[key] = torch.zeros_like(shard.main, dtype=self._moments, requires_grad=False)
        if shard.main in self._far and shard.weight is not None:
            assert self._memory is not None
            shard.main.data = self._memory.take(shard.main.numel(), torch.float32).copy_(shard.main)

    def _update_far(self, far: Sequence[tuple[Shard, Step]]) -> None:
        pieces: list[list[Tensor]] = []
        steps: list[tuple[Shard, Step]] = []
        for shard, step in far:
            state = self.state[shard.main]
            for start in range(0, shard.main.numel(), PIECE):
                part = slice(start, start + PIECE)
                host = [state["exp_avg"][part], state["exp_avg_sq"][part]]
                near = Shard(*(None if tensor is None else tensor[part] for tensor in shard))  # type: ignore[arg-type]
                pieces.append(host if shard.weight is None else [*host, near.main])
                steps.append((near, step._replace(seed=step.seed + start)))

        def change(number: int, tensors: list[Tensor]) -> None:
            (shard, step), (first, second, *main) = steps[number], tensors
            adamw(*shard._replace(main=main[0] if main else shard.main), first, second, step)

        if pieces:
            streamed(pieces, far[0][0].grad.device, change)


def adamw(
    main: Tensor, grad: Tensor, weight: Tensor | None, first: Tensor, second: Tensor, step: Step
) -> None:
    """Torch's AdamW step, in place, on tensors of one device.

    Args:
        main: [n] float32.
        grad: [n] any float type.
        weight: [n] gets the new `main`.
        first: and `second`, [n] float32 or bfloat16 moments.
        step: the rounding of element i of bfloat16 moments depends on `seed` + i alone.
    """
    if main.is_cuda:
        from relax_hpc.engines.megatron.layers import kernels

        kernels.adamw(main, grad, weight, first, second, **step._asdict())
        return
    # In torch's order of operations, so that float32 gives torch's result to the last bit.
    gradient = grad.float() * step.grad_scale
    wide_first, wide_second = first.float(), second.float()
    correction = 1 - step.betas[0] ** step.updates
    root = (1 - step.betas[1] ** step.updates) ** 0.5
    main.mul_(1 - step.lr * step.weight_decay)
    wide_first.lerp_(gradient, 1 - step.betas[0])
    wide_second.mul_(step.betas[1]).addcmul_(gradient, gradient, value=1 - step.betas[1])
    main.addcdiv_(
        wide_first, (wide_second.sqrt() / root).add_(step.eps), value=-step.lr / correction
    )
    if first.dtype is torch.bfloat16:
        bits = noise(step.seed, first.numel())
        first.copy_(rounded(wide_first, bits >> 16))
        second.copy_(rounded(wide_second, bits & 0xFFFF))
    if weight is not None:
        weight.copy_(main)


def noise(seed: int, count: int) -> Tensor:
    """[count] int64, 32 random bits each: an integer hash of seed + i, as in the kernel."""
    value = torch.arange(seed, seed + count) & 0xFFFFFFFF
    value = ((value ^ (value >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    value = ((value ^ (value >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return value ^ (value >> 16)


def rounded(values: Tensor, bits: Tensor) -> Tensor:
    """[n] float32 -> bfloat16, up or down so that the mean over 16 random `bits` is the value."""
    whole = (values.view(torch.int32) + bits.to(torch.int32)) & -0x10000
    return whole.view(torch.float32).to(torch.bfloat16)
