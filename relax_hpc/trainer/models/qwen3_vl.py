"""Qwen3-VL: Qwen3, dense or with experts, with a vision encoder, and positions in time, y and x."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from relax_hpc.config.hf_config import ConfigJson, Table
from relax_hpc.trainer.models import qwen3, qwen3_moe
from relax_hpc.trainer.models.architecture import Architecture, Family, VisionArchitecture
from relax_hpc.trainer.models.fields import QWEN3_HEAD_DIM
from relax_hpc.trainer.models.names import Parameter, Shape

CORE, HF = "vision.", "model.visual."
"""Prefixes of the encoder's parameters: in the first stage's first chunk, and in a folder."""
ROPE_BASE = 5e5
"""Base of rotary positions if config.json has none."""


def read(config: ConfigJson) -> Architecture:
    text = config.table("text_config")
    language = qwen3.read_shape(text, QWEN3_HEAD_DIM, sees=True, rope_base=ROPE_BASE)
    return seeing(config, language)


def seeing(config: Table, language: Architecture) -> Architecture:
    """Returns the language model of `text_config` with the encoder of `vision_config`.

    Args:
        language: as read.

    Raises:
        ConfigError: they do not fit each other.
    """
    vision = config.table("vision_config")
    taps = vision.get("deepstack_visual_indexes")
    layers = vision.size("depth")
    if not isinstance(taps, list) or not all(type(x) is int and 0 <= x < layers for x in taps):
        raise vision.make_error(
            "deepstack_visual_indexes", f"layers below depth = {layers} expected"
        )
    if taps != sorted(set(taps)) or len(taps) > language.num_layers:
        raise vision.make_error(
            "deepstack_visual_indexes",
            f"rising numbers are expected, and at most {language.num_layers} of them, the layers "
            "of the language model",
        )
    positions = vision.size("num_position_embeddings")
    side = round(positions**0.5)
    if side * side != positions:
        raise vision.make_error("num_position_embeddings", "a square is expected")
    if vision.size("out_hidden_size") != language.hidden_size:
        raise vision.make_error(
            "out_hidden_size", f"text_config.hidden_size = {language.hidden_size} is expected"
        )
    hidden, heads = vision.size("hidden_size"), vision.size("num_heads")
    if hidden % (4 * heads):
        raise vision.make_error(
            "num_heads", f"a divisor of hidden_size / 4 = {hidden / 4:g} expected"
        )
    text = config.table("text_config")
    tied = config.flag("tie_word_embeddings")
    if text.flag("tie_word_embeddings", tied) != tied:
        raise text.make_error("tie_word_embeddings", f"that of the whole, {tied}, is expected")
    return replace(
        language,
        model_type=config.get("model_type"),
        tied_embeddings=tied,
        vision=VisionArchitecture(
            num_layers=layers,
            hidden_size=hidden,
            ffn_hidden_size=vision.size("intermediate_size"),
            num_heads=heads,
            patch=vision.size("patch_size"),
            time=vision.size("temporal_patch_size"),
            merge=vision.size("spatial_merge_size"),
            positions=side,
            rope_base=_rope_base(vision),
            out_size=language.hidden_size,
            taps=tuple(taps),
        ),
    )


def _rope_base(vision: Table) -> float:
    rope = vision.table("rope_parameters")
    if rope.get("rope_type", "axial") != "axial":
        raise rope.make_error("rope_type", "only 'axial' is supported")
    return rope.number("rope_theta", 10000.0)


def parameters(shape: Architecture) -> Iterator[Parameter]:
    yield from tower(shape)
    yield from in_language(qwen3.parameters(shape))


def in_language(of: Iterable[Parameter]) -> Iterator[Parameter]:
    """Renames parameters of a text model to their names in a vision model."""
    for parameter in of:
        yield parameter.rename("model.", "model.language_model.")


def tower(shape: Architecture) -> Iterator[Parameter]:
    """Yields the parameters of the encoder; every rank of the first stage has all of it."""
    assert shape.vision
    for name, size in _shapes(shape.vision):
        yield Parameter((CORE + name,), {HF + name: size})


def _shapes(vision: VisionArchitecture) -> Iterator[tuple[str, Shape]]:
    hidden, inner, merged = vision.hidden_size, vision.ffn_hidden_size, vision.hidden_size
    merged *= vision.merge**2
    yield "patch_embed.proj.weight", (hidden, 3, vision.time, vision.patch, vision.patch)
    yield "patch_embed.proj.bias", (hidden,)
    yield "pos_embed.weight", (vision.positions**2, hidden)
    for number in range(vision.num_layers):
        block = f"blocks.{number}."
        yield from norm(f"{block}norm1", hidden)
        yield from norm(f"{block}norm2", hidden)
        yield from linear(f"{block}attn.qkv", 3 * hidden, hidden)
        yield from linear(f"{block}attn.proj", hidden, hidden)
        yield from linear(f"{block}mlp.linear_fc1", inner, hidden)
        yield from linear(f"{block}mlp.linear_fc2", hidden, inner)
    mergers = [("merger", hidden)]
    mergers += [(f"deepstack_merger_list.{n}", merged) for n in range(len(vision.taps))]
    for name, normed in mergers:
        yield from norm(f"{name}.norm", normed)
        yield from linear(f"{name}.linear_fc1", merged, merged)
        yield from linear(f"{name}.linear_fc2", vision.out_size, merged)


def linear(name: str, rows: int, columns: int) -> Iterator[tuple[str, Shape]]:
    """Yields names and shapes of a matrix with a bias."""
    yield f"{name}.weight", (rows, columns)
    yield f"{name}.bias", (rows,)


def norm(name: str, channels: int) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (channels,)
    yield f"{name}.bias", (channels,)


FAMILY = Family(
    "qwen3_vl", "Qwen3VLForConditionalGeneration", read, qwen3.transformer, parameters,
)  # fmt: skip


def _read_moe(config: ConfigJson) -> Architecture:
    text = config.table("text_config")
    # transformers shares a weight of 1 among a token's experts, whatever is written.
    if not text.flag("norm_topk_prob", True):
        raise text.make_error("norm_topk_prob", "only true is supported: transformers does so")
    dense = qwen3.read_shape(text, sees=True, rope_base=ROPE_BASE)
    experts = replace(qwen3_moe.read_experts(text, dense.num_layers), norm_topk_prob=True)
    return seeing(config, replace(dense, experts=experts))


def _parameters_moe(shape: Architecture) -> Iterator[Parameter]:
    yield from tower(shape)
    for parameter in in_language(qwen3_moe.parameters(shape)):
        yield replace(parameter, transposed=bool(parameter.fused))


MOE = Family(
    "qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration", _read_moe,
    qwen3_moe.transformer, _parameters_moe, qwen3_moe.DEFAULTS, fuses_experts=True,
)  # fmt: skip
