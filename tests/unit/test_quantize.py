"""Weights in 8 bits: numbers by hand, bounds, which are quantised, and how they travel."""

import pytest
import torch
from job_trees import job_of

from relax_hpc.config.rollout import WeightsConfig
from relax_hpc.errors import ConfigError
from relax_hpc.roles.engine import check
from relax_hpc.runtime.comm.bucket import BucketPlan, Spec, views
from relax_hpc.trainer.models.architecture import Architecture
from relax_hpc.trainer.models.rope import Rope
from relax_hpc.weights.quantize import QuantizedGather, Quantizer, quantize


def dequantized(quantized, scales):
    whole = scales.repeat_interleave(128, -2).repeat_interleave(128, -1)
    n, k = quantized.shape[-2:]
    return quantized.float() * whole[..., :n, :k]


def test_the_largest_of_a_block_becomes_448_and_the_others_follow():
    weight = torch.zeros(128, 256)
    weight[0, 0], weight[5, 7], weight[127, 127] = 896.0, -2.0, 3.1
    weight[3, 128] = -7.0
    q, scales = quantize(weight)
    assert scales.tolist() == [[2.0, 7.0 / 448]]
    # 3.1 / 2 = 1.55; numbers of three bits between 1 and 2 are 1.5, 1.625: it becomes 1.5.
    assert [q[0, 0].item(), q[5, 7].item(), q[127, 127].item()] == [448.0, -1.0, 1.5]
    assert q[3, 128].item() == -448.0


def test_blocks_at_the_edge_are_of_what_is_there():
    weight = torch.full((130, 129), 4.48)
    weight[129, 128] = 44.8
    q, scales = quantize(weight)
    assert torch.allclose(scales, torch.tensor([[0.01, 0.01], [0.01, 0.1]]))
    assert q[129, 127].item() == 448.0
    assert q[128, 128].item() == 44.0  # 44.8 has 44 and 48 beside it


@pytest.mark.parametrize("size", [1e-30, 1e-3, 1e30])
def test_what_comes_back_is_within_the_bound(size):
    generator = torch.Generator().manual_seed(0)
    weight = (size * torch.randn(3, 200, 300, generator=generator) ** 3).to(torch.bfloat16)
    q, scales = quantize(weight)
    error = (dequantized(q, scales) - weight.float()).abs()
    scale = dequantized(torch.ones_like(weight.float()), scales)
    bound = torch.maximum(weight.float().abs() / 16, scale / 1024)
    assert (error <= bound * (1 + 1e-5)).all()
    again, same = quantize(dequantized(q, scales))
    assert torch.equal(again.view(torch.uint8), q.view(torch.uint8))
    assert torch.allclose(same, scales, rtol=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_seen(bad):
    weight = torch.ones(128, 256)
    weight[1, 1] = bad
    found = dequantized(*quantize(weight))
    assert found[:, :128].isnan().any() and torch.equal(found[:, 128:], torch.ones(128, 128))


NAMES = {
    "model.embed_tokens.weight": (300, 256),
    "model.layers.0.input_layernorm.weight": (256,),
    "model.layers.0.self_attn.q_proj.weight": (256, 256),
    "model.layers.0.self_attn.q_norm.weight": (128,),
    "model.layers.0.mlp.gate.weight": (4, 256),
    "model.layers.0.mlp.experts.0.gate_proj.weight": (130, 256),
    "model.layers.0.mlp.experts.0.down_proj.weight": (256, 130),
    "model.layers.0.mlp.experts.1.gate_proj.weight": (130, 256),
    "model.layers.1.self_attn.o_proj.weight": (256, 256),
    "model.layers.11.self_attn.o_proj.weight": (256, 256),
    "model.norm.weight": (256,),
    "lm_head.weight": (300, 256),
}
SPECS = [Spec(name, torch.bfloat16, shape) for name, shape in NAMES.items()]


def quantizer(*kept):
    return Quantizer(WeightsConfig(quantize="fp8", advanced={"modules_to_not_convert": list(kept)}))


def test_linear_layers_are_quantised_but_those_that_are_to_be_kept():
    every = [name for name in NAMES if "_proj" in name]
    for kept, left in (
        ((), every),
        (("model.layers.1", "mlp.experts"), [every[0], every[-1]]),
        (("o_proj",), every[:-2]),
    ):
        of = quantizer(*kept)
        assert [spec.name for spec in SPECS if of.applies_to(spec)] == left
    for name in (
        "thinker.audio_tower.layers.0.self_attn.q_proj",
        "model.visual.blocks.0.gate_proj",
    ):
        assert not quantizer().applies_to(Spec(f"{name}.weight", torch.bfloat16, (256, 256)))


def model():
    generator = torch.Generator().manual_seed(0)
    return {s.name: torch.randn(s.shape, generator=generator).to(s.dtype) for s in SPECS}


def expected():
    found = {}
    for name, tensor in model().items():
        if "_proj" in name:
            found[name], found[name + "_scale_inv"] = quantize(tensor)
        else:
            found[name] = tensor
    return found


def same(found, wanted):
    return found.dtype == wanted.dtype and torch.equal(
        found.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8)
    )


class Plain:
    """A gather that has everything here."""

    def __init__(self, plan):
        self.plan = plan

    def begin(self):
        pass

    def fill(self, index, flat):
        tensors, bucket = model(), self.plan.buckets[index]
        for spec, place in zip(bucket, views(flat, bucket), strict=True):
            place.copy_(tensors[spec.name])


@pytest.mark.parametrize("bucket_bytes", [1, 200_000, 1 << 30])
def test_buckets_are_gathered_plain_and_leave_quantised_at_half_the_size(bucket_bytes):
    source = BucketPlan.of(SPECS, bucket_bytes)
    plan = quantizer().plan(source)
    gather = QuantizedGather(Plain(source), source, quantizer())
    gather.begin()
    found = {}
    for index, bucket in enumerate(plan.buckets):
        flat = torch.zeros(plan.sizes[index], dtype=torch.uint8)
        gather.fill(index, flat)
        found |= {s.name: v for s, v in zip(bucket, views(flat, bucket), strict=True)}
    assert found.keys() == expected().keys()
    assert all(same(found[name], wanted) for name, wanted in expected().items())
    linear = sum(s.nbytes for s in SPECS if "_proj" in s.name)
    rest = sum(s.nbytes for s in SPECS if "_proj" not in s.name)
    assert plan.num_bytes - rest <= 0.502 * linear


def job(**tables):
    engines = {"rollout": {"kind": "sglang", "args": {"tp_size": 2}}}
    return job_of(**{"engines": engines, "weights__quantize": "fp8"} | tables)


SHAPE = Architecture(
    model_type="qwen3", num_layers=2, hidden_size=256, ffn_hidden_size=512, num_heads=8,
    num_kv_heads=4, head_dim=64, vocab_size=100, max_positions=64, norm_epsilon=1e-6,
    rope=Rope("default", 1e4), tied_embeddings=False,
)  # fmt: skip


def fp8(*kept):
    return {"quantize": "fp8", "advanced": {"modules_to_not_convert": list(kept)}}


@pytest.mark.parametrize(("tables", "message"), [
    ({"engines": {}}, "weights.quantize = 'fp8': the embedded engine takes plain weights"),
    ({"engines": {"rollout": {"kind": "sglang", "args": {"tp_size": 4}}}},
     "tp_size = 4 has 64 rows of k_proj, which is no multiple of 128"),
    ({"weights": fp8("layers.1.self_attn.q_proj")}, "in one matrix with .*k_proj, .*v_proj"),
    ({"weights": fp8("layers.0.mlp.experts.7")}, "the experts of a layer are converted tog"),
])  # fmt: skip
def test_what_engines_cannot_take_is_refused_before_anything_is_queued(tables, message):
    check.check_quantized(job(), SHAPE)
    with pytest.raises(ConfigError, match=message):
        check.check_quantized(job(**tables), SHAPE)
