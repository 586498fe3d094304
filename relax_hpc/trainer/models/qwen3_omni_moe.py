"""The thinker of Qwen3-Omni: Qwen3-MoE with a vision and an audio encoder.

The talker and code2wav, which speak, are in the same folder. They are not trained; exports copy
their tensors.
"""

from collections.abc import Iterator
from dataclasses import replace

from relax_hpc.config.hf_config import ConfigJson, Table
from relax_hpc.trainer.models import qwen3, qwen3_moe, qwen3_vl
from relax_hpc.trainer.models.architecture import (
    CHUNK,
    Architecture,
    AudioArchitecture,
    Family,
    tokens_of,
)
from relax_hpc.trainer.models.names import Parameter, Shape

CORE, HF = "audio.", "thinker.audio_tower."
"""Prefixes of the audio encoder, like `qwen3_vl.CORE` and `HF` for the vision encoder."""
THINKER = "thinker."
_ROPE_BASE = 1e6
_VISUAL = THINKER + "visual."
_MERGERS = (
    ("deepstack_merger_list.", "merger_list."),
    (".norm.", ".ln_q."),
    (".linear_fc1.", ".mlp.0."),
    (".linear_fc2.", ".mlp.2."),
)
"""Parts of names of mergers in Qwen3-VL, and here."""


def read(config: ConfigJson) -> Architecture:
    thinker = config.table("thinker_config")
    text = thinker.table("text_config")
    for table in (thinker, text):
        if table.flag("tie_word_embeddings"):
            raise table.make_error("tie_word_embeddings", "only false is supported")
    language = qwen3.read_shape(text, sees=True, rope_base=_ROPE_BASE)
    experts = qwen3_moe.read_experts(text, language.num_layers)
    sees = qwen3_vl.seeing(thinker, replace(language, experts=experts))
    return replace(
        sees,
        model_type=config.get("model_type"),
        audio=_audio(thinker.table("audio_config"), language.hidden_size),
    )


def _audio(audio: Table, out_size: int) -> AudioArchitecture:
    hidden, heads = audio.size("d_model"), audio.size("encoder_attention_heads")
    if hidden % heads or hidden % 2 or hidden < 4:
        raise audio.make_error(
            "encoder_attention_heads", f"a divisor of d_model = {hidden}, an even number, expected"
        )
    if audio.size("output_dim") != out_size:
        raise audio.make_error("output_dim", f"text_config.hidden_size = {out_size} is expected")
    together = audio.size("n_window_infer", 800)
    if together % CHUNK:
        raise audio.make_error(
            "n_window_infer", f"a multiple of 2 x n_window = {CHUNK} is expected"
        )
    return AudioArchitecture(
        num_layers=audio.size("encoder_layers"),
        hidden_size=hidden,
        ffn_hidden_size=audio.size("encoder_ffn_dim"),
        num_heads=heads,
        bins=audio.size("num_mel_bins"),
        channels=audio.size("downsample_hidden_size"),
        chunks=together // CHUNK,
        out_size=out_size,
    )


def parameters(shape: Architecture) -> Iterator[Parameter]:
    yield from hearing(shape)
    yield from seeing(shape)
    for parameter in qwen3_moe.parameters(shape):
        yield parameter.rename("", THINKER)


def seeing(shape: Architecture) -> Iterator[Parameter]:
    """Yields the parameters of the vision encoder: Qwen3-VL's under other names."""
    for parameter in qwen3_vl.tower(shape):
        (name,) = parameter.hf
        new = name.replace(qwen3_vl.HF, _VISUAL)
        if "merger" in new:
            for old, here in _MERGERS:
                new = new.replace(old, here)
        yield parameter.rename(name, new)


def hearing(shape: Architecture) -> Iterator[Parameter]:
    """Yields the parameters of the audio encoder, which lies beside the vision encoder."""
    assert shape.audio
    for name, size in _shapes(shape.audio):
        yield Parameter((CORE + name,), {HF + name: size})


def _shapes(audio: AudioArchitecture) -> Iterator[tuple[str, Shape]]:
    hidden, inner, channels = audio.hidden_size, audio.ffn_hidden_size, audio.channels
    for number, entering in enumerate((1, channels, channels), start=1):
        yield f"conv2d{number}.weight", (channels, entering, 3, 3)
        yield f"conv2d{number}.bias", (channels,)
    yield "conv_out.weight", (hidden, channels * tokens_of(audio.bins))
    for number in range(audio.num_layers):
        layer = f"layers.{number}."
        for projection in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield from qwen3_vl.linear(f"{layer}self_attn.{projection}", hidden, hidden)
        yield from qwen3_vl.linear(f"{layer}fc1", inner, hidden)
        yield from qwen3_vl.linear(f"{layer}fc2", hidden, inner)
        yield from qwen3_vl.norm(f"{layer}self_attn_layer_norm", hidden)
        yield from qwen3_vl.norm(f"{layer}final_layer_norm", hidden)
    yield from qwen3_vl.norm("ln_post", hidden)
    yield from qwen3_vl.linear("proj1", hidden, hidden)
    yield from qwen3_vl.linear("proj2", audio.out_size, hidden)


FAMILY = Family(
    "qwen3_omni_moe", "Qwen3OmniMoeForConditionalGeneration", read, qwen3_moe.transformer,
    parameters, qwen3_moe.DEFAULTS, kept=("talker.", "code2wav."),
)  # fmt: skip
