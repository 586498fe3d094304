"""Low-rank adaptation of the actor: against torch on Hugging Face's model, and on every grid."""

import json
from typing import get_args

import numpy as np
import pytest
import torch
from hf_logprobs import hf_logprobs
from megatron_reference import updated
from safetensors.torch import load_file
from seen_rows import make as make_seeing
from seen_rows import mixed_rows
from tiny_models import make
from trainers import assert_close, collect, contents, equal, opened, trajectories
from transformers import AutoModelForCausalLM

from relax_hpc.config.model import LoraConfig, LoraTarget
from relax_hpc.errors import ConfigError
from relax_hpc.trainer.checkpoints import convert as conversion
from relax_hpc.trainer.megatron import fit
from relax_hpc.trainer.megatron.layers.lora import merge
from relax_hpc.trainer.models.registry import read_architecture

STEPS = 3
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
KINDS = {
    "qwen3": {"rank": 4, "alpha": 8.0},
    "qwen2": {"rank": 3, "targets": ["k_proj", "up_proj", "down_proj"]},  # parts of what is packed
    "qwen3_moe": {"rank": 4, "targets": ATTENTION},
}


def open_grid(ranks, folder, kind, grid, **more):
    more.setdefault("optimizer", {"weight_decay": 0.1})
    return opened(ranks, folder, grid, budget=60, actor={"lora": KINDS[kind]}, **more)


def adapters(pool, folder, tmp_path, name):
    """(checkpoint, its adapters under peft's names)."""
    pool.save(folder=tmp_path / name)
    conversion.to_peft(tmp_path / name, folder, tmp_path / f"{name}_peft")
    return tmp_path / name, load_file(tmp_path / f"{name}_peft" / "adapter_model.safetensors")


class Adapted(torch.nn.Module):
    """y = W x + alpha / rank B A x."""

    def __init__(self, base, a, b, scale):
        super().__init__()
        self.base, self.scale = base, scale
        self.a, self.b = torch.nn.Parameter(a.clone()), torch.nn.Parameter(b.clone())

    def forward(self, x):
        return self.base(x) + self.scale * (x @ self.a.T) @ self.b.T


def by_hand(folder, first, lora):
    """The updates by torch's AdamW, of these adapters on Hugging Face's model."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).requires_grad_(False)
    scale, layers, places = lora.get("alpha", 32.0) / lora["rank"], {}, {}
    for name in [name for name in first if ".lora_A." in name]:
        path = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        other = name.replace("lora_A", "lora_B")
        layer = Adapted(model.get_submodule(path), first[name], first[other], scale)
        parent, _, child = path.rpartition(".")
        setattr(model.get_submodule(parent), child, layer)
        places |= {f"{path}.a": name, f"{path}.b": other}
        layers[f"{path}.weight"] = (layer.base.weight, other, name)

    def layout(tensors):
        return {name: tensors[place].detach().numpy().copy() for place, name in places.items()}

    def logprobs_of(row):
        return hf_logprobs(model, row.token_ids)

    found = updated(model, *trajectories(8), logprobs_of, layout, STEPS)
    learned = found.steps[-1]
    with torch.no_grad():
        for place, name in places.items():
            model.get_parameter(place).copy_(torch.from_numpy(learned[name]))
        found.last_logprobs = [logprobs_of(row).numpy() for row in found.rows]
    found.merged = {
        place: base.numpy() + scale * learned[b] @ learned[a]
        for place, (base, b, a) in layers.items()
    }
    return found


@pytest.fixture(scope="module")
def cases(ranks, tmp_path_factory):
    """kind -> a model, what its adapters are before a step, and what they become by hand."""
    torch.set_num_threads(1)
    made = {}

    def case(kind):
        if kind not in made:
            folder = make(tmp_path_factory.mktemp(kind), kind, num_hidden_layers=4)
            pool = open_grid(ranks, folder, kind, "one")
            tmp_path = tmp_path_factory.mktemp("first")
            checkpoint, first = adapters(pool, folder, tmp_path, "step0")
            made[kind] = by_hand(folder, first, KINDS[kind])
            made[kind].folder, made[kind].first = folder, first
            made[kind].base = contents(checkpoint)
        return made[kind]

    return case


def check_equal(found, expected, gradients):
    assert found.keys() == expected.keys()
    for name, theirs in expected.items():
        steps = [np.abs(step[name]) for step in gradients]
        clear = np.all([(step > 1e-5) | (step == 0) for step in steps], axis=0)
        assert clear.mean() > 0.5, name
        assert np.abs(np.asarray(found[name]) - theirs)[clear].max() < 1e-5, name


@pytest.mark.parametrize(
    ("kind", "grid"),
    [
        *[("qwen3", grid) for grid in ("one", "tp2", "pp2", "cp2", "dp2")],
        ("qwen2", "tp2"),
        ("qwen3_moe", "tp2"),
        pytest.param("qwen3", "pp2_vpp2", marks=pytest.mark.long),
        pytest.param("qwen2", "tp4", marks=pytest.mark.long),
        pytest.param("qwen3_moe", "dp2_ep2", marks=pytest.mark.long),
        pytest.param("qwen3_moe", "cp2", marks=pytest.mark.long),
    ],
)
def test_a_grid_learns_what_torch_does(ranks, cases, tmp_path, kind, grid):
    """Gradients, their norm, three updates, logprobs and merged weights; the base is unmoved."""
    case = cases(kind)
    pool = open_grid(ranks, case.folder, kind, grid)
    _, first = adapters(pool, case.folder, tmp_path, "step0")
    assert equal(first, case.first)
    assert all(tensor.any() == (".lora_A." in name) for name, tensor in first.items())
    norms = []
    for _ in range(STEPS):
        metrics = pool.train(**case.batch)
        assert all(rank == metrics[0] for rank in metrics)
        norms.append(metrics[0]["grad_norm"])
    assert norms == pytest.approx(case.norms, rel=1e-4)
    checkpoint, learned = adapters(pool, case.folder, tmp_path, "step3")
    check_equal(learned, case.steps[-1], case.gradients)
    assert_close(collect(pool.logprobs(rows=case.rows)), case.last_logprobs, atol=2e-5)
    base = {key: tensor for key, tensor in contents(checkpoint).items() if "lora_" not in key}
    assert base and all(torch.equal(tensor, case.base[key]) for key, tensor in base.items())
    published = pool.weights()[0]
    assert_close({name: published[name] for name in case.merged}, case.merged, atol=2e-4)
    conversion.to_hf(checkpoint, case.folder, tmp_path / "hf")
    assert_close(load_file(tmp_path / "hf" / "model.safetensors"), published, atol=1e-6)


def test_what_is_published_loads_in_transformers_and_what_is_exported_in_peft(
    ranks, cases, tmp_path
):
    peft = pytest.importorskip("peft")
    case = cases("qwen2")
    pool = open_grid(ranks, case.folder, "qwen2", "one")
    pool.train(**case.batch, num_steps=2)
    checkpoint, _ = adapters(pool, case.folder, tmp_path, "step")
    conversion.to_hf(checkpoint, case.folder, tmp_path / "hf")
    base = AutoModelForCausalLM.from_pretrained(case.folder)
    ids = torch.from_numpy(case.rows[0].token_ids.astype(np.int64))[None]
    with torch.no_grad():
        without = base(ids).logits
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")(ids).logits
        adapted = peft.PeftModel.from_pretrained(base, tmp_path / "step_peft")(ids).logits
    torch.testing.assert_close(adapted, merged, atol=1e-5, rtol=0)
    assert (adapted - without).abs().max() > 1e-3


def test_a_sum_is_made_in_float32_and_rounded_once():
    """1 + 2 ^ -8 + 2 ^ -16 lies above the middle between 1 and the next number of bfloat16."""
    weight = torch.ones(1, 1, dtype=torch.bfloat16)
    left, right = torch.tensor([[2.0**-8, 2.0**-16]]), torch.ones(2, 1)
    assert merge(weight, left, right).item() == 1 + 2**-7
    assert merge(weight, left[:, :1], right[:1]).item() == 1


@pytest.mark.parametrize("grid", ["one", "tp2"])
def test_in_bfloat16_engines_are_given_bit_by_bit_what_the_trainer_computes_with(
    ranks, cases, tmp_path, grid
):
    case = cases("qwen3")
    pool = open_grid(ranks, case.folder, "qwen3", grid, dtype="bfloat16", optimizer={"lr": 0.03})
    before = pool.gathered(bucket_bytes=20_000)[0][1]
    pool.train(**case.batch, num_steps=2)
    mine = collect(pool.logprobs(rows=case.rows))
    sent = pool.weights()[0]
    specs, found = pool.gathered(bucket_bytes=20_000, again=True)[0]
    assert not np.array_equal(before[Q_PROJ], found[Q_PROJ])
    assert {spec.name for spec in specs if not spec.learns} == {
        "model.embed_tokens.weight", "lm_head.weight",
    }  # fmt: skip
    assert found.keys() == {spec.name for spec in specs if spec.learns}
    assert equal(found, {name: sent[name] for name in found})
    checkpoint, _ = adapters(pool, case.folder, tmp_path, "step")
    conversion.to_hf(checkpoint, case.folder, tmp_path / "hf")
    plain = opened(ranks, tmp_path / "hf", grid, budget=60, dtype="bfloat16")
    assert equal(collect(plain.logprobs(rows=case.rows)), mine)
    assert equal(plain.weights()[0], sent)


def test_of_a_model_that_sees_the_language_is_adapted_and_its_tower_is_sent_once(
    ranks, tmp_path, tmp_path_factory
):
    folder, (rows, advantages) = tmp_path_factory.mktemp("vl"), mixed_rows()
    make_seeing(folder)
    pool = opened(ranks, folder, "tp2", budget=200, actor={"lora": {"rank": 4}})
    before = pool.weights()[0]
    pool.train(rows=rows, advantages=advantages, num_steps=2)
    after = pool.weights()[0]
    specs, sent = pool.gathered(bucket_bytes=20_000)[0]
    fixed = {spec.name for spec in specs if not spec.learns}
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert changed == {name for name in after if name.split(".")[-2] in get_args(LoraTarget)}
    assert sum("visual" in name for name in fixed) == sum("visual" in name for name in after) > 10
    assert sent.keys() == after.keys() - fixed and changed <= sent.keys()
    # Towers have modules of such names, too (those of sound do): peft is told each by its own.
    _, exported = adapters(pool, folder, tmp_path, "step")
    record = json.loads((tmp_path / "step_peft" / "adapter_config.json").read_text())
    adapted = sorted(name.removesuffix(".weight") for name in changed)
    assert record["target_modules"] == adapted
    assert len(exported) == 2 * len(adapted)


def test_nothing_of_the_base_has_a_gradient_or_moments(ranks, cases):
    """Of rank 4: q and o between 32 and 64 channels, k and v 32 and 32, three of 32 and 48."""
    case = cases("qwen3")
    pool = open_grid(ranks, case.folder, "qwen3", "one")
    ((buffers, mains),) = pool.held()
    trained = 4 * 4 * (2 * (32 + 64) + 2 * (32 + 32) + 3 * (32 + 48))
    assert mains == sum(tensor.numel() for tensor in case.first.values()) == trained
    assert mains <= buffers < 1.1 * mains
    fixed = sum(tensor.size for tensor in pool.weights()[0].values())
    shape = read_architecture(case.folder)
    assert fit.count_elements(shape, [], LoraConfig(**KINDS["qwen3"])) == (trained, fixed)
    assert (
        fit.count_elements(shape, [], LoraConfig(rank=2, targets=["v_proj"])).trained == 4 * 2 * 64
    )
    assert fit.count_elements(shape, [], LoraConfig()) == (fixed, 0)


def test_a_checkpoint_is_loaded_at_whatever_grid_and_goes_on_bitwise(ranks, cases, tmp_path):
    case = cases("qwen3")
    pool = open_grid(ranks, case.folder, "qwen3", "tp2", dtype="bfloat16")
    pool.train(**case.batch, num_steps=2)
    before = tmp_path / "first"
    pool.save(folder=before)
    expected = contents(before)
    pool.train(**case.batch)
    further = pool.digest()
    pool = open_grid(ranks, case.folder, "qwen3", "tp2", dtype="bfloat16")
    assert pool.load(folder=before) == [2, 2]
    pool.train(**case.batch)
    assert pool.digest() == further
    for grid in ("pp2", "dp2", "one", "tp2"):
        pool = open_grid(ranks, case.folder, "qwen3", grid, dtype="bfloat16")
        assert pool.load(folder=before) == [2] * pool.size
        before = tmp_path / grid
        pool.save(folder=before)
        assert equal(contents(before), expected), grid


def test_a_reference_is_the_model_without_adapters(ranks, cases):
    case = cases("qwen3")
    pool = open_grid(ranks, case.folder, "qwen3", "one")
    before = collect(pool.logprobs(rows=case.rows))
    pool.keep()
    pool.train(**case.batch, num_steps=2)
    trained = pool.weights()[0]
    for _ in range(2):
        assert_close(collect(pool.kept_logprobs(rows=case.rows)), before)
        pool.keep(folder=case.folder)
    assert equal(pool.weights()[0], trained)


def test_a_model_does_not_begin_with_a_checkpoint_that_has_adapters(ranks, cases, tmp_path):
    case = cases("qwen3")
    pool = open_grid(ranks, case.folder, "qwen3", "one")
    checkpoint, _ = adapters(pool, case.folder, tmp_path, "step")
    with pytest.raises(ConfigError, match="adapters of rank 4; relax-hpc convert"):
        conversion.check_fits(checkpoint, read_architecture(case.folder))


@pytest.mark.parametrize(
    ("kind", "lora", "said"),
    [
        ("qwen3", {"rank": 33}, "actor.lora.rank = 33: a q_proj of 64 x 32 has no such rank; use"),
        ("qwen3_moe", {"rank": 2}, "experts cannot be adapted; use ['q_proj', 'k_proj',"),
        ("qwen3", {"rank": 2}, None),
        ("qwen3_moe", {"rank": 2, "targets": ATTENTION}, None),
    ],
)
def test_what_cannot_be_adapted_is_refused(cases, kind, lora, said):
    shape = read_architecture(cases(kind).folder)
    if said is None:
        fit.check_lora(LoraConfig(**lora), [], shape)
        return
    with pytest.raises(ConfigError) as refused:
        fit.check_lora(LoraConfig(**lora), [], shape)
    assert said in str(refused.value)
