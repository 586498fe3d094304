"""Triton kernels of `dense`, `experts`, `logprobs` and `adam` on GPUs: each reads and writes
everything once.

Everything is float32 inside. Only imported if there is a GPU.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_PROGRAMS = 4 * 132
"""Programs that loop over rows and sum a weight's gradient: a few per multiprocessor."""


def rms_norm_forward(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `dense.rms_norm`."""
    out = torch.empty_like(hidden)
    width = hidden.shape[-1]
    _norm_forward[(hidden.numel() // width,)](
        hidden, weight, out, width, eps,
        BLOCK=triton.next_power_of_2(width), num_warps=_warps(width),
    )  # fmt: skip
    return out


def rms_norm_backward(
    hidden: Tensor, weight: Tensor, grad: Tensor, beside: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Returns gradients of the input, `beside` added, and, over all rows, of the weight."""
    width = hidden.shape[-1]
    rows = hidden.numel() // width
    programs = min(rows, _PROGRAMS // 2)
    out = torch.empty_like(hidden)
    parts = torch.empty(programs, width, dtype=torch.float32, device=hidden.device)
    _norm_backward[(programs,)](
        hidden, weight, grad, out if beside is None else beside, out, parts, rows, width, eps,
        IS_BESIDE=beside is not None, BLOCK=triton.next_power_of_2(width), num_warps=_warps(width),
    )  # fmt: skip
    return out, parts.sum(0).to(weight.dtype)


def _warps(width: int, most: int = 4096) -> int:
    """Returns 4 for rows of at most `most`, else 8."""
    return 8 if width > most else 4


@triton.jit  # type: ignore[untyped-decorator]
def _norm_forward(hidden, weight, out, width, eps, BLOCK: tl.constexpr) -> None:  # type: ignore[no-untyped-def] # noqa: ANN001, N803
    row = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, BLOCK)
    inside = column < width
    x = tl.load(hidden + row + column, mask=inside, other=0.0)
    w = tl.load(weight + column, mask=inside, other=0.0)
    wide = x.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    y = (wide * inverse).to(x.dtype).to(tl.float32) * w.to(tl.float32)
    tl.store(out + row + column, y.to(x.dtype), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _norm_backward(  # type: ignore[no-untyped-def]
    hidden, weight, grad, beside, out, parts, rows, width, eps,  # noqa: ANN001
    IS_BESIDE: tl.constexpr, BLOCK: tl.constexpr,  # noqa: N803
) -> None:  # fmt: skip
    column = tl.arange(0, BLOCK)
    inside = column < width
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    step = tl.num_programs(0)
    at = tl.program_id(0).to(tl.int64) * width + column
    next_x = tl.load(hidden + at, mask=inside, other=0.0)
    next_g = tl.load(grad + at, mask=inside, other=0.0)
    for row in range(tl.program_id(0), rows, step):
        at = tl.cast(row, tl.int64) * width + column
        x, g = next_x.to(tl.float32), next_g.to(tl.float32)
        # On their way while this row is computed.
        after, there = at + tl.cast(step, tl.int64) * width, inside & (row + step < rows)
        next_x = tl.load(hidden + after, mask=there, other=0.0)
        next_g = tl.load(grad + after, mask=there, other=0.0)
        inverse = tl.rsqrt(tl.sum(x * x, 0) / width + eps)
        normalised = x * inverse
        total += g * normalised
        scaled = g * w
        dot = tl.sum(scaled * normalised, 0) / width
        result = inverse * (scaled - normalised * dot)
        if IS_BESIDE:
            result += tl.load(beside + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + at, result.to(out.dtype.element_ty), mask=inside)
    tl.store(parts + tl.program_id(0).to(tl.int64) * width + column, total, mask=inside)


def norm_and_rotate_forward(
    mixed: Tensor, query_weight: Tensor, key_weight: Tensor, rotation: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """See `dense.norm_and_rotate`."""
    tokens, groups, slots, width = mixed.shape
    query = mixed.new_empty(tokens, groups * (slots - 2), width)
    key, value = mixed.new_empty(2, tokens, groups, width).unbind()
    rows = tokens * groups * slots
    _rotate_forward[(triton.cdiv(rows, 32),)](
        mixed, query_weight, key_weight, rotation, query, key, value, rows, eps,
        GROUPS=groups, SLOTS=slots, HALF=width // 2, ROWS=32, num_warps=4,
    )  # fmt: skip
    return query, key, value


def norm_and_rotate_backward(
    mixed: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    rotation: Tensor,
    query_grad: Tensor,
    key_grad: Tensor,
    value_grad: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, groups, slots, width = mixed.shape
    out = torch.empty_like(mixed)
    rows = tokens * groups * slots
    programs = min(triton.cdiv(rows, 16), 2 * _PROGRAMS)
    parts = torch.empty(programs, 2, width, dtype=torch.float32, device=mixed.device)
    _rotate_backward[(programs,)](
        mixed, query_weight, key_weight, rotation,
        query_grad.contiguous(), key_grad.contiguous(), value_grad.contiguous(), out, parts,
        rows, eps, GROUPS=groups, SLOTS=slots, HALF=width // 2, ROWS=16, num_warps=4,
    )  # fmt: skip
    for_query, for_key = parts.sum(0).unbind()
    return out, for_query.to(query_weight.dtype), for_key.to(key_weight.dtype)


# A token's heads lie as [groups, slots]: slots - 2 queries, a key and a value. A row is a head of a
# token; both halves of its channels, a and b, are loaded, for the rotation.


@triton.jit  # type: ignore[untyped-decorator]
def _place(row, GROUPS: tl.constexpr, SLOTS: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202, N803
    """Returns token and slot of a row, and the places of its head among queries and keys."""
    slot = row % SLOTS
    group = row // SLOTS  # of all tokens
    return group // GROUPS, slot, group * (SLOTS - 2) + slot, group


@triton.jit  # type: ignore[untyped-decorator]
def _two(pointer, where, HALF: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202, N803
    """Loads both halves of a head, or of its weight, under a mask."""
    at = pointer + tl.arange(0, HALF)[None, :] + tl.zeros_like(where.to(tl.int32))
    return tl.load(at, mask=where, other=0.0), tl.load(at + HALF, mask=where, other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _put_two(pointer, a, b, where, HALF: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202, N803
    channel = tl.arange(0, HALF)[None, :]
    tl.store(pointer + channel, a, mask=where)
    tl.store(pointer + HALF + channel, b, mask=where)


@triton.jit  # type: ignore[untyped-decorator]
def _rotate_forward(  # type: ignore[no-untyped-def]
    mixed, query_weight, key_weight, rotation, query, key, value, rows, eps,  # noqa: ANN001
    GROUPS: tl.constexpr, SLOTS: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr,  # noqa: N803
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    exists = row < rows
    token, slot, query_place, key_place = _place(row, GROUPS, SLOTS)
    is_query, is_key, is_value = slot < SLOTS - 2, slot == SLOTS - 2, slot == SLOTS - 1
    raw_a, raw_b = _two(mixed + row * 2 * HALF, exists, HALF)
    a, b = raw_a.to(tl.float32), raw_b.to(tl.float32)
    inverse = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + eps)[:, None]
    query_a, query_b = _two(query_weight, is_query, HALF)
    key_a, key_b = _two(key_weight, is_key, HALF)
    kind = raw_a.dtype
    a = ((a * inverse).to(kind) * (query_a + key_a)).to(kind).to(tl.float32)
    b = ((b * inverse).to(kind) * (query_b + key_b)).to(kind).to(tl.float32)
    cos, sin = _two(rotation + token * 2 * HALF, exists, HALF)
    turned_a, turned_b = (a * cos - b * sin).to(kind), (b * cos + a * sin).to(kind)
    _put_two(query + query_place * 2 * HALF, turned_a, turned_b, exists & is_query, HALF)
    _put_two(key + key_place * 2 * HALF, turned_a, turned_b, exists & is_key, HALF)
    _put_two(value + key_place * 2 * HALF, raw_a, raw_b, exists & is_value, HALF)


@triton.jit  # type: ignore[untyped-decorator]
def _rotate_backward(  # type: ignore[no-untyped-def]
    mixed, query_weight, key_weight, rotation, query_grad, key_grad, value_grad, out, parts,  # noqa: ANN001
    rows, eps,  # noqa: ANN001
    GROUPS: tl.constexpr, SLOTS: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr,  # noqa: N803
) -> None:  # fmt: skip
    for_query_a = tl.zeros([ROWS, HALF], tl.float32)
    for_query_b, for_key_a, for_key_b = for_query_a, for_query_a, for_query_a
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
        exists = row < rows
        token, slot, query_place, key_place = _place(row, GROUPS, SLOTS)
        is_query, is_key = exists & (slot < SLOTS - 2), exists & (slot == SLOTS - 2)
        is_value = exists & (slot == SLOTS - 1)
        a, b = _two(mixed + row * 2 * HALF, exists, HALF)
        kind = a.dtype
        a, b = a.to(tl.float32), b.to(tl.float32)
        grad_a, grad_b = _two(query_grad + query_place * 2 * HALF, is_query, HALF)
        also_a, also_b = _two(key_grad + key_place * 2 * HALF, is_key, HALF)
        value_a, value_b = _two(value_grad + key_place * 2 * HALF, is_value, HALF)
        grad_a, grad_b = (grad_a + also_a).to(tl.float32), (grad_b + also_b).to(tl.float32)
        cos, sin = _two(rotation + token * 2 * HALF, exists, HALF)
        back_a, back_b = grad_a * cos + grad_b * sin, grad_b * cos - grad_a * sin
        inverse = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + eps)[:, None]
        a, b = a * inverse, b * inverse
        for_query_a += tl.where(is_query, back_a * a, 0.0)
        for_query_b += tl.where(is_query, back_b * b, 0.0)
        for_key_a += tl.where(is_key, back_a * a, 0.0)
        for_key_b += tl.where(is_key, back_b * b, 0.0)
        query_a, query_b = _two(query_weight, is_query, HALF)
        key_a, key_b = _two(key_weight, is_key, HALF)
        back_a *= (query_a + key_a).to(tl.float32)
        back_b *= (query_b + key_b).to(tl.float32)
        dot = ((tl.sum(back_a * a, 1) + tl.sum(back_b * b, 1)) / (2 * HALF))[:, None]
        result_a = tl.where(is_value, value_a, (inverse * (back_a - a * dot)).to(kind))
        result_b = tl.where(is_value, value_b, (inverse * (back_b - b * dot)).to(kind))
        _put_two(out + row * 2 * HALF, result_a, result_b, exists, HALF)
    column = tl.arange(0, HALF)
    to = parts + tl.program_id(0).to(tl.int64) * 4 * HALF + column
    tl.store(to, tl.sum(for_query_a, 0))
    tl.store(to + HALF, tl.sum(for_query_b, 0))
    tl.store(to + 2 * HALF, tl.sum(for_key_a, 0))
    tl.store(to + 3 * HALF, tl.sum(for_key_b, 0))


def swiglu_backward(gate_up: Tensor, grad: Tensor) -> Tensor:
    out = torch.empty_like(gate_up)
    width = grad.shape[-1]
    _swiglu_backward[(grad.numel() // width, triton.cdiv(width, 2048))](
        gate_up, grad, out, width, BLOCK=2048, num_warps=8
    )
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _swiglu_backward(gate_up, grad, out, width, BLOCK: tl.constexpr) -> None:  # type: ignore[no-untyped-def] # noqa: ANN001, N803
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    at = row * 2 * width + column
    gate = tl.load(gate_up + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + at + width, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(grad + row * width + column, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    kind = out.dtype.element_ty
    for_gate = g * up * sigmoid * (1 + gate * (1 - sigmoid))
    tl.store(out + at, for_gate.to(kind), mask=inside)
    tl.store(out + at + width, (g * gate * sigmoid).to(kind), mask=inside)


def logit_statistics(logits: Tensor, local: Tensor, temperature: float) -> Tensor:
    """See `logprobs._statistics`; in one pass."""
    count, width = logits.shape
    out = torch.empty(4, count, dtype=torch.float32, device=logits.device)
    _logit_statistics[(count,)](
        logits, local, out, count, width, logits.stride(0), temperature, BLOCK=8192, num_warps=8
    )
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _logit_statistics(  # type: ignore[no-untyped-def]
    logits, local, out, count, width, stride, temperature, BLOCK: tl.constexpr  # noqa: ANN001, N803
) -> None:  # fmt: skip
    row = tl.program_id(0)
    begin = logits + row.to(tl.int64) * stride
    column = tl.arange(0, BLOCK)
    upcoming = tl.load(begin + column, mask=column < width, other=-float("inf"))
    top = tl.full((), -float("inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    moment = tl.full((), 0.0, tl.float32)
    for start in range(0, width, BLOCK):
        x = upcoming.to(tl.float32) / temperature
        inside = start + column < width
        after = start + BLOCK + column
        upcoming = tl.load(begin + after, mask=after < width, other=-float("inf"))
        higher = tl.maximum(top, tl.max(x, 0))
        rescale = tl.exp(top - higher)
        weights = tl.exp(x - higher)
        total = total * rescale + tl.sum(weights, 0)
        moment = moment * rescale + tl.sum(tl.where(inside, weights * x, 0.0), 0)
        top = higher
    chosen = tl.load(begin + tl.load(local + row)).to(tl.float32) / temperature
    tl.store(out + row, top)
    tl.store(out + count + row, total)
    tl.store(out + 2 * count + row, moment)
    tl.store(out + 3 * count + row, chosen)


def adamw(
    main: Tensor,
    grad: Tensor,
    weight: Tensor | None,
    first: Tensor,
    second: Tensor,
    *,
    grad_scale: float,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    updates: float,
    seed: int,
) -> None:
    """See `adam.adamw`."""
    correction, root = 1 - betas[0] ** updates, (1 - betas[1] ** updates) ** 0.5
    size = main.numel()
    if not size:
        return
    _adamw[(triton.cdiv(size, 1024),)](
        main, grad, main if weight is None else weight, first, second, size, seed,
        grad_scale, 1 - lr * weight_decay, lr / correction, 1 / root,
        betas[0], 1 - betas[0], betas[1], 1 - betas[1], eps,
        HAS_WEIGHT=weight is not None, ROUND=first.dtype != torch.float32, BLOCK=1024,
    )  # fmt: skip


@triton.jit(do_not_specialize=["seed"])  # type: ignore[untyped-decorator]
def _adamw(  # type: ignore[no-untyped-def]
    main, grad, weight, first, second, size, seed, grad_scale, decay, rate, inverse_root,  # noqa: ANN001
    beta1, rest1, beta2, rest2, eps,  # noqa: ANN001
    HAS_WEIGHT: tl.constexpr, ROUND: tl.constexpr, BLOCK: tl.constexpr,  # noqa: N803
) -> None:  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    p = tl.load(main + at, mask=inside, other=0.0)
    g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32) * grad_scale
    m = tl.load(first + at, mask=inside, other=0.0).to(tl.float32) * beta1 + g * rest1
    v = tl.load(second + at, mask=inside, other=0.0).to(tl.float32) * beta2 + g * g * rest2
    p = p * decay - rate * m / (tl.sqrt(v) * inverse_root + eps)
    tl.store(main + at, p, mask=inside)
    if HAS_WEIGHT:
        tl.store(weight + at, p.to(weight.dtype.element_ty), mask=inside)
    if ROUND:
        bits = _noise((at + seed).to(tl.uint32))
        m, v = _round(m, bits >> 16), _round(v, bits & 0xFFFF)
    tl.store(first + at, m.to(first.dtype.element_ty), mask=inside)
    tl.store(second + at, v.to(second.dtype.element_ty), mask=inside)


@triton.jit
def _noise(value):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
    """See `adam.noise`; uint32."""
    value = (value ^ (value >> 16)) * 0x7FEB352D
    value = (value ^ (value >> 15)) * 0x846CA68B
    return value ^ (value >> 16)


@triton.jit
def _round(value, bits):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
    """See `adam.round_to_bfloat16`; the result is a float32 that bfloat16 holds exactly."""
    return ((value.to(tl.uint32, bitcast=True) + bits) & 0xFFFF0000).to(tl.float32, bitcast=True)


def take_rows(rows: Tensor, index: Tensor) -> Tensor:
    """See `experts.take`."""
    width = rows.shape[1]
    out = rows.new_empty(len(index), width)
    if out.numel():
        _take_rows[(len(index), triton.cdiv(width, 2048))](
            rows, index, out, width, BLOCK=min(2048, triton.next_power_of_2(width)), num_warps=4
        )
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _take_rows(rows, index, out, width, BLOCK: tl.constexpr) -> None:  # type: ignore[no-untyped-def] # noqa: ANN001, N803
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    source = tl.load(index + row).to(tl.int64) * width
    tl.store(out + row * width + column, tl.load(rows + source + column, mask=inside), mask=inside)


def sum_rows(rows: Tensor, slots: Tensor) -> Tensor:
    """See `experts.total`."""
    width = rows.shape[1]
    out = rows.new_empty(len(slots), width)
    if out.numel():
        _sum_rows[(len(slots), triton.cdiv(width, 2048))](
            rows, slots, out, width, SLOTS=slots.shape[1],
            BLOCK=min(2048, triton.next_power_of_2(width)), num_warps=4,
        )  # fmt: skip
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _sum_rows(rows, slots, out, width, SLOTS: tl.constexpr, BLOCK: tl.constexpr) -> None:  # type: ignore[no-untyped-def] # noqa: ANN001, N803
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros([BLOCK], tl.float32)
    for slot in range(SLOTS):
        source = tl.load(slots + row * SLOTS + slot).to(tl.int64)
        here = inside & (source >= 0)
        total += tl.load(rows + source * width + column, mask=here, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, total.to(out.dtype.element_ty), mask=inside)


def weighted_swiglu(gate_up: Tensor, weights: Tensor) -> Tensor:
    """See `experts.weighted_swiglu`."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    if out.numel():
        _weighted_swiglu_forward[(rows,)](
            gate_up,
            weights,
            out,
            width,
            BLOCK=triton.next_power_of_2(width),
            num_warps=_warps(width, 2048),
        )
    return out


def weighted_swiglu_backward(
    gate_up: Tensor, weights: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """See `experts.weighted_swiglu_backward`."""
    rows, width = grad.shape
    out, gate_up_grad = torch.empty_like(grad), torch.empty_like(gate_up)
    weights_grad = torch.empty_like(weights)
    if grad.numel():
        _weighted_swiglu_backward[(rows,)](
            gate_up, weights, grad, out, gate_up_grad, weights_grad, width,
            BLOCK=triton.next_power_of_2(width), num_warps=_warps(width, 2048),
        )  # fmt: skip
    return out, gate_up_grad, weights_grad


@triton.jit  # type: ignore[untyped-decorator]
def _weighted_swiglu_forward(gate_up, weights, out, width, BLOCK: tl.constexpr) -> None:  # type: ignore[no-untyped-def] # noqa: ANN001, N803
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weights + row).to(tl.float32)
    value = gate * tl.sigmoid(gate) * up * weight
    tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _weighted_swiglu_backward(  # type: ignore[no-untyped-def]
    gate_up, weights, grad, out, gate_up_grad, weights_grad, width, BLOCK: tl.constexpr  # noqa: ANN001, N803
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    wide, narrow = row * 2 * width + column, row * width + column
    gate = tl.load(gate_up + wide, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + wide + width, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(grad + narrow, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weights + row).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    kind = out.dtype.element_ty
    tl.store(out + narrow, (silu * up * weight).to(kind), mask=inside)
    tl.store(weights_grad + row, tl.sum(g * silu * up, 0).to(weights_grad.dtype.element_ty))
    g *= weight
    for_gate = g * up * sigmoid * (1 + gate * (1 - sigmoid))
    tl.store(gate_up_grad + wide, for_gate.to(kind), mask=inside)
    tl.store(gate_up_grad + wide + width, (g * silu).to(kind), mask=inside)
