"""On a GPU: attention kernels, fused passes and the output layer against plain torch in float64.

Run by run_train.sh, on a machine with a GPU; skipped elsewhere.
"""

from unittest import mock

import pytest
import torch
from torch.nn import functional

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

import torch.distributed as dist

from relax_hpc.inference.sglang.sampler import draw
from relax_hpc.trainer.megatron import adam
from relax_hpc.trainer.megatron.adam import ParameterShard, ShardedAdamW
from relax_hpc.trainer.megatron.layers import attention_kernels, dense, logprobs
from relax_hpc.trainer.megatron.layers.attention import PackedRows, PackedSpan
from relax_hpc.trainer.megatron.layers.attention_kernels import of_towers
from relax_hpc.trainer.megatron.layers.logprobs import LogprobHead
from relax_hpc.trainer.models.towers import SequenceOffsets, rotate

DEVICE = torch.device("cuda", 0)
HEADS, GROUPS, D = 8, 2, 128
MIXES = {
    "one": [1024],
    "odd": [1001],
    "mix": [700, 3, 1, 250, 128, 65, 501, 400],
    "many": [17] * 100,
}


class Ranks:
    """Stands for a context-parallel group: only its size and rank are asked for."""

    def __init__(self, size, rank):
        self._size, self._rank = size, rank

    def size(self):
        return self._size

    def rank(self):
        return self._rank


def relative(mine, theirs):
    mine, theirs = mine.double(), theirs.double()
    return float((mine - theirs).norm() / theirs.norm().clamp_min(1e-30))


def by_hand(query, key, value, span: PackedSpan, scale):
    """Document by document, in float64, with the mask written out."""
    outs, at, of = [], 0, 0
    for queries, keys in zip(span.run.query_lengths, span.run.key_lengths, strict=True):
        q = query[at : at + queries].double().transpose(0, 1)
        k, v = (x[of : of + keys].double().transpose(0, 1) for x in (key, value))
        k, v = (x.repeat_interleave(len(q) // len(k), dim=0) for x in (k, v))
        scores = q @ k.transpose(1, 2) * scale
        seen = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
        outs.append((scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(0, 1))
        at, of = at + queries, of + keys
    return torch.cat(outs)


def spans(mix, size):
    lengths = list(MIXES[mix])
    if size > 1:
        lengths.append(-sum(lengths) % (2 * size) or 2 * size)
    return [
        span
        for rank in range(size)
        for span in PackedRows.of(lengths, DEVICE, Ranks(size, rank) if size > 1 else None).spans
    ]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("kernel", ["cudnn", "varlen", "sdpa"])
def test_attention_and_its_gradient_are_those_of_a_dense_one(kernel, mix, size):
    attend = attention_kernels.choose(kernel, DEVICE, torch.bfloat16)
    for span in spans(mix, size):
        torch.manual_seed(0)
        made = [
            torch.randn(count, heads, D, device=DEVICE, dtype=torch.bfloat16)
            for count, heads in (
                (sum(span.run.query_lengths), HEADS),
                (sum(span.run.key_lengths), GROUPS),
                (sum(span.run.key_lengths), GROUPS),
            )
        ]
        upstream = torch.randn_like(made[0])
        results = []
        for how in (attend, by_hand):
            inputs = [x.clone().requires_grad_() for x in made]
            out = how(*inputs, span, 0.1)
            out.backward(upstream.to(out.dtype))
            results.append([out, *(x.grad for x in inputs)])
        for what, mine, theirs in zip("oqkv", *results, strict=True):
            assert relative(mine, theirs) < 0.012, (what, span.run)


@pytest.mark.parametrize("channels", [64, 72])
@pytest.mark.parametrize("mix", [[1024], [1000], [700, 3, 1, 250, 128], [104] * 30])
def test_attention_of_towers_is_that_of_a_dense_one(mix, channels):
    kernel = of_towers(attention_kernels.choose("cudnn", DEVICE, torch.bfloat16))
    torch.manual_seed(0)
    size = sum(mix), 16, channels
    made = [torch.randn(size, device=DEVICE, dtype=torch.bfloat16) for _ in "qkv"]
    upstream = torch.randn_like(made[0])

    def plain(*inputs):
        parts = zip(*(x.double().split(mix) for x in inputs), strict=True)
        outs = [
            functional.scaled_dot_product_attention(*(x.transpose(0, 1) for x in part))
            for part in parts
        ]
        return torch.cat([out.transpose(0, 1) for out in outs])

    mine = gradients(lambda *x: kernel(*x, SequenceOffsets.of(mix, DEVICE)), made, [upstream])
    theirs = gradients(plain, made, [upstream])
    for what, a, b in zip("oqkv", mine, theirs, strict=True):
        assert relative(a, b) < 0.012, what
    assert kernel._takes == {channels: True}


def gradients(function, inputs, upstreams):
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    outs = function(*inputs)
    outs = outs if isinstance(outs, tuple) else (outs,)
    torch.autograd.backward(outs, [u.to(o.dtype) for o, u in zip(outs, upstreams, strict=True)])
    return [*outs, *(x.grad for x in inputs)]


@pytest.mark.parametrize("shape", [(1000, 16, 64), (777, 16, 72), (1000, 2, 4, D)])
def test_heads_are_turned_as_complex_numbers_in_float64(shape):
    torch.manual_seed(0)
    angles = torch.rand(shape[0], shape[-1] // 2, device=DEVICE) * 1000
    rotation = torch.stack([angles.cos(), angles.sin()], dim=1)
    wide = torch.randn(*shape[:-1], 3 * shape[-1], device=DEVICE, dtype=torch.bfloat16)
    upstream = torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)

    def plain(wide):
        first, second = wide[..., : shape[-1]].double().chunk(2, dim=-1)
        turns = torch.polar(torch.ones_like(angles.double()), angles.double())
        both = torch.complex(first, second) * turns.view(shape[0], *[1] * (len(shape) - 2), -1)
        return torch.cat([both.real, both.imag], dim=-1)

    mine = gradients(lambda wide: rotate(wide[..., : shape[-1]], rotation), [wide], [upstream])
    theirs = gradients(plain, [wide], [upstream])
    assert all(relative(a, b) < 0.004 for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("tokens", [1000, 777])
def test_fused_passes_are_those_of_plain_torch_in_float64(tokens):
    torch.manual_seed(0)

    def normal(*size):
        return torch.randn(*size, device=DEVICE, dtype=torch.bfloat16)

    angles = torch.rand(tokens, D // 2, device=DEVICE) * 1000
    rotation = torch.stack([angles.cos(), angles.sin()], dim=1)

    def norm(hidden, weight):
        return functional.rms_norm(hidden, hidden.shape[-1:], weight, 1e-6)

    def plain_rotate(mixed, query_weight, key_weight):
        cos, sin = rotation.double()[:, None].unbind(2)

        def turned(x):
            a, b = x.chunk(2, -1)
            return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

        query = norm(mixed[:, :, :-2], query_weight).flatten(1, 2)
        key = norm(mixed[:, :, -2], key_weight)
        return turned(query), turned(key), mixed[:, :, -1]

    def plain_swiglu(gate_up):
        gate, up = gate_up.chunk(2, -1)
        return functional.silu(gate) * up

    for mine, plain, inputs, outs in (
        (lambda h, w: dense.rms_norm(h, w, 1e-6), norm, [(tokens, 1, 2560), (2560,)],
         [(tokens, 1, 2560)]),
        (lambda h, w: dense.rms_norm_beside(h, w, 1e-6), lambda h, w: (norm(h, w), h),
         [(tokens, 1, 2560), (2560,)], [(tokens, 1, 2560)] * 2),
        (lambda m, q, k: dense.norm_and_rotate(m, q, k, rotation, 1e-6), plain_rotate,
         [(tokens, GROUPS, HEADS // GROUPS + 2, D), (D,), (D,)],
         [(tokens, HEADS, D), (tokens, GROUPS, D), (tokens, GROUPS, D)]),
        (dense.swiglu, plain_swiglu, [(tokens, 1, 5120)], [(tokens, 1, 2560)]),
    ):  # fmt: skip
        made, upstreams = [normal(*size) for size in inputs], [normal(*size) for size in outs]
        ours = gradients(mine, made, upstreams)
        theirs = gradients(plain, [x.double() for x in made], [u.double() for u in upstreams])
        for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert relative(a, b) < 0.006, index


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A process group of one."""
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "file"), 1)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("float32_logits", [False, True])
def test_output_layer_of_32k_tokens_and_152k_vocabulary_fits_in_4_gib_extra(alone, float32_logits):
    tokens, vocabulary, hidden_size = 32768, 151936, 2560
    torch.manual_seed(0)
    hidden = torch.randn(tokens, hidden_size, device=DEVICE, dtype=torch.bfloat16)
    weight = 0.02 * torch.randn(vocabulary, hidden_size, device=DEVICE, dtype=torch.bfloat16)
    weight.requires_grad_()
    weight.main_grad = torch.zeros(vocabulary, hidden_size, device=DEVICE)
    targets = torch.randint(0, vocabulary, (tokens,), device=DEVICE)
    upstream = torch.randn(tokens, device=DEVICE)
    hidden.requires_grad_()

    def both():
        values, entropy = logprobs.hidden_logprobs(
            hidden, weight, targets, LogprobHead(0.9, alone, float32_logits)
        )
        values.backward(upstream)
        return values.detach(), entropy

    both()  # compiles
    for _ in range(2):
        hidden.grad = weight.grad = None
        weight.main_grad.zero_()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        values, entropy = both()
        end.record()
        torch.cuda.synchronize()
        extra = (torch.cuda.max_memory_allocated() - before) / 2**30
    print(
        f"\n32k x 152k, float32_logits={float32_logits}: {begin.elapsed_time(end):.0f} ms, "
        f"{extra:.2f} GiB extra"
    )
    assert extra < 4
    chosen = torch.arange(0, tokens, 997, device=DEVICE)
    table = (hidden[chosen].double() @ weight.double().t() / 0.9).log_softmax(-1)
    expected = table.gather(1, targets[chosen, None])[:, 0]
    worst = float((values[chosen] - expected).abs().max())
    print(f"largest error of a logprob {worst:.1e} nats")
    assert worst < (2e-4 if float32_logits else 0.03)
    assert float((entropy[chosen] + (table.exp() * table).sum(-1)).abs().max()) < 0.01
    rows = upstream[chosen, None] / 0.9
    onehot = torch.zeros_like(table).scatter_(1, targets[chosen, None], 1.0)
    grad = (rows * (onehot - table.exp())) @ weight.double()
    assert relative(hidden.grad[chosen], grad) < 0.01


@pytest.mark.parametrize("float32_logits", [False, True])
def test_the_entropys_gradient_is_that_of_float64(alone, float32_logits):
    """Beside the logprobs' and alone; several chunks, the last one short."""
    torch.manual_seed(0)
    hidden = torch.randn(3000, 256, device=DEVICE, dtype=torch.bfloat16)
    weight = (0.1 * torch.randn(5000, 256, device=DEVICE, dtype=torch.bfloat16)).requires_grad_()
    targets = torch.randint(0, 5000, (3000,), device=DEVICE)
    of_entropy = torch.randn(3000, device=DEVICE)
    for of_logprobs in (torch.zeros(3000, device=DEVICE), torch.randn(3000, device=DEVICE)):
        mine = hidden.clone().requires_grad_()
        weight.grad, weight.main_grad = None, torch.zeros(5000, 256, device=DEVICE)
        with mock.patch.object(
            logprobs, "_CHUNK_BYTES", 1024 * 5000 * (4 if float32_logits else 2)
        ):
            values, entropy = logprobs.hidden_logprobs(
                mine, weight, targets,
                LogprobHead(0.7, alone, float32_logits, entropy_gradient=True),
            )  # fmt: skip
            (values @ of_logprobs + entropy @ of_entropy).backward()
        h = hidden.double().requires_grad_()
        w = weight.detach().double().requires_grad_()
        table = (h @ w.t() / 0.7).log_softmax(-1)
        expected = -(table.exp() * table).sum(-1)
        chosen = table.gather(1, targets[:, None])[:, 0]
        (chosen @ of_logprobs.double() + expected @ of_entropy.double()).backward()
        # Logits of 16 bits are rounded by up to 0.03 here.
        assert float((entropy - expected).abs().max()) < (1e-4 if float32_logits else 0.15)
        errors = relative(mine.grad, h.grad), relative(weight.main_grad, w.grad)
        print(f"\nentropy's gradient, float32_logits={float32_logits}: errors {errors}")
        assert max(errors) < (0.01 if float32_logits else 0.02)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offload", [0.0, 1.0])
def test_adam_in_one_pass_is_torchs(offload, kind):
    groups = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    torch.manual_seed(1)
    main, scale = torch.randn(5000, device=DEVICE), 0.25
    theirs = main.clone().requires_grad_()
    torchs = torch.optim.AdamW([theirs], **groups)
    grad, weight = torch.empty_like(main, dtype=kind), torch.empty_like(main, dtype=torch.bfloat16)
    shard = ParameterShard(main, grad, weight)
    mine = ShardedAdamW([{"params": [main]} | groups], [shard], offload=offload)
    assert main.is_cuda is not bool(offload)
    for _ in range(4):
        grad.copy_(torch.randn(5000, device=DEVICE))
        theirs.grad = scale * grad.float()
        mine.update([shard], scale)
        torchs.step()
    torch.testing.assert_close(main.to(DEVICE), theirs.detach(), rtol=1e-5, atol=1e-6)
    assert torch.equal(weight, main.to(DEVICE).to(torch.bfloat16))
    for key in ("exp_avg", "exp_avg_sq", "step"):
        mine_now, theirs_now = mine.state[main][key], torchs.state[theirs][key]
        torch.testing.assert_close(mine_now.cpu(), theirs_now.cpu(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
def test_adam_through_host_memory_and_on_the_cpu_is_the_same(moments, monkeypatch):
    """Many pieces, so that copies and updates run side by side and slots are used again."""
    monkeypatch.setattr(adam, "PIECE", 1 << 16)
    groups = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    results = []
    for device, offload in ((DEVICE, 0.0), (DEVICE, 1.0), ("cpu", 0.0)):
        torch.manual_seed(1)
        mains, grads = torch.randn(2, 1_000_003).unbind(), torch.randn(3, 2, 1_000_003)
        shards = [
            ParameterShard(
                main.to(device),
                torch.empty(len(main), device=device),
                main.to(device, torch.bfloat16),
            )
            for main in mains
        ]
        own = [{"params": [shard.main for shard in shards]} | groups]
        optimizer = ShardedAdamW(own, shards, moments=moments, offload=offload)
        for step in range(3):
            for shard, grad in zip(shards, grads[step], strict=True):
                shard.grad.copy_(grad)
            optimizer.update(shards, 0.5)
        results.append([
            tensor.cpu()
            for shard in shards
            for tensor in (shard.main, shard.weight, *optimizer.state[shard.main].values())
        ])  # fmt: skip
    for near, far in zip(results[0], results[1], strict=True):
        assert torch.equal(near, far)
    for near, cpu in zip(results[0], results[2], strict=True):
        torch.testing.assert_close(near.float(), cpu.float(), rtol=1e-2, atol=1e-4)


def test_tokens_are_drawn_as_often_as_the_softmax_says_and_with_its_logprobs():
    torch.manual_seed(0)
    rows, vocab = 64, 151936
    of_one = torch.randn(vocab, device="cuda") * 3
    of_one[[5, vocab - 1]] = of_one.max() + torch.tensor([1.0, 0.0], device="cuda")
    logits = of_one.repeat(rows, 1)
    temperatures = torch.full((rows, 1), 0.7, device="cuda")
    expected = torch.log_softmax(of_one / 0.7, -1)
    counts = torch.zeros(vocab, device="cuda")
    for number in range(500):
        seed = torch.tensor([number * 7919], device="cuda")
        tokens, logprobs = draw(logits, temperatures, seed)
        assert (logprobs - expected[tokens.long()]).abs().max() < 1e-5
        counts += torch.bincount(tokens.long(), minlength=vocab)
    total, often = rows * 500, expected.exp() > 1e-3
    error = (counts / total - expected.exp())[often]
    deviation = (expected.exp() * (1 - expected.exp()) / total).sqrt()[often]
    assert often.sum() > 5 and (error.abs() / deviation).max() < 4.5
    rest = 1 - expected.exp()[often].sum()  # what is seldom is drawn as often, taken together
    assert (1 - counts[often].sum() / total - rest).abs() < 4.5 * (rest * (1 - rest) / total).sqrt()
    again, _ = draw(logits, temperatures, seed)
    assert torch.equal(tokens, again) and len(set(tokens.tolist())) > 3
